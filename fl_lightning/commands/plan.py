"""``fl-lightning plan``: a few rounds of a run, measured here on one process, and arithmetic."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import State, require
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer import collectives
from fl_lightning.trainer.callbacks import Callback, Checkpoints, FlatnessMonitor, Progress
from fl_lightning.trainer.trainer import FederatedTrainer

if TYPE_CHECKING:
    from fl_lightning.commands.cli import FederatedCLI

SUMMARY = "Predict hours, memory and bits of a fit, from a few rounds that are measured here."

FEWEST, MOST, BUDGET = 4, 20, 5.0
"""Fewest and most rounds that are measured, and the seconds after which no further one begins."""
INSIDE = {"cpu": (3e-4, 1e9), "cuda": (3e-5, 1e11)}
"""Assumed latency (s) and rate (bytes/s) between the processes of a node, by device."""
ACROSS = 1e-4
"""Assumed latency (s) between nodes."""
KEPT = (
    "max_rounds", "sampler", "local_epochs", "local_steps", "precision", "client_block", "compile", "deterministic",
    "client_memory", "seed", "tf32",
)  # fmt: skip
"""Settings of the trainer that the measured rounds share."""


@dataclass(frozen=True)
class Part:
    """Repeated work of a run.

    Attributes:
        name: Its name.
        times: How often the run does it.
        each: Seconds of one time.
    """

    name: str
    times: int
    each: float

    @property
    def seconds(self) -> float:
        """Its share of the run."""
        return self.times * self.each


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        devices: Processes of a node.
        nodes: Nodes.
        engine: The engine; for "auto" the one that was chosen.
        rounds: Rounds of the run, T.
        measured: Rounds that were measured.
        setup: Seconds before the first round, without the start of the processes.
        parts: The work of the run, from its first round on.
        memory: Bytes of main memory of the first process at its peak.
        device_memory: Bytes on its accelerator at its peak; 0 on a CPU.
        contents: Bytes of weights and server state, clients' state, and data.
        disk: Bytes of checkpoints and clients' state in the run folder at the end.
        bits: ``comm/total_bits`` at the end of the run.
        moved: Bytes that processes send each other.
        assumptions: One sentence each.
    """

    devices: int
    nodes: int
    engine: str
    rounds: int
    measured: int
    setup: float
    parts: list[Part]
    memory: int
    device_memory: int
    contents: dict[str, int]
    disk: int
    bits: int
    moved: int
    assumptions: list[str]

    @property
    def seconds(self) -> float:
        """From the first round to the end of the run."""
        return sum(part.seconds for part in self.parts)

    def show(self) -> None:
        """Prints a table."""
        console = Console()
        table = Table("", "times", "each", "together", title=f"{_time(self.seconds)} for {self.rounds} rounds")
        for column in table.columns[1:]:
            column.justify = "right"
        for part in self.parts:
            if part.seconds >= self.seconds / 1000:
                table.add_row(part.name, f"{part.times:,}", _time(part.each), _time(part.seconds))
        console.print(table)
        world = self.devices * self.nodes
        known = ", ".join(f"{name} {_bytes(size)}" for name, size in self.contents.items() if size)
        on_device = f", {_bytes(self.device_memory)} on its device" if self.device_memory else ""
        whose = f"first of {world} processes" if world > 1 else "1 process"
        for line in (
            f"engine: {self.engine}; {self.measured} rounds measured; {_time(self.setup)} before the first one",
            f"memory: {_bytes(self.memory)}{on_device} ({whose}); of it {known}",
            f"disk: {_bytes(self.disk)} in the run folder",
            f"on the wire: {self.bits:,} bits ({_bytes(self.bits / 8)}) between clients and server",
            *([f"between processes: {_bytes(self.moved)}"] if world > 1 else []),
            *(f"assumed: {sentence}" for sentence in self.assumptions),
        ):
            console.print(line, highlight=False, soft_wrap=True)


class Clock(Callback):
    """Measures the rounds of a run and its other callbacks, and ends the run after some rounds.

    Args:
        others: The other callbacks; they work in every round, whatever their ``every_n_rounds``.

    Attributes:
        seconds: By part of a round and round, from 1.
        upload: Bytes that clients have uploaded.
        began: When the first round began.
        run: The run.
    """

    def __init__(self, others: Sequence[Callback]) -> None:
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.rounds, self.upload, self.began = 0, 0, 0.0
        self.run: Any = None
        for callback in others:
            if hasattr(callback, "every_n_rounds"):
                callback.every_n_rounds = 1
            name = type(callback).__name__
            for hook, part in (("on_round_end", name), ("on_round_logged", name), ("on_fit_end", "end")):
                setattr(callback, hook, self.timed(part, getattr(callback, hook)))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that adds its seconds to those of a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = function(*args, **kwargs)
            self.seconds[name][self.rounds] += time.perf_counter() - started
            return found

        return timed

    def each(self, name: str) -> float:
        """Returns the mean seconds of a part over all rounds but the first."""
        times = list(self.seconds[name].values()) or [0.0]
        return fmean(times[1:] or times)

    def on_fit_start(self, run: Any) -> None:
        """The first round begins."""
        self.run, self.began = run, time.perf_counter()

    def on_round_start(self, run: Any, ctx: Any, cohort: list[int]) -> None:
        """Counts the rounds."""
        self.rounds += 1

    def on_local_end(self, run: Any, result: Any) -> None:
        """Counts what a client uploads."""
        self.upload += sum(value.nbytes for value in result.upload.values())

    def on_round_end(self, run: Any) -> None:
        """Reads the round's own clock, evaluates, and ends the run when enough is measured."""
        self.seconds["rest"][self.rounds] = rest = run.metrics["time/orchestration_s"]
        self.seconds["training"][self.rounds] = run.metrics["time/round_s"] - rest
        for split in ("val", "test") if run.data.val_fraction else ("test",):
            run.log(self.timed(split, run.evaluate)(split))
        run.should_stop = self.rounds >= MOST or (self.rounds >= FEWEST and time.perf_counter() - self.began > BUDGET)


def measure(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, threads: int | None
) -> tuple[Clock, str, int]:
    """Runs a few rounds of a copy in a temporary folder; returns their clock, the engine, and a checkpoint's bytes."""
    callbacks = [copy.deepcopy(c) for c in trainer.callbacks if not isinstance(c, Progress)]
    clock = Clock(callbacks)
    with tempfile.TemporaryDirectory(prefix="fl_lightning_plan_") as folder, contextlib.redirect_stdout(io.StringIO()):
        trial = FederatedTrainer(
            **{name: getattr(trainer, name) for name in KEPT},
            engine=trainer.engine,
            eval_every=trainer.max_rounds,  # the clock evaluates
            accelerator=trainer.fabric.device.type,
            threads=threads,
            callbacks=[*callbacks, clock],
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        run = trial.fit(copy.deepcopy(model), data)
        return clock, run.engine_name, run.folder.last.stat().st_size


def plan(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    devices: int = 1,
    nodes: int = 1,
    bandwidth: float = 10.0,
) -> Plan:
    """Predicts what ``trainer.fit(model, data)`` takes, from a few of its rounds.

    Trainer and model stay as they are; the data are loaded.

    Args:
        trainer: The trainer, on a device of the kind that the run uses.
        model: The local objective.
        data: The clients' data.
        devices: Processes of a node.
        nodes: Nodes.
        bandwidth: Between nodes, in Gbit/s.

    Raises:
        UserError: If a number is out of range, or where `fit` raises one.
    """
    require(devices >= 1, "devices", devices, "at least 1")
    require(nodes >= 1, "nodes", nodes, "at least 1")
    require(bandwidth > 0, "bandwidth", bandwidth, "Gbit/s between nodes, above 0")
    cpu = trainer.fabric.device.type == "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = trainer.threads if trainer.threads or devices == 1 else max(1, cores // devices)  # as Fabric divides them
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    clock, engine, checkpoint = measure(trainer, model, data, share)
    memory, device_memory = peak_memory(), 0 if cpu else torch.cuda.max_memory_allocated()
    run, rounds, world, measured = clock.run, trainer.max_rounds, devices * nodes, clock.rounds

    # cohorts, and local steps one after another: of all clients on one process, and of the busiest of many
    cohorts = [trainer.sampler(t, data.num_clients, trainer.seed) for t in range(rounds)]
    sizes, seen = [len(cohort) for cohort in cohorts], len({k for cohort in cohorts for k in cohort})
    steps = functools.cache(lambda k: data.batches_per_client(k, trainer.local_epochs, trainer.local_steps))
    of = [[steps(k) for k in cohort] for cohort in cohorts]
    alone, busiest = ([makespan(n, many, engine, trainer.client_block) for n in of] for many in (1, world))

    # bytes: the clients' state, and what processes send each other: rows of state, uploads, two sums of them
    w = run.server.w
    row = sum(value.nbytes for value in State.initial(model.client_inits(), w, w).values())
    room = int(trainer.client_memory * 2**30)
    kept = min(row * seen, room)
    growth, upload = kept - min(row * len(run.clients), room), clock.upload / sum(sizes[:measured])
    most = fmean(max(map(len, collectives.assign(n, world))) for n in of)
    gathered, reduced = (upload, 2 * upload) if trainer.deterministic else (0, 4 * upload)
    moved = (world - 1) * (most * (2 * row * model.phases + gathered) + reduced)

    # seconds
    crowd = max(1.0, devices * (share or torch.get_num_threads()) / cores) if cpu else 1.0
    step = clock.each("training") / fmean(alone[1:measured] or alone[:1])
    first = sum(max(0.0, times[1] - clock.each(name)) for name, times in clock.seconds.items())
    latency, rate = (ACROSS, bandwidth * 1e9 / 8) if nodes > 1 else INSIDE["cpu" if cpu else "cuda"]
    messages = model.phases * 2 * (len(model.client_inits()) + len(model.up)) * math.log2(world)
    parts = [
        Part("first round, once more", 1, first * crowd),
        Part("local training", rounds, fmean(busiest) * step * crowd),
        Part("orchestration, logs", rounds, clock.each("rest") * crowd),
        Part("between processes", rounds, messages * latency + moved / rate),
    ]
    evaluations = due(rounds, trainer.eval_every, trainer.eval_last)
    parts += [
        Part(f"evaluation ({split})", evaluations, clock.each(split) * crowd / world)
        for split in ("val", "test")
        if split in clock.seconds
    ]
    files = 1
    for callback in trainer.callbacks:
        name, times = type(callback).__name__, due(rounds, getattr(callback, "every_n_rounds", 1))
        factor = 1 / world if isinstance(callback, FlatnessMonitor) else 1.0  # the processes share its work
        if isinstance(callback, Checkpoints):
            factor, files = 1 + growth / checkpoint, 1 + times * callback.keep_all
        parts.append(Part(name, times, clock.each(name) * crowd * factor))
    parts.append(Part("end", 1, clock.each("end") * crowd))

    assumptions = [
        "all devices are as fast as this one while it was measured, and nothing else runs on them",
        "later rounds take as long as the first ones; the progress bar, and loggers but metrics.csv, take no time",
    ]
    if crowd > 1:
        threads = f"{devices} processes with {share} threads share {cores} cores"
        assumptions.append(f"{threads}: all takes {crowd:.3g} times as long")
    if world > 1:
        where = "between nodes" if nodes > 1 else "within a node"
        assumptions.append(f"a message {where} takes {latency * 1e3:g} ms and 1 s for {rate * 8 / 1e9:g} Gbit")
    return Plan(
        devices=devices,
        nodes=nodes,
        engine=engine,
        rounds=rounds,
        measured=measured,
        setup=clock.began - started,
        parts=parts,
        memory=memory + (2 if cpu else 1) * growth,  # a checkpoint copies the rows
        device_memory=device_memory and device_memory + growth,
        contents={
            "weights and server": sum(value.nbytes for value in run.server.values()),
            "clients' state": kept,
            "data": sum(value.nbytes for value in vars(data).values() if isinstance(value, Tensor)),
        },
        disk=files * (checkpoint + growth) + row * seen - kept,
        bits=int(run.metrics["comm/total_bits"]) // sum(sizes[:measured]) * sum(sizes),
        moved=round(moved * rounds),
        assumptions=assumptions,
    )


def run(
    cli: FederatedCLI,
    devices: int | None = None,
    nodes: int | None = None,
    bandwidth: float = 10.0,
    json: bool = False,
) -> None:
    """Predicts hours, memory and bits of a fit.

    Args:
        cli: Builds the run.
        devices: Devices (processes) per node; null: trainer.devices.
        nodes: Nodes; null: trainer.num_nodes.
        bandwidth: Between nodes, in Gbit/s.
        json: Print one line of JSON in place of a table.
    """
    asked = cli.config.trainer
    for key, value, option in (("devices", devices, "devices"), ("num_nodes", nodes, "nodes")):
        known = value is not None or str(asked[key]).isdecimal()
        require(known, f"trainer.{key}", asked[key], f"give their number by --{option}")
    made = cli.build({"trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto"})
    devices = int(asked.devices) if devices is None else devices
    nodes = int(asked.num_nodes) if nodes is None else nodes
    found = plan(made.trainer, made.model, made.data, devices, nodes, bandwidth)
    if json:
        print(dumps(asdict(found) | {"seconds": found.seconds}))
    else:
        found.show()


def due(rounds: int, every: int, last: int = 1) -> int:
    """Returns how often something happens that is due every so many rounds and in each of the ``last``."""
    last = min(last, rounds)
    return (rounds - last) // every + last


def makespan(steps: Sequence[int], world: int, engine: str = "sequential", block: int | None = None) -> int:
    """Returns the local steps that the busiest process makes one after another.

    Args:
        steps: Steps of each client of the cohort.
        world: Number of processes.
        engine: The engine; the batched ones train a block of clients at once, until the longest is done.
        block: Clients of a block; None: all.
    """

    def work(mine: list[int]) -> int:
        if engine in ("sequential", "debug"):
            return sum(mine)
        width = block or max(len(mine), 1)
        return sum(max(mine[at : at + width]) for at in range(0, len(mine), width))

    return max(work([steps[p] for p in part]) for part in collectives.assign(steps, world))


def peak_memory() -> int:
    """Returns the most main memory that this process has had, in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts that of the program which started this one, too
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(size: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:,.3g} {unit}"
    return f"{size:.0f} bytes"
