"""Metrics of a run by round, from its ``metrics.csv``; tables as CSV."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells."""
    columns: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key != "round" and value:
                    columns.setdefault(key, []).append((int(row["round"]), float(value)))
    return columns


def write_table(path: Path, head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a table as CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
