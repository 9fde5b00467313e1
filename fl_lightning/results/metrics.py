"""Metrics of a run by round, from its ``metrics.csv``."""

import csv
from pathlib import Path


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells."""
    columns: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key != "round" and value:
                    columns.setdefault(key, []).append((int(row["round"]), float(value)))
    return columns
