"""Metrics of runs by round, from ``metrics.csv``: reading, directions, means over seeds; tables as CSV."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

from fl_lightning.core import UserError, ensure, require

Mode = Literal["max", "min"]
"""Whether the largest or the smallest value of a metric is the best."""
DIRECTIONS = "directions.json"
"""File of a run folder: whether large or small values are good, of metrics whose names do not tell."""
Pairs = Sequence[tuple[float, float]]
"""Values by round."""


class Band(NamedTuple):
    """A metric over the runs of a group, at the rounds in which all of them measured it.

    Attributes:
        rounds: The rounds, ascending; mean rounds where parts of a run were averaged.
        mean: Mean over the runs.
        sd: Sample standard deviation over the runs; 0 of a single one.
    """

    rounds: list[float]
    mean: list[float]
    sd: list[float]


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells.

    Raises:
        UserError: If the file is no table of numbers by round.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                at = int(row.pop("round"))
                for key, value in row.items():
                    if value:
                        columns.setdefault(key, []).append((at, float(value)))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        what = "no column named round" if isinstance(error, KeyError) else f"line {reader.line_num}: {error}"
        raise UserError(f"{path}: not a table of metrics ({what}); restore the file, or leave its run out") from None
    return columns


def mode_of(metric: str, mode: Mode | None = None, directions: Mapping[str, Mode] | None = None) -> Mode:
    """Whether large or small values of a metric are good: the one place that knows.

    What the data evaluate (``server/...``, ``client/test/...``: accuracy, mIoU) is to be large, unless the metric
    itself says otherwise; losses, deviations over clients, flatness, times and bits are to be small.

    Args:
        metric: Its name.
        mode: What the user says; None: by the name.
        directions: What the run's metrics say themselves, by the last part of their name; see `read_directions`.

    Raises:
        UserError: If the name does not tell.
    """
    require(mode in ("max", "min", None), "mode", mode, "choose from max, min")
    if mode is not None:
        return mode
    leaf, said = metric.rpartition("/")[2], directions or {}
    if known := said.get(leaf) or said.get(re.sub("_(weighted|worst|worst_decile)$", "", leaf)):
        return known
    if re.search(r"(^|/)loss$|_std$", metric) or metric.startswith(("flatness/", "time/", "comm/")):
        return "min"
    evaluated = metric.startswith(("server/", "client/test/"))
    require(evaluated, "metric", metric, "set mode to max or min: its name does not tell")
    return "max"


def read_directions(folder: Path) -> dict[str, Mode]:
    """Returns the directions of a run's metrics that their names do not tell, from its ``directions.json``, if any.

    Raises:
        UserError: If the file is not as it was written.
    """
    path = folder / DIRECTIONS
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        found = {"": None}
    fits = isinstance(found, dict) and all(mode in ("max", "min") for mode in found.values())
    ensure(fits, f"{path}: not the directions of metrics; restore the file, or leave its run out")
    return dict(found)


def is_flatness(metric: str) -> bool:
    """Whether a metric is a measure of flatness; residuals and standard errors are not."""
    return metric.startswith("flatness/") and not metric.endswith(("_residual", "_error"))


def is_of_clients(metric: str) -> bool:
    """Whether a metric is a statistic over the evaluations of each client."""
    return metric.startswith(("server/clients/", "client/test/"))


def band(runs: Sequence[Pairs]) -> Band:
    """Mean and deviation of a metric over runs, by round.

    Args:
        runs: The metric of each run, at least one.
    """
    values = [dict(run) for run in runs]
    rounds = sorted(set(values[0]).intersection(*values[1:]))
    columns = [[run[at] for run in values] for at in rounds]
    return Band(rounds, [mean(c) for c in columns], [stdev(c) if len(c) > 1 else 0.0 for c in columns])


def write_table(path: Path, head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a table as CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
