"""Metrics of a run by round, from its ``metrics.csv``; tables as CSV."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from fl_lightning.core import require

Mode = Literal["max", "min"]
"""Whether the largest or the smallest value of a metric is the best."""


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells."""
    columns: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key != "round" and value:
                    columns.setdefault(key, []).append((int(row["round"]), float(value)))
    return columns


def mode_of(metric: str, mode: Mode | None = None) -> Mode:
    """Whether large or small values of a metric are good: the one place that knows.

    What the data evaluate (``server/...``: accuracy, mIoU) is to be large, losses, flatness, times and bits small.

    Args:
        metric: Its name.
        mode: What the user says; None: by the name.

    Raises:
        UserError: If the name does not tell.
    """
    require(mode in ("max", "min", None), "mode", mode, "choose from max, min")
    if mode is not None:
        return mode
    if re.search(r"(^|/)loss$", metric) or metric.startswith(("flatness/", "time/", "comm/")):
        return "min"
    require(metric.startswith("server/"), "metric", metric, "set mode to max or min: its name does not tell")
    return "max"


def write_table(path: Path, head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a table as CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
