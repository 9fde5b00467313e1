"""The numbers that the five papers print: ``papers.csv`` in this folder."""

import csv
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, ensure
from fl_lightning.results.headline import headline
from fl_lightning.results.metrics import average, deviation, read_run, rounds_done

PAPERS = {
    "fedsam": "Caldarola et al., ECCV 2022: FedSAM, FedASAM, SWA",
    "fedsmoo": "Sun et al., ICML 2023: FedSMOO; table FL-Simulator is that of its code's README",
    "fedgf": "Lee and Yoon, ICML 2024: FedGF",
    "fedgloss": "Caldarola et al., 2024 (arXiv:2412.03752): FedGloSS; table 5/10: rounds and costs of both",
    "fedgmt": "Li et al., ICML 2025: FedGMT; table FL-SAM is that of its code's README",
}

EVALUATED = {
    "acc": "server/test/acc",
    "miou": "server/test/miou",
    "miou_seen": "server/test_seen/miou",
    "miou_unseen": "server/test_unseen/miou",
}
"""Metrics that a run evaluates, which the papers print in per cent; ``acc@5000`` and ``acc@50%`` are of one round."""


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        paper: A key of `PAPERS`.
        table: Its number there.
        dataset: A data set of the package, or CIFAR100-PAM.
        model: The package's network that stands for the paper's.
        heterogeneity: As the paper prints it, so FedGF's alpha is that of a class.
        participation: Clients of a round / all clients.
        epochs: Local epochs E.
        algorithm: Algorithm and its additions, such as ``FedASAM+SWA``.
        metric: What the number is: ``acc`` in percent, ``acc@5000`` after 5,000 rounds, ``acc@50%`` after half of them;
            ``miou``, also of ``seen`` and ``unseen`` domains; ``lambda_max``, ``trace``, ``lpf``, ``discrepancy``,
            ``divergence``; ``lambda_local@cat`` and ``lambda_global@cat`` of a local model whose client has images of
            cats alone; ``rounds@74`` (rounds to 74 %), likewise ``seconds@74`` and ``minutes@41``; ``rounds_to_fedavg``
            (to FedAvg's final accuracy); ``cost`` (communication over FedAvg's); ``models_per_client`` (down and up),
            also ``_down`` and ``_up`` alone, ``transmissions_100`` (hundreds of models), ``seconds_per_round``;
            ``communication_per_round`` and ``computation_per_step``, over FedAvg's.
        value: The number; None if there is none, and `note` says why.
        std: Its standard deviation, if known.
        note: Doubts; begins with "lost" (in the text at hand), "uncertain", "not converged", "not reached" or
            "failed" where that is so.
        printed: Number and standard deviation with the digits of the paper.
    """

    paper: str
    table: str
    dataset: str
    model: str
    heterogeneity: str
    participation: str
    epochs: str
    algorithm: str
    metric: str
    value: float | None
    std: float | None
    note: str
    printed: str


COLUMNS = tuple(field.name for field in fields(Cell) if field.name not in ("value", "std", "note", "printed"))


def find(**where: str) -> list[Cell]:
    """Returns the cells with these values, such as ``find(paper="fedsam", table="2", dataset="CIFAR10")``.

    Args:
        where: Values by column, one of `COLUMNS`.

    Returns:
        At least one cell, in the order of the papers' tables.

    Raises:
        UserError: If a column is unknown, or no cell has these values.
    """
    found = list(_all())
    for column, value in where.items():
        ensure(
            column in COLUMNS,
            f"papers: {column} is no column; choose from {', '.join(COLUMNS)}",
        )
        have = list(dict.fromkeys(getattr(cell, column) for cell in found))
        found = [cell for cell in found if getattr(cell, column) == value]
        if not found:
            close = difflib.get_close_matches(value, have) or have
            raise UserError(f"papers: {column} = {value}: no such cell; choose from {', '.join(filter(None, close))}")
    return found


def our_number(run: Path, metric: str, fraction: float = 1.0) -> float | None:
    """Returns the headline of a run for a paper's metric, in the paper's unit; None if the run did not measure it.

    Args:
        run: The run folder.
        metric: The metric of a `Cell`.
        fraction: The fraction of the paper's rounds that the run has.
    """
    name, _, at = metric.partition("@")
    if name not in EVALUATED:
        return headline(run, f"flatness/{metric}")
    due = None
    if at:
        due = rounds_done(read_run(run)) * float(at[:-1]) / 100 if at.endswith("%") else float(at) * fraction
    found = headline(run, EVALUATED[name], at=due)
    return None if found is None else 100 * found


@dataclass(frozen=True)
class Line:
    """Our runs beside a cell of a paper.

    Attributes:
        cell: The paper's number.
        values: Our number of each run in which it is finite, in the paper's unit.
        folders: The run folders.
        errors: Why runs do not count.
    """

    cell: Cell
    values: tuple[float, ...]
    folders: tuple[Path, ...]
    errors: tuple[str, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the runs."""
        return average(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the runs."""
        return deviation(self.values)

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's."""
        return None if self.mean is None or self.cell.value is None else self.mean - self.cell.value


def beside(cell: Cell, runs: Sequence[Path], fraction: float = 1.0, errors: Sequence[str] = ()) -> Line:
    """Returns our runs beside a cell of a paper.

    Args:
        cell: The cell.
        runs: Folders of finished runs.
        fraction: The fraction of the paper's rounds that they have.
        errors: Why other runs broke off.
    """
    numbers = {run: our_number(run, cell.metric, fraction) for run in runs}
    finite = {run: x for run, x in numbers.items() if x is not None and math.isfinite(x)}
    others = [(run, "not measured" if x is None else x) for run, x in numbers.items() if run not in finite]
    left_out = [f"{run}: {cell.metric} is {what}" for run, what in others]
    return Line(cell, tuple(finite.values()), tuple(runs), (*errors, *left_out))


@cache
def _all() -> tuple[Cell, ...]:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return tuple(_cell(row) for row in csv.DictReader(file))


def _cell(row: dict[str, str]) -> Cell:
    value, std = (float(row[name]) if row[name] else None for name in ("value", "std"))
    printed = " ± ".join(filter(None, (row["value"], row["std"])))
    key: dict[str, Any] = {name: row[name] for name in COLUMNS}
    return Cell(**key, value=value, std=std, note=row["note"], printed=printed)
