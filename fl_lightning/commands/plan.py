"""``fl-lightning plan``: a few rounds of a run, measured here on one process, and arithmetic."""

import math
import os
import sys
from dataclasses import dataclass

import torch

from fl_lightning import FederatedDataModule, FederatedTrainer, LocalObjective
from fl_lightning.commands.shared import FederatedCLI
from fl_lightning.commands.shared.prediction import (
    Seconds,
    ahead,
    as_bytes,
    as_time,
    data_or_like,
    measure,
    row_bytes,
    total,
)
from fl_lightning.core import PositiveInt, checked, json_text, require
from fl_lightning.results import filled, say, show_table
from fl_lightning.trainer import program

MOST = 1_000_000
"""Maximum number of rounds of a run that a plan goes through."""


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        processes: Number of processes, devices times nodes.
        engine: The engine; for "auto" the one that was chosen.
        rounds: Rounds of the run, or steps of an asynchronous server; fewer than T if the clock ends the run.
        measured: Rounds that were measured.
        parts: The work of the run by name, from its first round on: how often it is done, and the seconds of one time.
        memory: Bytes of main memory of the first process at its peak.
        device_memory: Bytes on its accelerator at its peak; 0 on a CPU.
        bits: ``comm/total_bits`` at the end of the run.
        seconds: From the first round to the end of the run.
        unit: What the server counts, rounds or steps.
        uploads: Uploads that reach the server.
        late: Clients that are too late.
        device_seconds: ``clock/time_s`` at the end of the run; None: there is no clock.
        lacking: What the run lacks for its rounds to be programs, of `program.NEEDS`.
    """

    processes: int
    engine: str
    rounds: int
    measured: int
    parts: Seconds
    memory: int
    device_memory: int
    bits: int
    seconds: float
    unit: str
    uploads: int
    late: int
    device_seconds: float | None
    lacking: list[str]

    def show(self) -> None:
        """Prints a table."""
        rows = [
            [name, f"{times:,}", as_time(duration), as_time(times * duration)]
            for name, (times, duration) in self.parts.items()
            if times * duration >= self.seconds / 1000
        ]
        title = f"{as_time(self.seconds)} for {self.rounds} {self.unit}"
        show_table(filled(["", "times", "each", "together"], rows, left=4, title=title))
        on_device = f", {as_bytes(self.device_memory)} on its device" if self.device_memory else ""
        say(f"engine: {self.engine}; {self.measured} rounds measured")
        if self.lacking:
            say(f"rounds run one by one: a program of rounds needs {', '.join(self.lacking)}")
        say(f"memory: {as_bytes(self.memory)}{on_device} (first of {self.processes} processes)")
        say(f"on the wire: {self.bits:,} bits ({as_bytes(self.bits / 8)}) between clients and server")
        if self.device_seconds is not None:
            say(f"on the clients' devices: {as_time(self.device_seconds)}, with {self.uploads:,} uploads that count")
            say(f"too late: {self.late:,} clients")


@checked
def plan(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    devices: PositiveInt = 1,
    nodes: PositiveInt = 1,
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
    require(trainer.max_rounds <= MOST, "trainer.max_rounds", trainer.max_rounds, f"at most {MOST:,} to go through")
    cpu, world = trainer.fabric.device.type == "cpu", devices * nodes
    share = None if devices == 1 else max(1, (os.cpu_count() or 1) // devices)  # as Fabric divides the threads
    measured = measure(trainer, model, data, trainer.threads or share)
    run = measured.run
    rounds = list(ahead(run))

    parts = measured.parts(trainer, len(rounds), [round_.steps for round_ in rounds], world)
    if trainer.max_time is not None and total(parts) > trainer.max_time:
        rounds = rounds[: max(1, math.ceil(len(rounds) * trainer.max_time / total(parts)))]
        parts = measured.parts(trainer, len(rounds), [round_.steps for round_ in rounds], world)
    # state of clients that no measured round has seen
    limit, kept = int(trainer.client_memory * 2**30), {k for round_ in rounds for k in round_.clients}
    row = row_bytes(model, run.server.w)
    growth = min(row * len(kept), limit) - min(row * len(run.clients), limit)
    return Plan(
        processes=world,
        engine=run.engine_name,
        rounds=len(rounds),
        measured=run.rounds_done,
        parts=parts,
        memory=measured.memory + (2 if cpu else 1) * growth,  # a checkpoint copies the rows
        device_memory=0 if cpu else torch.cuda.max_memory_allocated() + growth,
        bits=sum(round_.bits for round_ in rounds),
        seconds=total(parts),
        unit="rounds" if trainer.asynchronous is None else "steps of the server",
        uploads=sum(len(round_.clients) for round_ in rounds),
        late=sum(round_.late for round_ in rounds),
        device_seconds=None if run.timing is None else rounds[-1].time_s,
        lacking=program.lacking(run) + ["one process, or deterministic"] * (world > 1 and not trainer.deterministic),
    )


def run(cli: FederatedCLI, devices: int | None = None, nodes: int | None = None, json: bool = False) -> None:
    """Predicts hours, memory and bits of a fit.

    Args:
        cli: Builds the run.
        devices: Devices (processes) per node; null: trainer.devices.
        nodes: Nodes; null: trainer.num_nodes.
        json: Print one line of JSON in place of a table.
    """
    trainer_config, numbers = cli.config.trainer, list[int]()
    for key, value, option in (("devices", devices, "devices"), ("num_nodes", nodes, "nodes")):
        number = str(trainer_config[key] if value is None else value)
        require(number.lstrip("-").isdecimal(), f"trainer.{key}", number, f"give their number by --{option}")
        numbers.append(int(number))
    objects = cli.make(*cli.args, "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto")
    data, missing = data_or_like(objects.data)
    if missing:
        say(f"on random samples of the same shape: {missing}", file=sys.stderr)
    prediction = plan(objects.trainer, objects.model, data, *numbers)
    print(json_text(prediction), end="") if json else prediction.show()
