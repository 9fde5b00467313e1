"""Metrics of runs by round, from ``metrics.csv``: reading, statistics that survive NaN, means over seeds; tables."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fl_lightning.core import UserError, write_atomically
from fl_lightning.results.names import Mode

FILE = "metrics.csv"
"""In the run folder: a row for each round, a column for each metric."""
Pairs = Sequence[tuple[float, float]]
"""Values by round."""
Columns = Mapping[str, Pairs]
"""Values by metric and round."""
NUMBER = re.compile(r"[-+]?([\d.]+(e[-+]?\d+)?|inf|nan)", re.IGNORECASE)


def read_rows(path: Path) -> list[list[str]]:
    """Returns the head and the rows of a CSV file that a run writes line by line.

    A last row without its end of line is left out: a crash has cut it short, and its last number may lack digits.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no text.
        csv.Error: If it is no CSV.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = file.readlines()
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        del lines[-1]
    return [row for row in csv.reader(lines, strict=True) if row]


def read_numbers(path: Path, what: str, *whole: str) -> tuple[list[str], list[dict[str, float]]]:
    """Returns the head of a table of numbers that a run writes, and its rows by column, without empty cells.

    Args:
        path: The CSV file.
        what: What the table holds, for the error message.
        *whole: Columns that it must have; every row has a whole number in them.

    Raises:
        UserError: If the file is no such table.
    """
    line, found = 1, list[dict[str, float]]()
    try:
        head, *rows = read_rows(path) or [[]]
        for name in whole:
            if name not in head:
                raise ValueError(f"no column named {name}")
        for line, row in enumerate(rows, 2):  # noqa: B007  the message names it
            if len(row) != len(head):
                raise ValueError(f"{len(row)} cells, not {len(head)}")
            cells = zip(head, row, strict=True)
            found.append({n: int(cell) if n in whole else float(cell) for n, cell in cells if cell or n in whole})
            for name in whole:
                float(found[-1][name])  # a whole number of 400 digits is none to calculate with
    except (ValueError, OverflowError, csv.Error) as error:
        where = "" if line == 1 else f"line {line}: "
        raise UserError(
            f"{path}: not a table of {what} ({where}{error}); restore the file, or leave its run out"
        ) from None
    return head, found


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells.

    Raises:
        UserError: If the file is no table of numbers by round.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in read_numbers(path, "metrics", "round")[1]:
        at = int(row.pop("round"))
        for name, value in row.items():
            columns.setdefault(name, []).append((at, value))
    return columns


def read_run(folder: Path | None) -> dict[str, list[tuple[int, float]]]:
    """Returns the metrics of a run folder; none if there is no folder, or nothing was logged yet.

    Raises:
        UserError: As `read_metrics`.
    """
    try:
        return {} if folder is None else read_metrics(folder / FILE)
    except FileNotFoundError:
        return {}


def rounds_done(columns: Columns) -> int:
    """Returns the number of rounds that a run has logged."""
    return max((int(pairs[-1][0]) for pairs in columns.values()), default=0)


def average(values: Sequence[float]) -> float:
    """Returns the mean of values; NaN if one of them is not finite, or there is none."""
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def deviation(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation of values; None of a single one, NaN if one is not finite."""
    return None if len(values) < 2 else stdev(values) if all(map(math.isfinite, values)) else math.nan


def best_of(pairs: Pairs, mode: Mode) -> tuple[float, float]:
    """Returns the first round with the best finite value, and this value; NaN if no value is finite."""
    sign = 1 if mode == "max" else -1
    finite = [(at, value) for at, value in pairs if math.isfinite(value)]
    return max(finite, key=lambda pair: (sign * pair[1], -pair[0]), default=(pairs[0][0], math.nan))


def write_table(path: Path, head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a table as CSV; see `table_text`.

    Raises:
        UserError: If the file cannot be written.
    """
    write_atomically(path, table_text(head, rows))


def table_text(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table as CSV; text that a spreadsheet would take for a formula gets a quote before it."""
    text = StringIO()
    csv.writer(text).writerows([[_plain(cell) for cell in row] for row in (head, *rows)])
    return text.getvalue()


def _plain(cell: Any) -> Any:
    formula = isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def markdown(lines: Iterable[Iterable[str]]) -> str:
    """Returns lines of cells, the first of which is the head, as a Markdown table."""
    head, *body = [list(line) for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])
