"""Cohorts of 1,000 clients by engine and client_block: seconds of a round, and memory.

``python benchmarks/bench_cohorts.py`` measures all widths; ``--engine batched --block 1000 --room 0.25`` one of them,
in an address space with so many GiB of room. Seconds are those of the processor, which other work changes little.
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
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from bench_clients import CLASSES, peak, resident, size, write_data
from torch import nn

from fl_lightning import IID, SGD, Arrays, FedAvg, FederatedTrainer
from fl_lightning.core import RoundContext
from fl_lightning.engine import EngineName
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.run import Run

COHORT, SAMPLES = 1_000, 10
BLOCKS = (1_000, 250, 100, 50, 10)


def cnn() -> nn.Module:
    """6,090 weights, for images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


class Clock(Callback):
    """Seconds of rounds, those of the processor; and room for so many GiB more than are in use before training."""

    def __init__(self, room: float) -> None:
        self.room = room
        self.seconds: list[float] = []

    def check(self, run: Run) -> None:
        if self.room:
            resource.setrlimit(resource.RLIMIT_AS, (int((resident(0) + self.room) * 2**30), -1))

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: Sequence[int]) -> None:
        self.started = time.process_time()

    def on_round_logged(self, run: Run, metrics: dict[str, float]) -> None:
        self.seconds.append(time.process_time() - self.started)


def measure(root: Path, engine: EngineName, width: int, room: float) -> None:
    """FedAvg with cohorts of 1,000 and one step on ten images."""
    m, clock = COHORT, Clock(room)
    data = Arrays(path=write_data(root, m * SAMPLES, 1, 8, 8), num_clients=m, partition=IID(), batch_size=SAMPLES)
    trainer = FederatedTrainer(
        max_rounds=8, clients_per_round=m, local_epochs=1, eval_every=8, accelerator="cpu", threads=1,
        engine=engine, client_block=width, callbacks=[clock], default_root_dir=str(root),
        enable_progress_bar=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        before = resident()
        run = trainer.fit(FedAvg(net=cnn(), optimizer=SGD(lr=0.1)), data)
    said = [str(w.message) for w in found if "out of memory" in str(w.message)]
    print(
        f"{engine:>10} {width:>6} {room:6g} {clock.seconds[0]:8.2f} "
        f"{statistics.median(clock.seconds[2:]):8.3f} {peak():6.2f} {peak() - before:6.2f} "
        f"{float(run.global_model.norm()):12.8f}",
        *said,
        sep="\n  " if said else " ",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["sequential", "batched", "graphed"])
    parser.add_argument("--block", type=int, default=COHORT)
    parser.add_argument("--room", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.engine:
        with tempfile.TemporaryDirectory() as folder:
            return measure(Path(folder), options.engine, options.block, options.room)
    print(f"torch {torch.__version__}, 1 thread, load average {os.getloadavg()[0]:.2f}")
    print(f"FedAvg, {size(cnn()):,} weights, cohorts of {COHORT:,}, one step on {SAMPLES} images; memory in GiB")
    print("    engine  block   room  first s  round s   peak   more  |w| after 8 rounds", flush=True)
    for engine, block in (("sequential", COHORT), *product(("batched", "graphed"), BLOCKS)):  # peak is of a process
        subprocess.run([sys.executable, __file__, f"--engine={engine}", f"--block={block}"], check=True)


if __name__ == "__main__":
    main()
