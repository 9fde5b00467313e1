"""Many clients: rounds, checkpoints and restarts as their number grows; a large net in little memory.

``python benchmarks/bench_clients.py store`` measures the store alone (the large net writes 21 GB to the folder after
``--root``), ``trainer`` whole runs of SCAFFOLD, ``seen`` checkpoints and restarts of runs that have seen every client
(1.3 GB), ``all`` everything. Seconds of ``seen`` are those of the processor, which other work on the machine changes
little; ``wall`` is by the clock.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_lightning import IID, SCAFFOLD, SGD, Arrays, Checkpoints, FederatedTrainer, ReplaySampler
from fl_lightning.core import RoundContext
from fl_lightning.core.files import write_atomically
from fl_lightning.core.state import State
from fl_lightning.trainer import resume
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.participation.samplers import UniformSampler
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage.client_store import ClientStore

NUMBERS = (100, 10_000, 1_000_000)
LARGE_M, COHORT, ROUNDS = 1_262, 10, 200
FEATURES, CLASSES = 32, 10


def small_net() -> nn.Module:
    """2,504 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 58), nn.ReLU(), nn.Linear(58, CLASSES))


def linear() -> nn.Module:
    """330 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))


def large_net() -> nn.Module:
    """4.1 million weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 4096), nn.ReLU(), nn.Linear(4096, 960), nn.ReLU(),
                         nn.Linear(960, CLASSES))  # fmt: skip


def size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def peak() -> float:
    """Peak memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)


def resident(pages: int = 1) -> float:
    """Memory of this process now, in GiB: in RAM; with 0 its address space."""
    return int(Path("/proc/self/statm").read_text().split()[pages]) * resource.getpagesize() / 2**30


def round_of(store: ClientStore, cohort: list[int], following: list[int], w: torch.Tensor) -> float:
    """Seconds for a round's get, stage and commit."""
    started = time.perf_counter()
    rows = {k: State({"c": store.get(k, w, {}).c + 1}) for k in cohort}
    store.read_ahead(following)
    store.stage(rows)
    store.commit()
    return time.perf_counter() - started


def checked(store: ClientStore, path: Path) -> tuple[float, float]:
    """Seconds for a checkpoint, and its size in MB."""
    started = time.perf_counter()
    content = {"clients": store.state_dict()}
    write_atomically(path, lambda file: torch.save(content, file))
    store.saved()
    return time.perf_counter() - started, path.stat().st_size / 1e6


def store_small(root: Path, m: int, memory: float) -> None:
    """All m clients have a row; then rounds of ten, a checkpoint after each fiftieth."""
    d = size(small_net())
    w, path = torch.zeros(d), root / "x.ckpt"
    store = ClientStore({"c": "zeros"}, w, memory)
    store.open(root / "clients")
    for first in range(0, m, 1000):
        store.stage({k: State({"c": torch.full((d,), float(k))}) for k in range(first, min(m, first + 1000))})
        store.commit()
    seconds, sampler = [], UniformSampler(COHORT)
    saved = checked(store, path)
    for t in range(ROUNDS):
        seconds.append(round_of(store, sampler(t, m, 0), sampler(t + 1, m, 0), w))
        if t % 50 == 49:
            saved = checked(store, path)
    started = time.perf_counter()
    store.load_state_dict(torch.load(path)["clients"], root / "clients")
    print(
        f"{m:>9,} {memory:6g} {statistics.median(seconds) * 1e3:9.2f} {max(seconds) * 1e3:9.2f} {saved[0]:8.2f} "
        f"{saved[1]:9.1f} {time.perf_counter() - started:8.2f} {peak():6.2f} {_on_disk(root) / 1e9:8.2f}"
    )
    store.close()


def store_large(root: Path) -> None:
    """Every client takes part twice, ten a round, a checkpoint after each tenth round, 1 GiB of rows in memory."""
    d = size(large_net())
    w, path = torch.zeros(d), root / "x.ckpt"
    store = ClientStore({"c": "zeros"}, w, 1.0)
    store.open(root / "clients")
    cohorts = 2 * [list(range(k, min(k + COHORT, LARGE_M))) for k in range(0, LARGE_M, COHORT)]
    seconds, saves = [], []
    for t, (cohort, following) in enumerate(zip(cohorts, [*cohorts[1:], []], strict=True)):
        seconds.append(round_of(store, cohort, following, w))
        if t % 10 == 9:
            saves.append(checked(store, path)[0])
    assert all(bool((store.get(k, w, {}).c == 2).all()) for k in range(0, LARGE_M, 100))
    half = len(seconds) // 2
    print(
        f"{LARGE_M} clients, {d:,} weights: {statistics.median(seconds[:half]):.3f} s a round at first contact, "
        f"{statistics.median(seconds[half:]):.3f} s ({max(seconds[half:]):.2f} at most) with rows to read; "
        f"{statistics.median(saves):.2f} s a checkpoint of {path.stat().st_size / 1e6:.0f} MB; "
        f"peak memory {peak():.2f} GiB, {_on_disk(root) / 1e9:.1f} GB on disk"
    )
    store.close()


def _on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


class Times(Callback):
    """Seconds of rounds, by the clock and of the processor."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
        self.started = time.process_time()

    def on_round_logged(self, run: Run, metrics: dict[str, float]) -> None:
        self.processor.append(time.process_time() - self.started)
        self.seconds.append(metrics["time/round_s"])


def write_data(root: Path, n: int, *shape: int) -> str:
    """Writes n training and 100 test samples; returns the file."""
    draw, path = np.random.default_rng(0), str(root / "data.npz")
    x = draw.standard_normal((n + 100, *(shape or (FEATURES,))), dtype=np.float32)
    y = draw.integers(0, CLASSES, n + 100)
    np.savez(path, x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:])
    return path


def run(root: Path, net: nn.Module, m: int, rounds: int, memory: float, **options: Any) -> tuple[Times, float, int]:
    """SCAFFOLD with one step on one sample per client; its rounds, the other seconds, and the clients seen."""
    path = write_data(root, m)
    started, times = time.perf_counter(), Times()
    data = Arrays(path=path, num_clients=m, partition=IID(), batch_size=1)
    trainer = FederatedTrainer(
        max_rounds=rounds, local_steps=1, eval_every=rounds, accelerator="cpu", threads=1, client_memory=memory,
        callbacks=[times, Checkpoints(every_n_rounds=50)], default_root_dir=str(root),
        enable_progress_bar=False, **options,
    )  # fmt: skip
    run = trainer.fit(SCAFFOLD(net=net, optimizer=SGD(lr=0.01)), data)
    total = time.perf_counter() - started
    return times, total - sum(times.seconds), len(run.clients)


def trainer_small(root: Path, m: int, memory: float) -> None:
    times, rest, seen = run(root, small_net(), m, ROUNDS, memory, clients_per_round=COHORT, engine="sequential")
    ms, processor = (sorted(1e3 * s for s in seconds[5:]) for seconds in (times.seconds, times.processor))
    print(
        f"{m:>9,} {memory:6g} {statistics.median(processor):9.2f} {statistics.median(ms):9.2f} {ms[-1]:9.2f} "
        f"{rest:8.2f} {seen:9,} {peak():6.2f}"
    )


def trainer_large(root: Path) -> None:
    """Every client takes part twice."""
    cohorts = 2 * [list(range(k, min(k + COHORT, LARGE_M))) for k in range(0, LARGE_M, COHORT)]
    times, rest, seen = run(root, large_net(), LARGE_M, len(cohorts), 1.0, sampler=ReplaySampler(cohorts))
    half = len(cohorts) // 2
    print(
        f"{seen} clients, {size(large_net()):,} weights, cohorts of {COHORT}, one step: "
        f"{statistics.median(times.seconds[:half]):.3f} s a round at first contact, "
        f"{statistics.median(times.seconds[half:]):.3f} s with rows to read; {rest:.0f} s otherwise, "
        f"peak memory {peak():.2f} GiB, {_on_disk(root) / 1e9:.1f} GB on disk"
    )


class Seen(Callback):
    """Gives every client a row before the first round, and makes a checkpoint after each round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.saves: list[tuple[float, float]] = []

    def on_fit_start(self, run: Run) -> None:
        self.opened, self.resident = time.process_time(), resident()
        clients, names, d = run.data.num_clients, run.clients.inits, run.objective.flat.d
        for first in range(0, 0 if run.rounds_done else clients, 1000):
            some = range(first, min(clients, first + 1000))
            run.clients.stage({k: State({name: torch.full((d,), float(k)) for name in names}) for k in some})
            run.clients.commit()

    def on_round_logged(self, run: Run, metrics: dict[str, float]) -> None:
        self.rounds.append(metrics["time/round_s"])
        started, processor = time.perf_counter(), time.process_time()
        resume.save(run, run.folder.last)
        self.saves.append((time.process_time() - processor, time.perf_counter() - started))


def trainer_seen(root: Path, m: int, memory: float) -> None:
    """Rounds of ten with a checkpoint each when all m clients have a row, then the same after a restart."""
    write_data(root, m)
    for part in ("begun", "resumed"):  # peak memory is that of a process
        within(root, "trainer_seen_once", m, memory, part == "resumed")


def trainer_seen_once(root: Path, m: int, memory: float, resumed: float) -> None:
    """One of the two."""
    seen, rounds, started = Seen(), 20 if resumed else 10, time.process_time()
    data = Arrays(path=str(root / "data.npz"), num_clients=m, partition=IID(), batch_size=1)
    data.setup("fit")
    divided = time.process_time()
    trainer = FederatedTrainer(
        max_rounds=rounds, clients_per_round=COHORT, local_steps=1, eval_every=rounds, accelerator="cpu", threads=1,
        client_memory=memory, callbacks=[seen, Checkpoints(every_n_rounds=rounds)], engine="sequential",
        default_root_dir=str(root), enable_progress_bar=False,
    )  # fmt: skip
    run = trainer.fit(SCAFFOLD(net=linear(), optimizer=SGD(lr=0.01)), data, "last" if resumed else None)
    saves = [statistics.median(seconds) for seconds in zip(*seen.saves, strict=True)]
    print(
        f"{m:>9,} {memory:6g} {'resumed' if resumed else 'begun':>8} {divided - started:7.2f} "
        f"{seen.opened - divided:8.2f} {1e3 * statistics.median(seen.rounds):9.2f} "
        f"{saves[0]:8.3f} {saves[1]:7.3f} {run.folder.last.stat().st_size / 1e6:9.1f} "
        f"{_on_disk(run.folder.clients) / 1e9:8.2f} {seen.resident:9.2f} {resident():7.2f} {peak():6.2f}",
        flush=True,
    )


PARTS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        store_small, store_large, trainer_small, trainer_large, trainer_seen, trainer_seen_once
    )
}  # fmt: skip


def alone(root: str | None, part: str, *args: float) -> None:
    """Runs a part in its own process and folder: peak memory is that of a process."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        within(folder, part, *args)


def within(folder: str | Path, part: str, *args: float) -> None:
    """Runs a part in its own process."""
    command = [sys.executable, __file__, part, "--root", str(folder), *(f"--arg={float(a)}" for a in args)]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["store", "trainer", "seen", "all", *PARTS])
    parser.add_argument("--root", help="folder for files; by default the system's temporary one")
    parser.add_argument("--arg", action="append", default=[], type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.part in PARTS:
        numbers = [int(a) if k == 0 else a for k, a in enumerate(options.arg)]
        return PARTS[options.part](Path(options.root), *numbers)
    print(f"torch {torch.__version__}, 1 thread, load average before {os.getloadavg()[0]:.2f}")
    if options.part in ("store", "all"):
        print(f"store alone, {size(small_net()):,} weights, every client has a row, cohorts of {COHORT}; memory in GiB")
        print("  clients budget  round ms   slowest   save s   save MB   load s   peak  disk GB", flush=True)
        for m in NUMBERS:
            for memory in (1.0, 0.0):
                alone(options.root, "store_small", m, memory)
        alone(options.root, "store_large")
    if options.part in ("trainer", "all"):
        print(f"SCAFFOLD, {size(small_net()):,} weights, cohorts of {COHORT}, one step; memory in GiB")
        print("  clients budget processor  round ms   slowest   rest s      seen   peak", flush=True)
        for m in NUMBERS:
            for memory in (1.0, 0.0):
                alone(options.root, "trainer_small", m, memory)
        alone(options.root, "trainer_large")
    if options.part in ("seen", "all"):
        print(f"SCAFFOLD, {size(linear()):,} weights, every client has a row, a checkpoint each round; memory in GiB")
        print("  clients budget          data s   open s  round ms   save s    wall   save MB  disk GB", end="  ")
        print("at start    now   peak", flush=True)
        for m in NUMBERS:
            for memory in (4.0, 0.0):
                alone(options.root, "trainer_seen", m, memory)
    print(f"load average after {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
