"""Rounds of FedAvg with HsuCNN by hand in JAX: scan over the steps, vmap over the clients, a compiled function a round.

    python -m legs.jax_rounds '{"device": "cuda", "form": "bf16", "clients": 100, ...}'

It prints one line of JSON. It shows what a program of nothing but the arithmetic takes. Every client has the same
number of random images, a last batch is filled up, weights are equal, and nothing is checked, logged or saved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from statistics import median
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
import jax.numpy as jnp
import numpy as np

PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "highest"}
SHAPES = [(64, 3, 5, 5), (64, 64, 5, 5), (1600, 384), (384, 192), (192, 10)]
PAD = 4
Weights = list[tuple[Any, Any]]


def initial() -> Weights:
    """Weights and biases of all layers."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    weights = []
    for key, shape in zip(keys, SHAPES, strict=True):
        inputs, outputs = (shape[0], shape[1]) if len(shape) == 2 else (int(np.prod(shape[1:])), shape[0])
        weights.append((jax.random.normal(key, shape) / np.sqrt(inputs), jnp.zeros(outputs)))
    return weights


def net(weights: Weights, x: Any) -> Any:
    """The logits of images ``(n, 3, 32, 32)``."""
    *hidden, (w, b) = weights
    for w1, b1 in hidden[:2]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, w1, (1, 1), "VALID") + b1[:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for w1, b1 in hidden[2:]:
        x = jax.nn.relu(x @ w1 + b1)
    return x @ w + b


def loss(weights: Weights, x: Any, y: Any, dtype: Any) -> Any:
    """Cross-entropy; weights and activations are cast to ``dtype``."""
    logits = net(jax.tree.map(lambda v: v.astype(dtype), weights), x.astype(dtype)).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def augmented(x: Any, top: Any, left: Any, flip: Any) -> Any:
    """One crop and one flip for a whole batch."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
    x = jax.lax.dynamic_slice(padded, (0, 0, top, left), x.shape)
    return jnp.where(flip, x[..., ::-1], x)


def train(weights: Weights, x: Any, y: Any, draws: tuple[Any, ...], lr: float, dtype: Any) -> Weights:
    """All local steps of one client on its images ``x`` and labels ``y``."""

    def step(w: Weights, now: tuple[Any, ...]) -> tuple[Weights, None]:
        at, *crop = now
        batch = augmented(x[at].astype(jnp.float32) / 255, *crop)
        return jax.tree.map(lambda a, g: a - lr * g, w, jax.grad(loss)(w, batch, y[at], dtype)), None

    return jax.lax.scan(step, weights, draws)[0]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a round, the median; and of all until the first one has ended."""
    started = time.perf_counter()
    platform = jax.devices()[0].platform
    if (platform == "gpu") != (spec["device"] == "cuda"):
        raise RuntimeError(f"JAX runs on {platform}")
    clients, cohort, samples, shape = spec["clients"], spec["cohort"], spec["samples"], (spec["steps"], spec["batch"])
    x = jax.random.randint(jax.random.key(1), (clients, samples, 3, 32, 32), 0, 256, jnp.uint8)
    y = jax.random.randint(jax.random.key(2), (clients, samples), 0, 10, jnp.int32)
    local = partial(train, lr=spec["lr"], dtype=jnp.bfloat16 if spec["form"] == "bf16" else jnp.float32)

    @jax.jit
    def round_(w: Weights, x: Any, y: Any, ids: Any, draws: tuple[Any, ...]) -> Weights:
        if spec["vmap"]:
            ends = jax.vmap(lambda k, own: local(w, x[k], y[k], own))(ids, draws)
        else:
            ends = jax.lax.map(lambda one: local(w, x[one[0]], y[one[0]], one[1]), (ids, draws))
        return jax.tree.map(lambda v: v.mean(0), ends)

    draw, weights, seconds = np.random.default_rng(0), initial(), list[float]()

    def one(w: Weights) -> Weights:
        ids = draw.choice(clients, cohort, replace=False)
        epoch = draw.permuted(np.tile(np.arange(samples), (cohort, 1)), axis=1)
        order = np.resize(epoch.T, (shape[0] * shape[1], cohort)).T.reshape(cohort, *shape)
        crops = draw.integers(0, 2 * PAD + 1, (2, cohort, shape[0]))
        flips = draw.integers(0, 2, (cohort, shape[0])) == 1
        return jax.block_until_ready(round_(w, x, y, ids, (order, *crops, flips)))

    with jax.default_matmul_precision(PRECISIONS[spec["form"]]):
        weights = one(weights)
        first_s, begun = time.perf_counter() - started, time.perf_counter()
        while len(seconds) < spec["rounds"] and time.perf_counter() < begun + spec["seconds"]:
            before = time.perf_counter()
            weights = one(weights)
            seconds.append(time.perf_counter() - before)
    memory = jax.devices()[0].memory_stats() or {}
    peak = {"peak_gb": memory["peak_bytes_in_use"] / 2**30} if "peak_bytes_in_use" in memory else {}
    return {"round_s": median(seconds), "rounds": len(seconds), "first_s": first_s, "jax": jax.__version__, **peak}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
