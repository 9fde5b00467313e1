"""What a run will take: a few of its rounds are run here, on one process, and the rest is arithmetic."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core.errors import require
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Engine, Job, LocalResult
from fl_lightning.trainer import checkpoint, collectives
from fl_lightning.trainer.callbacks import Callback, Checkpoints, FlatnessMonitor, Progress
from fl_lightning.trainer.loggers import CSVLogger
from fl_lightning.trainer.trainer import FederatedTrainer, Split

BUDGET = 10.0
"""Seconds after which no further round is measured, if there are two."""
MOST = 20
"""Most rounds that are measured."""
SPARE = 5
"""Rounds between two measurements of what is due every so many rounds: the round after one is slower than others."""
SAMPLED = 200
"""Most rounds of which it is worked out which process trains whom."""
INSIDE = {"cpu": (3e-4, 1e9), "cuda": (3e-5, 1e11)}
"""Latency (s) and rate (bytes/s) that are assumed between the processes of a node, by device."""
ALL_REDUCE = {"cpu": 5.0, "cuda": 1.0}
"""Latencies that an all-reduce takes; gloo's was seen to take 1.5 ms where its other messages took 0.3 ms."""
ACROSS = 1e-4
"""Latency (s) that is assumed between nodes."""
SYNC = 13
"""Small messages by which the sums of an evaluation are made those of all processes."""
DIVIDED = (FlatnessMonitor,)
"""Callbacks whose work at the end of a round the processes share."""


# Arithmetic


@dataclass(frozen=True)
class Part:
    """Something that a run does again and again.

    Attributes:
        name: What it is.
        times: How often the run does it.
        each: Seconds that it takes once.
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
    """What a run will take.

    Attributes:
        devices: Processes of a node.
        nodes: Nodes.
        engine: The engine, be it what "auto" has chosen.
        rounds: Rounds of the run, T.
        measured: Rounds that were measured.
        setup: Seconds before the first round as they passed here; the start of the processes comes on top.
        parts: What the run spends its time with, from its first round to its end.
        memory: Bytes of main memory of the first process at its peak, as the system counts them.
        device_memory: Bytes on its accelerator at its peak; 0 on a CPU.
        contents: Bytes of what is known of these: weights and server state, clients' state, data.
        disk: Bytes of checkpoints and clients' state in the run folder at the end.
        bits: All that clients and server send each other: the ``comm/total_bits`` that the run will have logged.
        moved: Bytes that go between processes.
        assumptions: What was taken for granted, one sentence each.
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
        """Print it for people."""
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
        for line in (
            f"engine: {self.engine}; {self.measured} rounds measured; {_time(self.setup)} before the first one",
            f"memory: {_bytes(self.memory)}{on_device} ({'first of ' * (world > 1)}{_processes(world)}); of it {known}",
            f"disk: {_bytes(self.disk)} in the run folder",
            f"on the wire: {self.bits:,} bits ({_bytes(self.bits / 8)}) between clients and server",
            *([f"between processes: {_bytes(self.moved)}"] if world > 1 else []),
            *(f"assumed: {sentence}" for sentence in self.assumptions),
        ):
            console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Message:
    """Something that goes between processes.

    Attributes:
        way: ``rooted``: from the first process to each other one, or back, a part each; ``broadcast``; ``all_reduce``.
        size: Bytes (of a part).
    """

    way: Literal["rooted", "broadcast", "all_reduce"]
    size: int


@dataclass(frozen=True)
class Network:
    """The processes of a run, and what is between them.

    Attributes:
        devices: Processes of a node.
        nodes: Nodes.
        inside: Latency (s) and rate (bytes/s) within a node.
        across: The same between nodes.
        all_reduce: Latencies that an all-reduce takes.
    """

    devices: int
    nodes: int
    inside: tuple[float, float]
    across: tuple[float, float]
    all_reduce: float = 1.0

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.devices * self.nodes

    def seconds(self, messages: Sequence[Message]) -> float:
        """Time of messages, one after another; of rooted ones, the links of the first process are the narrow ones."""
        return sum(self._seconds(message) for message in messages)

    def _seconds(self, message: Message) -> float:
        factors = {
            "rooted": (self.devices - 1, (self.nodes - 1) * self.devices),
            "broadcast": (math.ceil(math.log2(self.devices)), math.ceil(math.log2(self.nodes))),
            "all_reduce": (2 - 2 / self.devices, 2 - 2 / self.nodes),
        }[message.way]
        links = zip(factors, (self.inside, self.across), strict=True)
        times = self.all_reduce if message.way == "all_reduce" else 1.0
        return sum(times * latency + factor * message.size / rate for factor, (latency, rate) in links if factor)

    def moved(self, messages: Sequence[Message]) -> int:
        """Bytes that all processes together send."""
        return sum((self.world - 1) * m.size * (2 if m.way == "all_reduce" else 1) for m in messages)


def due(rounds: int, every: int, last: int = 1) -> int:
    """How often something happens that is due every so many rounds and in each of the ``last``."""
    last = min(last, rounds)
    return (rounds - last) // every + last


def work(steps: Sequence[int], engine: str, block: int | None = None) -> int:
    """Local steps that a process makes one after another.

    Args:
        steps: Steps of each of its clients.
        engine: The engine; the batched ones train a block of clients at once, until the longest is done.
        block: Clients of a block; None: all.
    """
    if engine in ("sequential", "debug"):
        return sum(steps)
    width = block or max(len(steps), 1)
    return sum(max(steps[at : at + width]) for at in range(0, len(steps), width))


def makespan(steps: Sequence[int], world: int, engine: str = "sequential", block: int | None = None) -> int:
    """The `work` of the process that has most to do in a round.

    Args:
        steps: Steps of each client of the cohort.
        world: Number of processes.
        engine: As for `work`.
        block: As for `work`.
    """
    return max(work([steps[p] for p in part], engine, block) for part in collectives.assign(steps, world))


# Measuring


@dataclass
class Lap:
    """What a measured round took.

    Attributes:
        due: Whether it does what is due every so many rounds.
        seconds: All of it.
        clock: Seconds of its parts, without local training, by name.
        sums: Bytes of each sum over processes that a part asked for.
        shares: `work` and seconds of each share of the cohort.
    """

    due: bool = False
    seconds: float = 0.0
    clock: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    shares: list[tuple[int, float]] = field(default_factory=list)

    @property
    def training(self) -> float:
        """Seconds of local training."""
        return sum(seconds for _, seconds in self.shares)

    @property
    def rest(self) -> float:
        """Seconds of what has no clock: cohort, aggregation, server, logs."""
        return self.seconds - self.training - sum(self.clock.values())


class Trial(FederatedTrainer):
    """The first rounds of another trainer's run, on one process and in a folder of their own, by the clock.

    A cohort is trained as it would be on many processes, one share after another. What is due every so many rounds is
    done sooner. The other trainer, its callbacks and its files stay as they are.

    Args:
        trainer: The trainer.
        world: Number of processes whose shares are trained.
        root: The folder.

    Attributes:
        setup: Seconds before the first round.
        laps: The rounds.
        end: Seconds after the last one.
    """

    def __init__(self, trainer: FederatedTrainer, world: int, root: Path) -> None:
        vars(self).update(vars(trainer))  # settings, checked when it was made
        self.world, self.laps, self.setup, self.end = world, [Lap()], 0.0, 0.0
        listeners = [copy.deepcopy(c) for c in trainer.callbacks if not isinstance(c, Progress)]
        self.clocked = [_Clocked(callback, i, self) for i, callback in enumerate(listeners)]
        self.callbacks, self.loggers = [*self.clocked], [CSVLogger()]
        self.default_root_dir, self.name, self.config = root, "plan", {}
        self.every, self.eval_every = trainer.eval_every, 1
        device = trainer.fabric.device
        self.fabric = L.Fabric(
            accelerator=device.type,
            devices=1 if device.type == "cpu" else [device.index or 0],
            precision=trainer.precision,
            callbacks=self.callbacks,
        )
        self._launched = False

    def measure(self, model: LocalObjective, data: FederatedDataModule) -> None:
        """Run rounds while there is time, and end the run."""
        started = time.perf_counter()
        self._begin(model, data, None)
        self.engine = _Shares(self.engine, self)
        began = time.perf_counter()
        self.setup = began - started
        with self._listened_to():
            self.laps.clear()
            while self.round < min(self.max_rounds, MOST) and (self.round < 2 or time.perf_counter() - began < BUDGET):
                self.laps.append(Lap(due=self.round < 2 or self.round % SPARE == 0))
                for callback in self.clocked:
                    callback.set_due(self.laps[-1].due)
                started = time.perf_counter()
                self._train(self._round())
                self.laps[-1].seconds = time.perf_counter() - started
            self.laps.append(Lap())  # for what ends the run
            started = time.perf_counter()
        self.laps.pop()
        self.end = time.perf_counter() - started

    def now(self) -> float:
        """The time, in seconds, when the device has done all it was told to."""
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def evaluate(self, split: Split, w: Tensor | None = None) -> dict[str, float]:
        """As the trainer does, by the clock."""
        started = self.now()
        found = super().evaluate(split, w)
        self.laps[-1].clock[split] += self.now() - started
        return found

    def _sample_jobs(self) -> list[Job]:
        jobs = super()._sample_jobs()
        return [jobs[p] for p in collectives.assign([job.ctx.K for job in jobs], self.world)[0]]

    def messages(self, phase: int, cohort: int, most: int) -> list[Message]:
        """What goes between processes in an phase, as `FederatedTrainer` and `processes` send it.

        Args:
            phase: Which.
            cohort: Number of clients, S.
            most: Largest number of clients that a process trains.
        """
        number = self.dtype.itemsize
        rows = [math.prod(shape) * number for shape in self._row_shapes(self.server.w).values()]
        uploads = [math.prod(shape) * number for shape in self._layouts[phase].values()]
        moved = [Message("rooted", most * row) for row in rows]
        gathered = [Message("rooted", most * upload) for upload in uploads if self.deterministic]
        # plain and weighted sums
        summed = [Message("broadcast" if self.deterministic else "all_reduce", 2 * upload) for upload in uploads]
        return [*moved, Message("all_reduce", 16 * cohort), *gathered, *summed, *moved]


class _Shares(Engine):
    """An engine that trains a cohort by the shares of several processes, each by the clock."""

    def __init__(self, inner: Engine, trial: Trial) -> None:
        self.inner, self.trial = inner, trial
        self.objective, self.autocast, self.net = inner.objective, inner.autocast, inner.net

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        """Local training of each client, in the order of ``jobs``."""
        trial, done = self.trial, dict[int, LocalResult]()
        for part in collectives.assign([job.ctx.K for job in jobs], trial.world):
            if part:
                started = trial.now()
                done.update(zip(part, self.inner.train([jobs[p] for p in part]), strict=True))
                steps = work([jobs[p].ctx.K for p in part], trial.engine_name, trial.client_block)
                trial.laps[-1].shares.append((steps, trial.now() - started))
        yield from (done[p] for p in range(len(jobs)))


class _Clocked(Callback):
    """A callback by the clock, due by ``every_n_rounds`` if it has that; it never hears of an exception."""

    def __init__(self, inner: Callback, number: int, trial: Trial) -> None:
        self.inner, self.number, self.trial = inner, number, trial
        self.every: int = getattr(inner, "every_n_rounds", 1)

    def set_due(self, due: bool) -> None:
        """Whether the next round is one in which it has to work."""
        if self.every != 1:
            vars(self.inner)["every_n_rounds"] = 1 if due else self.trial.max_rounds + 1

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_exception":
            return super().__getattribute__(name)
        hook = getattr(self.inner, name)

        @functools.wraps(hook)  # Fabric looks at its signature
        def clocked(*args: Any, **kwargs: Any) -> None:
            lap, part, started = self.trial.laps[-1], self.part(name), self.trial.now()
            with _sums_noted(lap.sums[part]):
                hook(*args, **kwargs)
            lap.clock[part] += self.trial.now() - started

        return clocked

    def part(self, hook: str) -> str:
        """Its part of the clock: what it does for each client, or once a round."""
        return f"{'client' if hook == 'on_local_end' else 'round'} {self.number}"


@contextlib.contextmanager
def _sums_noted(sizes: list[int]) -> Iterator[None]:
    """Note the bytes of each sum over processes that is asked for meanwhile."""
    original = collectives.all_reduce_sum

    def total(fabric: L.Fabric, mine: Tensor) -> Tensor:
        sizes.append(mine.nbytes)
        return original(fabric, mine)

    collectives.all_reduce_sum = total
    try:
        yield
    finally:
        collectives.all_reduce_sum = original


# Predicting


def plan(
    trainer: FederatedTrainer,
    model: LocalObjective,
    datamodule: FederatedDataModule,
    devices: int = 1,
    nodes: int = 1,
    bandwidth: float = 10.0,
) -> Plan:
    """Predict what ``trainer.fit(model, datamodule)`` takes, from a few of its rounds that are run here.

    Nothing is written but to a temporary folder; trainer and model stay as they are, and the data are loaded.

    Args:
        trainer: The trainer, on a device of the kind that the run will have.
        model: The local objective.
        datamodule: The clients' data.
        devices: Processes of a node.
        nodes: Nodes.
        bandwidth: Between nodes, in Gbit/s.

    Raises:
        UserError: If a number is out of range, or where `fit` would.
    """
    require(devices >= 1, "devices", devices, "at least 1")
    require(nodes >= 1, "nodes", nodes, "at least 1")
    require(bandwidth > 0, "bandwidth", bandwidth, "Gbit/s between nodes, above 0")
    kind, before = trainer.fabric.device.type, torch.get_num_threads()
    inside, all_reduce = INSIDE.get(kind, INSIDE["cuda"]), ALL_REDUCE.get(kind, 1.0)
    network = Network(devices, nodes, inside, (ACROSS, bandwidth * 1e9 / 8), all_reduce)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="fl_lightning_plan_") as folder, contextlib.redirect_stdout(sys.stderr):
        trial = Trial(trainer, network.world, Path(folder))
        try:
            torch.set_num_threads(_threads(trainer.threads, devices))
            trial.measure(copy.deepcopy(model), datamodule)
            return _predict(trial, network)
        finally:
            torch.set_num_threads(before)


def _predict(trial: Trial, network: Network) -> Plan:
    data, rounds, objective = trial.data, trial.max_rounds, trial.objective
    cpu, cores, threads = trial.fabric.device.type == "cpu", _cores(), torch.get_num_threads()
    crowd = max(1.0, network.devices * threads / cores) if cpu else 1.0
    peaks = peak_memory(), 0 if cpu else torch.cuda.max_memory_allocated()
    laps = trial.laps[1:] or trial.laps
    busy = [lap for lap in laps if lap.due]
    quiet = [lap for before, lap in pairwise(laps) if not (before.due or lap.due)] or laps

    def mean(part: str, laps: Sequence[Lap]) -> float:
        return fmean(lap.clock[part] for lap in laps) * crowd

    # who trains whom
    cohorts = [trial.sampler(t, data.num_clients, trial.seed) for t in range(rounds)]
    steps_of = functools.cache(lambda k: data.batches_per_client(k, trial.local_epochs, trial.local_steps))
    spans, alone, whole = [], 0, 0
    messages: list[list[Message]] = []
    for cohort in cohorts[:: math.ceil(rounds / SAMPLED)]:
        steps = [steps_of(k) for k in cohort]
        spans.append(makespan(steps, network.world, trial.engine_name, trial.client_block))
        alone, whole = alone + makespan(steps, network.world), whole + sum(steps)
        most = max(map(len, collectives.assign(steps, network.world)))
        messages.append([m for e in range(objective.phases) for m in trial.messages(e, len(cohort), most)])
    step = sum(lap.training for lap in quiet) / sum(steps for lap in quiet for steps, _ in lap.shares)
    first = max(0.0, trial.laps[0].training - step * sum(steps for steps, _ in trial.laps[0].shares))
    for part, seconds in trial.laps[0].clock.items():
        first += max(0.0, seconds - fmean(lap.clock[part] for lap in busy))

    # the clients' state
    row = sum(math.prod(shape) for shape in trial._row_shapes(trial.server.w).values()) * trial.dtype.itemsize
    seen, sizes = len({k for cohort in cohorts for k in cohort}), [len(cohort) for cohort in cohorts]
    room = int(trial.client_memory * 2**30)
    here, kept = min(row * len(trial.clients), room), min(row * seen, room)
    beyond = row * seen - kept
    last = trial.run_dir / checkpoint.LAST
    trial.save_checkpoint(last)
    rate = _disk_rate(last.parent, kept - here or beyond)

    def to_disk(size: float) -> float:
        return size / rate if size else 0.0

    parts = [
        Part("first times, once more", 1, first * crowd),
        Part("local training", rounds, fmean(spans) * step * objective.phases * crowd),
        Part("orchestration, logs", rounds, fmean(lap.rest for lap in quiet) * crowd),
        Part("clients' state on disk", rounds, to_disk(fmean(sizes) * row * beyond / max(row * seen, 1))),
        Part("between processes", rounds, fmean(map(network.seconds, messages))),
    ]
    moved = fmean(map(network.moved, messages)) * rounds
    evaluated = due(rounds, trial.every, trial.eval_last)
    told = [Message("all_reduce", 16)] * SYNC
    for split, n in (("val", len(data.val_indices)), ("test", len(data.y_test))):
        if n:
            shared = math.ceil(n / data.eval_batch_size) if trial.normalised_by_batch else n
            share = math.ceil(shared / network.world) / shared
            parts.append(Part(f"evaluation ({split})", evaluated, mean(split, quiet) * share + network.seconds(told)))
            moved += evaluated * network.moved(told)
    saved = 0
    for callback in trial.clocked:
        times, at_end = due(rounds, callback.every), callback.part("on_round_end")
        heard = quiet if callback.every == 1 else busy
        sums = [Message("all_reduce", size) for lap in heard for size in lap.sums[at_end]]
        each = mean(at_end, heard) / (network.world if isinstance(callback.inner, DIVIDED) else 1)
        each += mean(callback.part("on_local_end"), heard) * alone / whole + network.seconds(sums) / len(heard)
        if isinstance(callback.inner, Checkpoints):
            each, saved = each + to_disk(kept - here), times if callback.inner.keep_all else 0
        parts.append(Part(type(callback.inner).__name__, times, each))
        moved += times * network.moved(sums) / len(heard)
    parts.append(Part("end", 1, trial.end * crowd))
    return Plan(
        devices=network.devices,
        nodes=network.nodes,
        engine=trial.engine_name,
        rounds=rounds,
        measured=len(laps),
        setup=trial.setup,
        parts=parts,
        memory=peaks[0] + (2 if cpu else 1) * (kept - here),  # a checkpoint copies the rows
        device_memory=0 if cpu else peaks[1] + kept - here,
        contents={
            "weights and server": sum(v.nbytes for v in trial.server.values()),
            "clients' state": kept,
            "data": sum(v.nbytes for v in vars(data).values() if isinstance(v, Tensor)),
        },
        disk=(1 + saved) * (last.stat().st_size + kept - here) + beyond,
        bits=trial.total_floats // sum(sizes[: trial.round]) * sum(sizes) * trial.dtype.itemsize * 8,
        moved=round(moved),
        assumptions=_assumptions(network, cpu, threads, cores),
    )


def _assumptions(network: Network, cpu: bool, threads: int, cores: int) -> list[str]:
    """What a prediction takes for granted."""
    told = ["every device is as fast as this one was while it was measured, when nothing else runs beside"]
    told.append("later rounds take as long as the first ones; the progress bar, and loggers but metrics.csv, nothing")
    if cpu and network.devices * threads > cores:
        told.append(
            f"{network.devices} processes with {threads} threads share {cores} cores: all takes "
            f"{network.devices * threads / cores:.3g} times as long"
        )
    for where, (latency, rate), many in (
        ("within a node", network.inside, network.devices > 1),
        ("between nodes", network.across, network.nodes > 1),
    ):
        if many:
            told.append(f"a message {where} takes {latency * 1e3:g} ms and 1 s for {rate * 8 / 1e9:g} Gbit")
    return told


def _threads(asked: int | None, devices: int) -> int:
    """CPU threads that each process will have: as asked for, else as Fabric shares out the cores."""
    if asked is not None or devices == 1 or "OMP_NUM_THREADS" in os.environ:
        return asked or torch.get_num_threads()
    return max(1, _cores() // devices)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Most main memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts that of the program which started this one, too
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _disk_rate(folder: Path, size: int) -> float:
    """Bytes/s at which a checkpoint of so many bytes, or of 64 MiB if that is less, gets to disk."""
    size = min(size, 64 * 2**20)
    started = time.perf_counter()
    checkpoint.save(folder / "probe.ckpt", {"bytes": torch.zeros(size, dtype=torch.uint8)})
    return size / (time.perf_counter() - started)


def _time(seconds: float) -> str:
    """For people: in the unit that makes it readable."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(size: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:,.3g} {unit}"
    return f"{size:.0f} bytes"


def _processes(world: int) -> str:
    return "1 process" if world == 1 else f"{world} processes"
