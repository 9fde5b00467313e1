"""Cells of a paper's table: which ones, the runs that they need, and what these give."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fl_lightning.core import UserError, ensure
from fl_lightning.results.metrics import read_metrics
from fl_lightning.results.papers import COLUMNS, Cell, find
from fl_lightning.results.recipes import Recipe, recipe
from fl_lightning.results.summary import summarise
from fl_lightning.sweeps.fraction import scaled, scaled_rounds
from fl_lightning.sweeps.trials import Outcome, Trial

EVALUATED = {
    "acc": "server/test/acc",
    "miou": "server/test/miou",
    "miou_seen": "server/test_seen/miou",
    "miou_unseen": "server/test_unseen/miou",
}
"""Metrics that a run evaluates, which the papers print in per cent; ``acc@5000`` and ``acc@50%`` are of one round."""
MEASURED = {"lambda_max": "LambdaMax", "trace": "HessianTrace", "lpf": "LPF", "discrepancy": "Discrepancy"}
"""Measures of flatness that are taken at the end of a run, and their classes."""
FILE = "reproduction.json"
"""The cells that a run is one of, in its run folder: their columns, and the fraction of the rounds."""


@dataclass(frozen=True)
class Task:
    """The runs, one for each seed, of cells that differ in their metric alone.

    Attributes:
        cells: The cells.
        recipe: How they are run.
    """

    cells: tuple[Cell, ...]
    recipe: Recipe

    @property
    def column(self) -> str:
        """The column of the table."""
        return column(self.cells[0])

    @property
    def name(self) -> str:
        """Folder of its runs."""
        parts = (column(self.cells[0]).replace("/", "of"), self.cells[0].algorithm)
        return "/".join(re.sub(r"[^\w.+=-]+", "_", part).strip("_") for part in parts)

    @property
    def whole(self) -> tuple[str, ...]:
        """Arguments of a run with all of its rounds."""
        return ("--config", self.recipe.config, *self.recipe.row, *self.recipe.column)

    def trials(
        self, config: Mapping[str, Any], fraction: float, seeds: Sequence[int], more: Sequence[str]
    ) -> list[Trial]:
        """Returns the runs.

        Args:
            config: The resolved config of a run with all of its rounds.
            fraction: The fraction of the rounds, see `fl_lightning.sweeps.fraction`.
            seeds: Seeds of the runs.
            more: Further arguments, which win.
        """
        fewer = scaled(config, fraction)
        measures = [MEASURED[cell.metric] for cell in self.cells if cell.metric in MEASURED]
        rounds = scaled_rounds(config, fraction)
        settings = f"every_n_rounds: {rounds}, metrics: [{', '.join(measures)}]"
        args = [*self.whole, *(f"--{key}={number:.17g}" for key, number in fewer.items())]
        if measures:
            args.append(f"--trainer.callbacks+={{class_path: FlatnessMonitor, init_args: {{{settings}}}}}")
        return [
            Trial(f"{self.name}/seed_{seed}", (*args, f"--trainer.seed={seed}", *more), self.recipe.command)
            for seed in seeds
        ]


@dataclass(frozen=True)
class Line:
    """A line of the table: our runs beside a cell of the paper.

    Attributes:
        cell: The paper's number.
        values: Ours, of each seed whose run was finished, in the paper's unit.
        folders: Their run folders.
        errors: Why runs broke off.
    """

    cell: Cell
    values: tuple[float, ...]
    folders: tuple[Path, ...]
    errors: tuple[str, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the seeds."""
        return mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the seeds."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.cell.value is None else self.mean - self.cell.value


def select(paper: str, table: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
    """Returns cells of a table.

    Args:
        paper: A key of `fl_lightning.results.papers.PAPERS`.
        table: Its number; "5" also means the table that is "5/10" there.
        rows: Algorithms; none: all.
        columns: Data set, network, heterogeneity, participation, epochs (``E=1``) or metric of the columns; of one kind
            any of them, of several kinds one of each. None: all.

    Raises:
        UserError: If there is no such table, row or column.
    """
    tables = dict.fromkeys(cell.table for cell in find(paper=paper))
    cells = find(paper=paper, table=next((name for name in tables if table in (name, *name.split("/"))), table))
    names = list(dict.fromkeys(cell.algorithm for cell in cells))
    for row in rows:
        ensure(row in names, f"rows = {row}: not in table {table}; choose from {', '.join(names)}")
    cells = [cell for cell in cells if not rows or cell.algorithm in rows]
    kinds = [list(dict.fromkeys(kind)) for kind in zip(*map(_properties, cells), strict=True)]
    wanted: dict[int, list[str]] = {}
    for term in columns:
        kind = next((i for i, of in enumerate(kinds) if term in of), None)
        choice = ", ".join(name for of in kinds if len(of) > 1 for name in of if name)
        ensure(kind is not None, f"columns = {term}: no column of these rows in table {table}; choose from {choice}")
        wanted.setdefault(kind or 0, []).append(term)
    found = [c for c in cells if all(_properties(c)[i] in terms for i, terms in wanted.items())]
    ensure(bool(found), f"columns = {','.join(columns)}: no cell of table {table} is all of that; name fewer")
    return found


def tasks(cells: Sequence[Cell]) -> tuple[list[Task], list[str]]:
    """Returns the runs of cells, and one line for each reason why others cannot be reproduced."""
    by_run: dict[tuple[str, ...], list[Cell]] = {}
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if reason := _unmeasured(cell) or _without_recipe(cell):
            reasons.setdefault(reason, []).append(cell.algorithm)
        else:
            key = tuple(getattr(cell, name) for name in COLUMNS if name != "metric")
            by_run.setdefault(key, []).append(cell)
    found = [Task(tuple(group), recipe(group[0])) for group in by_run.values()]
    return found, [f"{reason} ({', '.join(dict.fromkeys(names))})" for reason, names in reasons.items()]


def _unmeasured(cell: Cell) -> str | None:
    name, _, at = cell.metric.partition("@")
    known = name in EVALUATED or (name in MEASURED and not at)
    return None if known else f"{cell.metric}: not among the numbers that a run gives here"


def _without_recipe(cell: Cell) -> str | None:
    try:
        recipe(cell)
    except UserError as error:
        return str(error)
    return None


def line(cell: Cell, outcomes: Sequence[Outcome], config: Mapping[str, Any], fraction: float) -> Line:
    """Returns the line of a cell from the runs of its task.

    Args:
        cell: The cell.
        outcomes: Its runs.
        config: Their resolved config.
        fraction: The fraction of the rounds that they have.
    """
    done = [(outcome.folder, outcome.error) for outcome in outcomes]
    folders = tuple(folder for folder, error in done if folder is not None and error is None)
    values = tuple(_value(folder, cell.metric, config["trainer"], fraction) for folder in folders)
    return Line(cell, values, folders, tuple(error for _, error in done if error is not None))


def mark(folder: Path, task: Task, fraction: float) -> None:
    """Writes the keys of the task's cells and the fraction of the rounds into a run folder, for reports."""
    found = [{**{name: getattr(cell, name) for name in COLUMNS}, "fraction": fraction} for cell in task.cells]
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def column(cell: Cell) -> str:
    """Returns the column of a cell: data, cohort and local epochs."""
    epochs = f"E={cell.epochs}" if cell.epochs else ""
    return ", ".join(filter(None, (cell.dataset, cell.model, cell.heterogeneity, cell.participation, epochs)))


def _properties(cell: Cell) -> tuple[str, ...]:
    kind, _, place = cell.heterogeneity.partition(", ")
    return cell.dataset, cell.model, kind, place, cell.participation, f"E={cell.epochs}", cell.metric


def _value(folder: Path, metric: str, trainer: Mapping[str, Any], fraction: float) -> float:
    """Returns a number of a run in the unit of the papers."""
    name, _, at = metric.partition("@")
    if name in MEASURED:
        return read_metrics(folder / "metrics.csv")[f"flatness/{name}"][-1][1]
    if not at:
        return 100 * summarise(folder, trainer["eval_last"], metric=EVALUATED[name]).mean
    due = trainer["max_rounds"] * float(at[:-1]) / 100 if at.endswith("%") else float(at) * fraction
    evaluated = read_metrics(folder / "metrics.csv")[EVALUATED[name]]
    return 100 * next((value for t, value in evaluated if t >= round(due)), evaluated[-1][1])
