"""The numbers that the five papers print: ``papers.csv`` in this folder."""

import csv
import difflib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, ensure

PAPERS = {
    "fedsam": "Caldarola et al., ECCV 2022: FedSAM, FedASAM, SWA",
    "fedsmoo": "Sun et al., ICML 2023: FedSMOO; table FL-Simulator is that of its code's README",
    "fedgf": "Lee and Yoon, ICML 2024: FedGF",
    "fedgloss": "Caldarola et al., 2024 (arXiv:2412.03752): FedGloSS; table 5/10: rounds and costs of both",
    "fedgmt": "Li et al., ICML 2025: FedGMT; table FL-SAM is that of its code's README",
}


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


@cache
def _all() -> tuple[Cell, ...]:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return tuple(_cell(row) for row in csv.DictReader(file))


def _cell(row: dict[str, str]) -> Cell:
    value, std = (float(row[name]) if row[name] else None for name in ("value", "std"))
    printed = " ± ".join(filter(None, (row["value"], row["std"])))
    key: dict[str, Any] = {name: row[name] for name in COLUMNS}
    return Cell(**key, value=value, std=std, note=row["note"], printed=printed)
