"""What many runs take on this machine, from a few rounds of one for each data set and network."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from fl_lightning.commands.plan import TRAINING, Plan, as_bytes, as_time, due, plan
from fl_lightning.core import State
from fl_lightning.sweeps.reproduction import Task
from fl_lightning.sweeps.trials import Trial
from fl_lightning.trainer.samplers import UniformSampler

STEPS = 2
"""Local steps of a client in the measured rounds."""


@dataclass(frozen=True)
class Planned:
    """A task with its runs.

    Attributes:
        task: The cells.
        trials: The runs, one for each seed.
        made: Trainer, model and data of the first of them.
    """

    task: Task
    trials: list[Trial]
    made: Namespace

    def measure(self) -> Plan:
        """Measures a few rounds of a few local steps; the data are loaded."""
        trainer = copy.copy(self.made.trainer)
        trainer.local_steps = STEPS
        if self.task.recipe.command == "centralized":
            trainer.sampler = UniformSampler(self.made.data.num_clients)
        return plan(trainer, self.made.model, self.made.data)

    @property
    def passes(self) -> int:
        """Forward and backward passes of a round of one step for each client."""
        trainer, model, data = self.made.trainer, self.made.model, self.made.data
        central = self.task.recipe.command == "centralized"
        cohort = data.num_clients if central else len(trainer.sampler(0, data.num_clients, trainer.seed))
        return int(model.phases * sum(model.passes) * cohort)

    def seconds(self, like: "Planned", measured: Plan) -> float:
        """Estimates the seconds of a run.

        Args:
            like: What was measured, of the same data set and network.
            measured: What it took.
        """
        trainer, data = self.made.trainer, like.made.data  # the samples are the same, only divided otherwise
        clients, here = data.num_clients, self.made.data.num_clients
        sizes = [data.batches_per_client(k, trainer.local_epochs, trainer.local_steps) for k in range(clients)]
        steps = fmean(sizes) * (1 if trainer.local_steps else clients / here)
        found = 0.0
        for name, (times, each) in measured.parts.items():
            if name == TRAINING:
                found += trainer.max_rounds * each * steps / STEPS * self.passes / like.passes
            elif name.startswith("evaluation"):
                found += due(trainer.max_rounds, trainer.eval_every, trainer.eval_last) * each
            else:
                found += times / measured.rounds * trainer.max_rounds * each if times > 1 else each
        return found

    @property
    def rows(self) -> int:
        """Bytes of the clients' state in memory, at most."""
        model, room = self.made.model, self.made.trainer.client_memory * 2**30
        w = model.flat.vector(model.net)
        each = sum(v.numel() * v.element_size() for v in State.initial(model.client_inits(), w, w).values())
        return int(min(room, each * self.made.data.num_clients))


def show(planned: Sequence[Planned], jobs: int, console: Console) -> None:
    """Prints what the runs take on this machine.

    Args:
        planned: The runs.
        jobs: How many of them run at the same time.
        console: Where.
    """
    measured: dict[tuple[str, str], tuple[Planned, Plan]] = {}
    shown = Table("row", "column", "runs", "rounds", "each", "together", title="estimate for this machine")
    seconds, memory = list[float](), 0
    for each in planned:
        cell = each.task.cells[0]
        if (kind := (cell.dataset, cell.model)) not in measured:
            console.print(f"measuring a few rounds: {', '.join(kind)}", highlight=False)
            measured[kind] = each, each.measure()
        one, runs = each.seconds(*measured[kind]), len(each.trials)
        seconds += [one] * runs
        memory = max(memory, measured[kind][1].memory + each.rows)
        rounds = f"{each.made.trainer.max_rounds:,}"
        shown.add_row(cell.algorithm, each.task.column, str(runs), rounds, as_time(one), as_time(one * runs))
    console.print(shown)
    together, at_once = max(max(seconds), sum(seconds) / jobs), min(jobs, len(seconds))
    text = f"{len(seconds)} runs, about {as_time(together)} with --jobs {jobs}"
    console.print(f"{text}; about {as_bytes(memory * at_once)} of memory", highlight=False, soft_wrap=True)
