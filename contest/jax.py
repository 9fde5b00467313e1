"""FedAvg and FedSAM by hand in JAX: vmap over the clients, scan over the steps, a compiled function for a round.

It shows what a program of nothing but the arithmetic takes. It leaves out what a framework is for: every client has the
same number of samples, a last batch is filled up, weights are equal, and nothing is checked, logged or saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Turns
from contest.workloads import RHO, work

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
import jax.numpy as jnp

PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "highest"}
PAD = 4
Weights = list[tuple[Any, Any]]


def pooled(x: Any) -> Any:
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def net(weights: Weights, x: Any, padding: str) -> Any:
    """Returns the logits of images ``(n, C, H, W)``: convolutions with ReLU and pooling, then linear layers."""
    *hidden, (w, b) = weights
    for w1, b1 in hidden:
        if w1.ndim == 4:
            x = pooled(jax.lax.conv_general_dilated(x, w1, (1, 1), padding) + b1[:, None, None])
        else:
            x = jax.nn.relu(x.reshape(len(x), -1) @ w1 + b1)
    return x.reshape(len(x), -1) @ w + b


NETS: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "W1": ("VALID", [(64, 3, 5, 5), (64, 64, 5, 5), (1600, 384), (384, 192), (192, 10)]),
    "W3-MLP": ("SAME", [(64, 64), (64, 10)]),
    "W3-CNN": ("SAME", [(8, 1, 3, 3), (16, 8, 3, 3), (64, 10)]),
}
"""Padding of the convolutions, and the shapes of all weights, by work."""


def initial(shapes: list[tuple[int, ...]]) -> Weights:
    weights = []
    for key, shape in zip(jax.random.split(jax.random.key(0), len(shapes)), shapes, strict=True):
        inputs, outputs = (int(np.prod(shape[1:])), shape[0]) if len(shape) == 4 else shape
        weights.append((jax.random.normal(key, shape) / np.sqrt(inputs), jnp.zeros(outputs)))
    return weights


def augmented(x: Any, top: Any, left: Any, flip: Any) -> Any:
    """Crops and flips a whole batch at once."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
    x = jax.lax.dynamic_slice(padded, (0, 0, top, left), x.shape)
    return jnp.where(flip, x[..., ::-1], x)


def run(settings: dict[str, Any], turns: Turns) -> None:
    """Trains; ``form`` is float32, tf32 or bf16, ``vmap`` whether all clients train at once, ``device`` cpu or cuda.

    Raises:
        RuntimeError: If JAX does not run there.
    """
    workload, device, form = work(settings), settings.get("device", "cpu"), settings.get("form", "float32")
    if device == "cpu" and workload.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    began = time.perf_counter()
    if ((platform := jax.devices()[0].platform) == "gpu") != (device == "cuda"):
        raise RuntimeError(f"JAX runs on {platform}")
    padding, shapes = NETS[settings["work"]]
    images, targets = workload.arrays()
    x, y = jnp.asarray(images.numpy()), jnp.asarray(targets.numpy(), jnp.int32)
    parts = workload.parts(len(images))
    samples = min(int(workload.samples), *map(len, parts))
    clients = np.stack([part.numpy()[:samples] for part in parts])
    dtype = jnp.bfloat16 if form == "bf16" else jnp.float32

    def loss(w: Weights, x: Any, y: Any) -> Any:
        logits = net(jax.tree.map(lambda v: v.astype(dtype), w), x.astype(dtype), padding).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def train(w: Weights, x: Any, y: Any, draws: tuple[Any, ...]) -> Weights:
        """Takes all local steps of a client; its draws are its samples, and the crop and flip of each step."""

        def step(w: Weights, step_draws: tuple[Any, ...]) -> tuple[Weights, None]:
            indices, *crop = step_draws
            batch, labels = x[indices].astype(jnp.float32) / workload.scale, y[indices]
            batch = augmented(batch, *crop) if workload.augment else batch
            g = jax.grad(loss)(w, batch, labels)
            if settings["method"] == "FedSAM":
                scale = RHO / (jnp.sqrt(sum(jnp.vdot(v, v) for v in jax.tree.leaves(g))) + 1e-12)
                g = jax.grad(loss)(jax.tree.map(lambda a, e: a + scale * e, w, g), batch, labels)
            return jax.tree.map(lambda a, e: a - workload.lr * e, w, g), None

        return jax.lax.scan(step, w, draws)[0]

    over_clients: Callable[..., Any] = jax.vmap if settings.get("vmap", True) else lambda f: lambda v: jax.lax.map(f, v)

    @jax.jit
    def round_(w: Weights, x: Any, y: Any, draws: tuple[Any, ...]) -> Weights:
        return jax.tree.map(lambda v: v.mean(0), over_clients(lambda client_draws: train(w, x, y, client_draws))(draws))

    draw, weights, first, shape = np.random.default_rng(0), initial(shapes), 0.0, (workload.cohort, workload.steps)
    turns.ready(jax=jax.__version__)
    with jax.default_matmul_precision(PRECISIONS[form]):
        while True:
            started = time.perf_counter()
            cohort = clients[draw.choice(workload.clients, workload.cohort, replace=False)]
            order = np.resize(draw.permuted(cohort, axis=1).T, (workload.steps * workload.batch, workload.cohort)).T
            crops, flips = draw.integers(0, 2 * PAD + 1, (2, *shape)), draw.integers(0, 2, shape) == 1
            weights = jax.block_until_ready(
                round_(weights, x, y, (order.reshape(*shape, workload.batch), *crops, flips))
            )
            ended = time.perf_counter()
            first = first or ended - began
            peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
            turns.done(ended - started, first_s=first, device_gb=peak and peak / 2**30)
