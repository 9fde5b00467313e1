"""Curvature of a transformer with LoRA: this package beside curvlinops and hessian-eigenthings.

``pip install hessian-eigenthings`` first; curvlinops is among the packages of ``make dev``. On ``TextTransformer`` with
adapters of rank 8 in ``q`` and ``v`` and a trained head, each library computes the largest eigenvalue of the Hessian
and of the Gauss-Newton matrix, whole and of the block of each layer, and the trace of the Gauss-Newton matrix.
Contestants take turns in one process, with one thread; reported are medians of their CPU seconds, their products, and
the peak of memory above data and net (on Linux), each in a process of its own. Results must agree: eigenvalues to 1e-3,
traces to five standard errors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning import LoRA, TextTransformer
from fl_lightning.commands.shared.prediction import peak_memory
from fl_lightning.flatness import gauss_newton, gradient, hessian, lambda_max, layers, trace

LOSS = nn.CrossEntropyLoss(reduction="none")
BATCH, LENGTH, VOCABULARY = 64, 64, 30_000
TOL, STEPS, PROBES = 1e-3, 20, 60
"""Relative residual of eigenvalues; steps of Lanczos where a library does not stop by itself; products of a trace."""
QUANTITIES = "lambda_max of H", "lambda_max of G", "lambda_max of H by layer", "lambda_max of G by layer", "trace of G"

Found = tuple[list[float], int, float]
"""Values, products with a matrix, and the standard error of a random estimate, if it is known."""


@dataclass(frozen=True)
class Problem:
    """A net, batches of the same size (one library takes the mean of their means), and names of the groups."""

    net: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    groups: list[list[str]]


def problem(samples: int, layered: bool) -> Problem:
    torch.manual_seed(0)
    net = LoRA(TextTransformer(VOCABULARY, LENGTH), targets=["q", "v"], rank=8, trained=["head"]).eval()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in named.values():  # else B is zero, and so is the block of A
            p.add_(0.05 * torch.randn_like(p))
    x, y = torch.randint(VOCABULARY, (samples, LENGTH)), torch.randint(4, (samples,))
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    return Problem(net, batches, [*layers(named).values()] if layered else [list(named)])


def ours(of: Problem, what: str) -> Found:
    make: Callable[..., Any] = hessian if " H" in what else gauss_newton
    if what.startswith("trace"):
        estimate = trace(make(of.net, LOSS, of.batches), samples=PROBES)
        return [estimate.value], estimate.samples, estimate.error
    found = [lambda_max(make(of.net, LOSS, of.batches, parameters=group), tol=TOL) for group in of.groups]
    return [pair.value for pair in found], sum(pair.iterations for pair in found), 0.0


def curvlinops(of: Problem, what: str) -> Found:
    import curvlinops
    from scipy.sparse.linalg import LinearOperator, eigsh

    def counted(by: Any) -> Any:
        def product(v: Any) -> Any:
            products.append(1)
            return by @ v

        return LinearOperator(by.shape, product, dtype="float32")

    kind = curvlinops.HessianLinearOperator if " H" in what else curvlinops.GGNLinearOperator
    values, products = list[float](), list[int]()
    for group in of.groups:
        params = [p for name, p in of.net.named_parameters() if name in group]
        matrix = kind(of.net, nn.CrossEntropyLoss(), params, of.batches, check_deterministic=False)
        if what.startswith("trace"):
            return [float(curvlinops.hutchpp_trace(matrix, PROBES))], PROBES, 0.0
        top = eigsh(counted(matrix.to_scipy()), k=1, which="LA", tol=TOL, return_eigenvectors=False)
        values.append(float(top[0]))
    return values, len(products), 0.0


def eigenthings(of: Problem, what: str) -> Found:
    import hessian_eigenthings as library

    loss, values = nn.CrossEntropyLoss(), list[float]()
    for group in of.groups:
        only = {"param_filter": lambda name, _, group=group: name in group}
        if " H" in what:
            matrix = library.HessianOperator(of.net, of.batches, library.supervised_loss(loss), **only)
        else:
            outputs = library.supervised_forward, library.supervised_loss_of_output(loss)
            matrix = library.GGNOperator(of.net, of.batches, *outputs, **only)
            # else the basis of Lanczos keeps the graphs of all products: 4.5 GB of 64 samples
            matrix.matvec = lambda v, product=matrix.matvec: product(v).detach()
        if what.startswith("trace"):
            return [library.trace(matrix, num_matvecs=PROBES, seed=0).estimate], PROBES, 0.0
        values.append(float(library.lanczos(matrix, k=1, max_iter=STEPS, which="LA", seed=0).eigenvalues[0]))
    return values, STEPS * len(of.groups), 0.0


LIBRARIES: dict[str, Callable[[Problem, str], Found]] = {
    "fl_lightning": ours, "curvlinops": curvlinops, "hessian-eigenthings": eigenthings
}  # fmt: skip


def agree(found: dict[str, Found]) -> str:
    """Returns the largest relative difference to ours, or ends."""
    (values, _, error), *others = found.values()
    apart = [max(abs(a - b) for a, b in zip(values, other, strict=True)) for other, *_ in others]
    wrong = [
        abs(a - b) > (5 * 2**0.5 * error or 1e-3 * abs(a))
        for other, *_ in others
        for a, b in zip(values, other, strict=True)
    ]
    if any(wrong):
        sys.exit(f"error: the libraries do not agree: {found}")
    return f"{max(apart) / max(map(abs, values)):.1e}"


def peak(library: str, what: str, samples: int) -> float:
    """Returns MiB of memory of a computation, above what data, net, libraries and a gradient need."""
    of = problem(samples, "by layer" in what)
    first = Problem(of.net, [(of.batches[0][0][:2], of.batches[0][1][:2])], of.groups[:1])
    gradient(of.net, LOSS, first.batches)
    LIBRARIES[library](first, "lambda_max of H")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what the process has
    before = peak_memory()
    LIBRARIES[library](of, what)
    return (peak_memory() - before) / 2**20


def measured_alone(library: str, what: str, samples: int) -> str:
    command = [sys.executable, __file__, "--samples", str(samples), "--alone", library, what]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantities", nargs="*", default=QUANTITIES, help="; ".join(QUANTITIES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--samples", type=int, default=256, help=f"a multiple of {BATCH}")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        return print(f"{peak(*options.alone, options.samples):.0f}")
    print(f"torch {torch.__version__}, 1 thread, load average before {os.getloadavg()[0]:.2f}", flush=True)
    row = partial(print, sep=" | ", flush=True)
    row("quantity", "library", "value, the largest", "products", "CPU seconds", "ms a product", "peak, MiB", "apart")
    for what in options.quantities:
        of = problem(options.samples, "by layer" in what)
        seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        found: dict[str, Found] = {}
        for turn in range(options.turns + 1):
            for library, compute in LIBRARIES.items():
                torch.manual_seed(0)
                started = time.process_time()
                found[library] = compute(of, what)
                if turn or not options.turns:
                    seconds[library].append(time.process_time() - started)
        apart = agree(found)
        for library, (values, products, _) in found.items():
            each = statistics.median(seconds[library])
            memory = measured_alone(library, what, options.samples)
            row(
                what,
                library,
                f"{max(values):.5g}",
                products,
                f"{each:.2f}",
                f"{1e3 * each / products:.0f}",
                memory,
                apart,
            )
    print(f"load average after {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
