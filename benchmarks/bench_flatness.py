"""Flatness: the cost of a Hessian-vector product in gradients, of the default monitor in rounds, and memory.

``python benchmarks/bench_flatness.py products`` measures products with the Hessian, and what `flatness/convolution.py`
saves of one with the Hessian and of one with the Gauss-Newton matrix,
``monitor`` a run of FedAvg with the default FlatnessMonitor, ``memory`` peaks in processes of their own, ``all`` all.
Contestants take turns; reported are medians of the turns and of their ratios, in CPU time, with one thread.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import IID, SGD, Arrays, FedAvg, FederatedTrainer, FlatnessMonitor, HsuCNN, ResNet18GN
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.state import RoundContext
from fl_lightning.flatness import gauss_newton, gradient, hessian, lambda_max, operators
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.environment import keep_freed_memory

LOSS = nn.CrossEntropyLoss(reduction="none")
CLIENTS, IMAGES = 20, 500  # of a client
COHORT, STEPS, BATCH = 5, 8, 64
ROUNDS, EVERY, WORTH = 30, 10, 30

Batch = tuple[Tensor, Tensor]


def images(n: int) -> Batch:
    """Random images of ten classes, as the data module returns them."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(10, (n,), generator=draw)
    x = torch.randn(n, 3, 32, 32, generator=draw) + torch.randn(10, 3, 32, 32, generator=draw)[y]
    return x.contiguous(memory_format=torch.channels_last), y


def net_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return HsuCNN() if name == "HsuCNN" else ResNet18GN()


def products(name: str, samples: int, batch: int, turns: int) -> str:
    """Returns a row: milliseconds of a gradient, products in gradients, and what ConstantInputs saves of a product."""
    net, (x, y) = net_of(name), images(samples)
    v = torch.randn(FlatSpec(net).d)

    def batches() -> Iterator[Batch]:
        return zip(x.split(batch), y.split(batch), strict=True)

    kept, other = (matrix(net, LOSS, batches, keep_graph=True) for matrix in (hessian, gauss_newton))
    with patch.object(operators, "ConstantInputs", nullcontext):
        native, other_native = (matrix(net, LOSS, batches, keep_graph=True) for matrix in (hessian, gauss_newton))
    contestants: dict[str, Callable[[], object]] = {
        "gradient": lambda: gradient(net, LOSS, batches),
        "single": lambda: hessian(net, LOSS, batches, keep_graph=False) @ v,
        "kept": lambda: kept @ v,
        "native": lambda: native @ v,
        "other": lambda: other @ v,
        "other native": lambda: other_native @ v,
        "Lanczos": lambda: lambda_max(hessian(net, LOSS, batches, keep_graph=True), iterations=20, tol=1e-30),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for key, contestant in contestants.items():
            if key == "Lanczos" and turn > max(1, turns // 3):
                continue
            started = time.process_time()
            contestant()
            if turn:
                seconds[key].append((time.process_time() - started) / (20 if key == "Lanczos" else 1))
    ratios = {
        key: statistics.median(s / g for s, g in zip(seconds[key], seconds["gradient"], strict=False))
        for key in ("single", "kept", "Lanczos")
    }
    saved = [
        1 - statistics.median(own / torchs for own, torchs in zip(seconds[a], seconds[b], strict=True))
        for a, b in (("kept", "native"), ("other", "other native"))
    ]
    cells = [name, samples, batch, f"{1e3 * statistics.median(seconds['gradient']):.0f}"]
    return _row(*cells, *(f"{r:.2f}" for r in ratios.values()), *(f"{share:.0%}" for share in saved))


class Times(Callback):
    """CPU seconds of plain rounds, and the additional ones of rounds in which flatness is measured."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.measured: list[float] = []

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
        self.started = time.process_time()

    def on_round_logged(self, run: Run, metrics: dict[str, float]) -> None:
        seconds = time.process_time() - self.started
        if "time/flatness_s" in metrics:
            self.measured.append(seconds - statistics.median(self.rounds))
        else:
            self.rounds.append(seconds)


def monitor() -> str:
    """A row: CPU seconds of a round and of a measurement, and the longest measurement in rounds."""
    x, y = images(CLIENTS * IMAGES + 100)
    pixels = (40 * x.permute(0, 2, 3, 1) + 128).clamp(0, 255).to(torch.uint8).numpy()
    train, times = CLIENTS * IMAGES, Times()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.npz")
        np.savez(path, x_train=pixels[:train], y_train=y[:train], x_test=pixels[train:], y_test=y[train:])
        data = Arrays(path=str(path), num_clients=CLIENTS, partition=IID(), batch_size=BATCH)
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=COHORT, local_steps=STEPS, eval_every=ROUNDS, accelerator="cpu",
            threads=1, engine="sequential", callbacks=[FlatnessMonitor(every_n_rounds=EVERY), times],
            default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(FedAvg(net=HsuCNN(), optimizer=SGD(lr=0.05)), data)
    a_round, a_measurement = statistics.median(times.rounds), max(times.measured)
    return _row(f"{a_round:.2f}", f"{statistics.median(times.measured):.1f}", f"{a_measurement:.1f}",
                f"{a_measurement / a_round:.1f}")  # fmt: skip


def memory(samples: int, batch: int) -> str:
    """A row: peak memory of lambda_max in addition to data and weights, in MiB."""
    net, (x, y) = net_of("HsuCNN"), images(samples)
    gradient(net, LOSS, lambda: [(x[:8], y[:8])])  # the libraries' own memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lambda_max(hessian(net, LOSS, lambda: zip(x.split(batch), y.split(batch), strict=True)), iterations=2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _row(samples, batch, f"{(after - before) / 1024:.0f}")


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> None:
    print("\n" + _row(*cells) + "\n" + _row(*["---"] * len(cells)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["products", "monitor", "memory", "all"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--alone", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        return print(memory(*options.alone), flush=True)
    print(f"torch {torch.__version__}, 1 thread, load average before {os.getloadavg()[0]:.2f}")
    with keep_freed_memory(torch.device("cpu")):  # as in a run
        measure(options.part, options.turns)
    print(f"\nload average after {os.getloadavg()[0]:.2f}")


def measure(part: str, turns: int) -> None:
    if part in ("products", "all"):
        _head(
            "net",
            "images",
            "batch",
            "gradient, ms",
            "product",
            "graph kept",
            "step of Lanczos",
            "saved",
            "saved of Gauss-Newton",
        )
        for name, samples, batch in (
            ("HsuCNN", 64, 64), ("HsuCNN", 256, 64), ("HsuCNN", 256, 128), ("HsuCNN", 256, 256), ("ResNet18GN", 16, 16),
        ):  # fmt: skip
            print(products(name, samples, batch, turns), flush=True)
    if part in ("monitor", "all"):
        row = monitor()
        _head("a round, s", "a measurement, s", "the longest, s", f"in rounds (at most {WORTH} are allowed)")
        print(row, flush=True)
    if part in ("memory", "all"):
        _head("images", "batch", f"peak, MiB (budget {operators.KEEP_BYTES >> 20})")
        for samples in (1_000, 10_000):
            command = [sys.executable, __file__, "memory", "--alone", str(samples), "500"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
