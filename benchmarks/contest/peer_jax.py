"""W3 by hand in JAX: vmap over the clients, scan over the steps, a compiled function for a round.

It shows what a program of nothing but the arithmetic takes. It leaves out what a framework is for: every client has the
same number of samples, a last batch is filled up, weights are equal, and nothing is checked, logged or saved.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from contest.worker import Turns
from contest.workloads import RHO, Work

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import jax
import jax.numpy as jnp

Weights = dict[str, Any]


def mlp(w: Weights, x: Any) -> Any:
    return jax.nn.relu(x.reshape(len(x), -1) @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


def cnn(w: Weights, x: Any) -> Any:
    for layer in "12":
        x = jax.lax.conv_general_dilated(x, w["w" + layer], (1, 1), "SAME") + w["b" + layer][:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ w["w3"] + w["b3"]


SHAPES: dict[str, tuple[Callable[[Weights, Any], Any], list[tuple[int, ...]]]] = {
    "W3-MLP": (mlp, [(64, 64), (64, 10)]),
    "W3-CNN": (cnn, [(8, 1, 3, 3), (16, 8, 3, 3), (64, 10)]),
}


def run(work: Work, spec: dict[str, Any], turns: Turns) -> None:
    net, shapes = SHAPES[work.name]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    weights: Weights = {}
    for i, (key, shape) in enumerate(zip(keys, shapes, strict=True), 1):
        weights[f"w{i}"] = 0.1 * jax.random.normal(key, shape)
        weights[f"b{i}"] = jnp.zeros(shape[1] if len(shape) == 2 else shape[0])
    images, targets = work.arrays()
    x, y = jnp.asarray(images.numpy() / work.scale, jnp.float32), jnp.asarray(targets.numpy())
    n = min(len(part) for part in work.parts(len(images)))
    parts = np.stack([part.numpy()[:n] for part in work.parts(len(images))])

    def loss(w: Weights, x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(net(w, x)), y[:, None], 1).mean()

    def step(w: Weights, batch: tuple[Any, Any]) -> tuple[Weights, None]:
        g = jax.grad(loss)(w, *batch)
        if spec["method"] == "FedSAM":
            scale = RHO / (jnp.sqrt(sum(jnp.vdot(v, v) for v in jax.tree.leaves(g))) + 1e-12)
            g = jax.grad(loss)(jax.tree.map(lambda a, e: a + scale * e, w, g), *batch)
        return jax.tree.map(lambda a, e: a - work.lr * e, w, g), None

    @jax.jit
    def round_(w: Weights, samples: Any) -> Weights:
        locals_ = jax.vmap(lambda x, y: jax.lax.scan(step, w, (x, y))[0])(x[samples], y[samples])
        return jax.tree.map(lambda v: v.mean(0), locals_)

    draw = np.random.default_rng(0)
    turns.ready()
    for _ in itertools.count():
        started = time.perf_counter()
        cohort = parts[draw.choice(work.clients, work.cohort, replace=False)]
        order = np.resize(draw.permuted(cohort, axis=1).T, (work.steps * work.batch, work.cohort)).T
        weights = jax.block_until_ready(round_(weights, order.reshape(work.cohort, work.steps, work.batch)))
        turns.round(time.perf_counter() - started)
