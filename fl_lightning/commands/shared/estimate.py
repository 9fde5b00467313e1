"""What many runs take on this machine, from a few rounds of one for each data set and network."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from jsonargparse import Namespace
from rich.table import Table

from fl_lightning.commands.shared.output import show_table
from fl_lightning.commands.shared.prediction import Measured, as_bytes, as_time, measure, row_bytes
from fl_lightning.sweeps.reproduction import Task, column
from fl_lightning.sweeps.trials import Trial
from fl_lightning.trainer.participation.samplers import UniformSampler

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

    def measure(self) -> Measured:
        """Measures a few rounds of a few local steps; the data are loaded."""
        trainer = copy.copy(self.made.trainer)
        trainer.local_steps = STEPS
        if self.task.recipe.command == "centralized":
            trainer.sampler = UniformSampler(self.made.data.num_clients)
        return measure(trainer, self.made.model, self.made.data)

    def seconds(self, like: "Planned", measured: Measured) -> float:
        """Estimates the seconds of a run.

        Args:
            like: What was measured, of the same data set and network.
            measured: What it took.
        """
        trainer, model, m = self.made.trainer, self.made.model, self.made.data.num_clients
        central = self.task.recipe.command == "centralized"
        cohort = m if central else len(trainer.sampler(0, m, trainer.seed))
        # the samples are the same, only divided otherwise
        data, fixed = like.made.data, trainer.local_steps
        steps = fixed or fmean(
            data.batches_per_client(k, trainer.local_epochs, None) * data.num_clients / m
            for k in range(data.num_clients)
        )
        one, other = (x.phases * sum(x.passes) for x in (model, like.made.model))
        parts = measured.parts(trainer, [[1] * cohort], passes=steps * one / other)
        return sum(times * each for times, each in parts.values())

    @property
    def rows(self) -> int:
        """Bytes of the clients' state in memory, at most."""
        model, room = self.made.model, self.made.trainer.client_memory * 2**30
        return int(min(room, row_bytes(model, model.flat.vector(model.net)) * self.made.data.num_clients))


def show(planned: Sequence[Planned], jobs: int) -> None:
    """Prints what the runs take on this machine.

    Args:
        planned: The runs.
        jobs: How many of them run at the same time.
    """
    measured: dict[tuple[str, str], tuple[Planned, Measured]] = {}
    shown = Table("row", "column", "runs", "rounds", "each", "together", title="estimate for this machine")
    seconds, memory = list[float](), 0
    for each in planned:
        cell = each.task.cells[0]
        if (kind := (cell.dataset, cell.model)) not in measured:
            print(f"measuring a few rounds: {', '.join(kind)}")
            measured[kind] = each, each.measure()
        one, runs = each.seconds(*measured[kind]), len(each.trials)
        seconds += [one] * runs
        memory = max(memory, measured[kind][1].memory + each.rows)
        rounds = f"{each.made.trainer.max_rounds:,}"
        shown.add_row(cell.algorithm, column(cell), str(runs), rounds, as_time(one), as_time(one * runs))
    show_table(shown)
    together, at_once = max(max(seconds), sum(seconds) / jobs), min(jobs, len(seconds))
    text = f"{len(seconds)} runs, about {as_time(together)} with --jobs {jobs}"
    print(f"{text}; about {as_bytes(memory * at_once)} of memory")
