"""``fl-lightning plan``: a few rounds of a run, measured here on one process, and arithmetic."""

import contextlib
import copy
import io
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.commands.cli import FederatedCLI
from fl_lightning.core import State, require
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer import collectives
from fl_lightning.trainer.callbacks import Callback, FlatnessMonitor, Progress
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.trainer import FederatedTrainer

SUMMARY = "Predict hours, memory and bits of a fit, from a few rounds that are measured here."

FEWEST, MOST, BUDGET = 4, 20, 5.0
"""Fewest and most rounds that are measured, and the seconds after which no further one begins."""
TRAINING = "local training"
"""The part of a run that depends on cohort, local steps and algorithm."""
KEPT = (
    "engine", "max_rounds", "sampler", "local_epochs", "local_steps", "precision", "client_block", "compile",
    "deterministic", "client_memory", "seed", "tf32",
)  # fmt: skip
"""Settings of the trainer that the measured rounds share."""


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        processes: Number of processes, devices times nodes.
        engine: The engine; for "auto" the one that was chosen.
        rounds: Rounds of the run, T.
        measured: Rounds that were measured.
        parts: The work of the run by name, from its first round on: how often it is done, and the seconds of one time.
        memory: Bytes of main memory of the first process at its peak.
        device_memory: Bytes on its accelerator at its peak; 0 on a CPU.
        bits: ``comm/total_bits`` at the end of the run.
        seconds: From the first round to the end of the run.
    """

    processes: int
    engine: str
    rounds: int
    measured: int
    parts: dict[str, tuple[int, float]]
    memory: int
    device_memory: int
    bits: int
    seconds: float

    def show(self) -> None:
        """Prints a table."""
        table = Table("", "times", "each", "together", title=f"{as_time(self.seconds)} for {self.rounds} rounds")
        for name, (times, each) in self.parts.items():
            if times * each >= self.seconds / 1000:
                table.add_row(name, f"{times:,}", as_time(each), as_time(times * each))
        Console().print(table)
        on_device = f", {as_bytes(self.device_memory)} on its device" if self.device_memory else ""
        print(f"engine: {self.engine}; {self.measured} rounds measured")
        print(f"memory: {as_bytes(self.memory)}{on_device} (first of {self.processes} processes)")
        print(f"on the wire: {self.bits:,} bits ({as_bytes(self.bits / 8)}) between clients and server")


class Clock(Callback):
    """Measures the rounds of a run and its other callbacks, and ends the run after some rounds.

    Args:
        others: The other callbacks; they work in every round, whatever their ``every_n_rounds``.

    Attributes:
        seconds: By part of a round and round, from 1.
    """

    def __init__(self, others: Sequence[Callback]) -> None:
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.rounds, self.began = 0, 0.0
        for callback in others:
            if hasattr(callback, "every_n_rounds"):
                callback.every_n_rounds = 1
            for hook in ("on_round_end", "on_round_logged"):
                setattr(callback, hook, self.timed(type(callback).__name__, getattr(callback, hook)))

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

    def on_round_start(self, run: Any, ctx: Any, cohort: list[int]) -> None:
        """Counts the rounds."""
        self.rounds += 1
        self.began = self.began or time.perf_counter()

    def on_round_end(self, run: Any) -> None:
        """Reads the round's own clock, evaluates, and ends the run when enough is measured."""
        self.seconds["rest"][self.rounds] = rest = run.metrics["time/orchestration_s"]
        self.seconds["training"][self.rounds] = run.metrics["time/round_s"] - rest
        late = time.perf_counter() - self.began > BUDGET
        for split in ("val", "test") if run.data.val_fraction else ("test",):
            if not late or len(self.seconds[split]) < 2:
                run.log(self.timed(split, run.evaluate)(split))
        run.should_stop = self.rounds >= MOST or (self.rounds >= FEWEST and late)


def measure(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, threads: int | None
) -> tuple[Clock, Run]:
    """Runs a few rounds of a copy in a temporary folder."""
    callbacks = [copy.deepcopy(c) for c in trainer.callbacks if not isinstance(c, Progress)]
    clock = Clock(callbacks)
    with tempfile.TemporaryDirectory(prefix="fl_lightning_plan_") as folder, contextlib.redirect_stdout(io.StringIO()):
        trial = FederatedTrainer(
            **{name: getattr(trainer, name) for name in KEPT},
            eval_every=trainer.max_rounds,  # the clock evaluates
            accelerator=trainer.fabric.device.type,
            threads=threads,
            callbacks=[*callbacks, clock],
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        return clock, trial.fit(copy.deepcopy(model), data)


def plan(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, devices: int = 1, nodes: int = 1
) -> Plan:
    """Predicts what ``trainer.fit(model, data)`` takes, from a few of its rounds.

    Trainer and model stay as they are; the data are loaded.

    Args:
        trainer: The trainer, on a device of the kind that the run uses.
        model: The local objective.
        data: The clients' data.
        devices: Processes of a node.
        nodes: Nodes.

    Raises:
        UserError: If a number is out of range, or where `fit` raises one.
    """
    require(devices >= 1, "devices", devices, "at least 1")
    require(nodes >= 1, "nodes", nodes, "at least 1")
    cpu = trainer.fabric.device.type == "cpu"
    share = None if devices == 1 else max(1, (os.cpu_count() or 1) // devices)  # as Fabric divides the threads
    clock, run = measure(trainer, model, data, trainer.threads or share)
    rounds, world, measured = trainer.max_rounds, devices * nodes, clock.rounds

    # local steps one after another: of all clients on one process, and of the busiest of many
    cohorts = [trainer.sampler(t, data.num_clients, trainer.seed) for t in range(rounds)]
    steps = cache(lambda k: data.batches_per_client(k, trainer.local_epochs, trainer.local_steps))
    of = [[steps(k) for k in cohort] for cohort in cohorts]
    alone, busiest = ([makespan(n, many, run.engine_name, trainer.client_block) for n in of] for many in (1, world))
    step = clock.each("training") / fmean(alone[1:measured] or alone[:1])

    first = sum(max(0.0, times[1] - clock.each(name)) for name, times in clock.seconds.items())
    parts = {
        "first round, once more": (1, first),
        TRAINING: (rounds, fmean(busiest) * step),
        "orchestration, logs": (rounds, clock.each("rest")),
    }
    for split in {"val", "test"} & clock.seconds.keys():
        parts[f"evaluation ({split})"] = due(rounds, trainer.eval_every, trainer.eval_last), clock.each(split) / world
    for callback in trainer.callbacks:
        name, shared = type(callback).__name__, world if isinstance(callback, FlatnessMonitor) else 1
        parts[name] = due(rounds, getattr(callback, "every_n_rounds", 1)), clock.each(name) / shared

    # state of clients that no measured round has seen
    w, room = run.server.w, int(trainer.client_memory * 2**30)
    row = sum(value.nbytes for value in State.initial(model.client_inits(), w, w).values())
    growth = min(row * len(set().union(*cohorts)), room) - min(row * len(run.clients), room)
    sizes = [len(cohort) for cohort in cohorts]
    return Plan(
        processes=world,
        engine=run.engine_name,
        rounds=rounds,
        measured=measured,
        parts=parts,
        memory=peak_memory() + (2 if cpu else 1) * growth,  # a checkpoint copies the rows
        device_memory=0 if cpu else torch.cuda.max_memory_allocated() + growth,
        bits=int(run.metrics["comm/total_bits"]) // sum(sizes[:measured]) * sum(sizes),
        seconds=sum(times * each for times, each in parts.values()),
    )


def run(cli: FederatedCLI, devices: int | None = None, nodes: int | None = None, json: bool = False) -> None:
    """Predicts hours, memory and bits of a fit.

    Args:
        cli: Builds the run.
        devices: Devices (processes) per node; null: trainer.devices.
        nodes: Nodes; null: trainer.num_nodes.
        json: Print one line of JSON in place of a table.
    """
    asked = cli.config.trainer
    numbers = []
    for key, value, option in (("devices", devices, "devices"), ("num_nodes", nodes, "nodes")):
        number = str(asked[key] if value is None else value)
        require(number.lstrip("-").isdecimal(), f"trainer.{key}", number, f"give their number by --{option}")
        numbers.append(int(number))
    made = cli.build({"trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto"})
    found = plan(made.trainer, made.model, made.data, *numbers)
    if json:
        print(dumps(asdict(found)))
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
    """Returns the most main memory that this process has had, in bytes; 0 on systems other than Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _amount(value: float, **units: float) -> str:
    name, size = next((unit for unit in units.items() if value >= unit[1]), [*units.items()][-1])
    return f"{value / size:.3g} {name}"


as_time = partial(_amount, h=3600.0, min=60.0, s=1.0, ms=1e-3)
as_bytes = partial(_amount, GB=1e9, MB=1e6, kB=1e3)
