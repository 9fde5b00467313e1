"""Metrics of runs by round, from ``metrics.csv``: reading, statistics that survive NaN, means over seeds; tables."""

import csv
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from fl_lightning.core import UserError, checked, parse_json, read_json, require, write_atomically

Mode = Literal["max", "min"]
"""Whether the largest or the smallest value of a metric is the best."""
DIRECTIONS = "directions.json"
"""File of a run folder with the directions of metrics, where they do not follow from the names."""


class Known(NamedTuple):
    """A metric that the package logs.

    Attributes:
        name: Its name; ``{}`` stands for what the data evaluate, such as acc.
        title: Its title in tables and figures.
        unit: Its unit; empty if it has the unit of what the data evaluate.
        key: Key of its column in ``compare.csv``; empty if it has no column of its own.
    """

    name: str
    title: str
    unit: str = ""
    key: str = ""


OWN = "server/clients"
"""Section with means over clients, of the global model or of their own ones."""
EVALUATED = {"acc": ("accuracy", "fraction"), "miou": ("mIoU", "fraction"), "loss": ("loss", "loss")}
"""Title and unit of what data evaluate, by the last part of the metric's name."""
METRICS = (
    Known("server/test/{}", "test {}"),
    Known("server/val/{}", "validation {}"),
    Known("client/train/{}", "training {}"),
    Known("flatness/lambda_max", "lambda_max", "loss / weight²", "lambda_max"),
    Known("flatness/merged_lambda_max", "merged lambda_max", "loss / weight²", "merged_lambda_max"),
    Known("flatness/critical_sharpness", "critical sharpness", "loss / weight²", "critical_sharpness"),
    Known("flatness/discrepancy", "discrepancy", "loss", "discrepancy"),
    Known("flatness/sharpness_global", "global sharpness", "loss", "sharpness_global"),
    Known("flatness/sharpness_local", "local sharpness", "loss", "sharpness_local"),
    Known("server/clients/{}", "mean of clients", key="clients"),
    Known("server/clients/{}_weighted", "mean weighted by samples", key="clients_weighted"),
    Known("server/clients/{}_std", "sd over clients", key="clients_std"),
    Known("server/clients/{}_worst_decile", "worst 10 % of clients", key="worst_decile"),
    Known("server/clients/{}_worst", "worst client", key="worst_client"),
    Known("server/unseen_clients/{}", "mean of clients not seen", key="unseen_clients"),
    Known("client/adapted/{}", "mean of clients not seen, adapted", key="adapted_clients"),
    Known("client/test/{}", "local models", key="local"),
    Known("client/test/{}_worst_decile", "worst 10 % of local models", key="local_worst_decile"),
    Known("client/test/{}_gap", "local minus global", key="local_gap"),
)
LONGEST_FIRST = sorted(METRICS, key=lambda entry: len(entry.name), reverse=True)
"""The same, to find a metric's own entry before one whose name has a part of any form: acc_worst is no own metric."""
MAIN = (
    "server/test/acc", "server/test/miou", "server/test/loss", "client/train/loss", "server/clients/acc_worst_decile",
    "flatness/lambda_max", "flatness/discrepancy",
)  # fmt: skip
"""Metrics that a run shows while it trains and in its figure, if it measures them."""


def known(metric: str) -> Known:
    """Returns the entry of a metric; one that is not in the registry has its own name as title."""
    leaf = metric.rpartition("/")[2]
    for entry in LONGEST_FIRST:
        if match := re.fullmatch(re.escape(entry.name).replace(r"\{\}", "([^/]+)"), metric):
            evaluated, unit = EVALUATED.get(match[1], (match[1], "")) if match.groups() else ("", entry.unit)
            return Known(metric, entry.title.format(evaluated), unit, entry.key)
    return Known(metric, leaf.replace("_", " ") if metric.startswith("flatness/") else metric, key=leaf)


def title(metric: str) -> str:
    """Returns the title of a metric."""
    return known(metric).title


def label(metric: str) -> str:
    """Returns the title of a metric as matplotlib typesets it."""
    return title(metric).replace("lambda_max", r"Hessian $\lambda_{max}$")


def shown(metrics: Iterable[str]) -> list[str]:
    """Returns the metrics that a run shows: those of `MAIN`, and what else is evaluated on the test set; see `tested`.

    Args:
        metrics: Names of the metrics that were measured.
    """
    names = dict.fromkeys(metrics)
    return [name for name in MAIN if name in names] + [name for name in tested(names) if name not in MAIN]


def tested(metrics: Iterable[str]) -> list[str]:
    """Returns what is evaluated on the test set, but the loss: of the global model, or of clients' own models."""
    names = dict.fromkeys(metrics)
    evaluated = [name for name in names if name.startswith("server/test/")]
    evaluated = evaluated or [name for name in names if name.startswith(OWN) and known(name).key == "clients"]
    return [name for name in evaluated if not name.endswith("/loss")]


def mode_of(metric: str, mode: Mode | None = None, directions: Mapping[str, Mode] | None = None) -> Mode:
    """Returns whether large or small values of a metric are good.

    Large values of what the data evaluate (``server/...``, ``client/test/...``, ``client/adapted/...``: accuracy, mIoU)
    are good, unless the metric itself declares otherwise. Small losses, deviations over clients, flatness, times and
    bits are good.

    Args:
        metric: Name of the metric.
        mode: The user's choice; None: as the name says.
        directions: What the run's metrics declare themselves, by the last part of their names; see `read_directions`.

    Raises:
        UserError: If the name does not tell.
    """
    require(mode in ("max", "min", None), "mode", mode, "choose from max, min")
    if mode is not None:
        return mode
    leaf, declared = metric.rpartition("/")[2], directions or {}
    if direction := declared.get(leaf) or declared.get(re.sub("_(weighted|worst|worst_decile)$", "", leaf)):
        return direction
    if re.search(r"(^|/)loss$|_std$", metric) or metric.startswith(("flatness/", "time/", "comm/")):
        return "min"
    evaluated = metric.startswith(("server/", "client/test/", "client/adapted/"))
    require(evaluated, "metric", metric, "set mode to max or min: its name does not tell")
    return "max"


def read_directions(folder: Path) -> dict[str, Mode]:
    """Returns the directions of a run's metrics that their names do not tell, from its ``directions.json``, if any.

    Raises:
        UserError: If the file is damaged.
    """
    return dict(read_json(folder / DIRECTIONS, dict[str, Mode], {}))


def is_flatness(metric: str) -> bool:
    """Returns whether a metric is a measure of flatness; residuals and standard errors are not."""
    return metric.startswith("flatness/") and not metric.endswith(("_residual", "_error"))


def is_of_clients(metric: str) -> bool:
    """Returns whether a metric is a statistic over the evaluations of each client."""
    return metric.startswith(("server/clients/", "server/unseen_clients/", "client/adapted/", "client/test/"))


def is_protected(metric: str) -> bool:
    """Returns whether a metric of a run under ``trainer.privacy`` is a function of its releases and of test data."""
    return re.fullmatch(r"client/(diverged|lr)|privacy/\w+|server/test/.+", metric) is not None


def is_result(metric: str) -> bool:
    """Returns whether a metric is a result, with a best value and a curve: evaluation, training loss and flatness."""
    return is_flatness(metric) or metric.startswith("server/") or metric == "client/train/loss"


CLOCK = "clock/time_s"
"""Seconds on the clients' devices so far."""
FILE = "metrics.csv"
"""In the run folder: a row for each round, a column for each metric."""
Pairs = Sequence[tuple[float, float]]
"""Values by round."""
Columns = Mapping[str, Pairs]
"""Values by metric and round."""
LARGEST = 2**63 - 1
NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|nan)", re.IGNORECASE)
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of what a spreadsheet takes for a formula."""


@dataclass(frozen=True, eq=False)
class Series(Sequence[tuple[int, float]]):
    """Values by round, as pairs (round, value) in 16 bytes each."""

    rounds: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.rounds)

    def __getitem__(self, at: Any) -> Any:
        """Returns a pair, or a list of some."""
        if isinstance(at, slice):
            return [*zip(self.rounds[at], self.values[at], strict=True)]
        return self.rounds[at], self.values[at]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yields the pairs."""
        return zip(self.rounds, self.values, strict=True)

    def append(self, round: int, value: float) -> None:
        """Adds a pair."""
        self.rounds.append(round)
        self.values.append(value)

    def __eq__(self, other: object) -> bool:
        """Returns whether another sequence has the same pairs."""
        return isinstance(other, Sequence) and [*self] == [*other]


def read_rows(path: Path) -> list[list[str]]:
    """Returns the head and the rows of a CSV file that a run writes line by line.

    A last row without its end of line is left out: a crash has cut it short, and its last number may lack digits.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no text.
        csv.Error: If it is no CSV.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [*_rows(file)]


def _rows(file: Iterable[str]) -> Iterator[list[str]]:
    lines = (line for n, line in enumerate(file) if not n or line.endswith("\n"))
    return (row for row in csv.reader(lines, strict=True) if row)


def read_numbers(path: Path, what: str, *integers: str) -> tuple[list[str], list[dict[str, float]]]:
    """Returns the head of a table of numbers that a run writes, and its rows by column, without empty cells.

    Args:
        path: The CSV file.
        what: What the table holds, for the error message.
        *integers: Columns that it must have; every row has a whole number in them.

    Raises:
        UserError: If the file is no such table.
    """
    head, *rows = _numbers(path, what, *integers)
    return head, [{n: v for n, v in zip(head, row, strict=True) if v is not None} for row in rows]


def _numbers(path: Path, what: str, *integers: str) -> Iterator[list[Any]]:
    """Yields the head, and then the rows, with None for an empty cell; see `read_numbers`."""
    line = 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = _rows(file)
            head = next(rows, [])
            if missing := [name for name in integers if name not in head]:
                raise ValueError(f"no column named {missing[0]}")
            yield head
            reads = [int if name in integers else float for name in head]
            indices = [head.index(name) for name in integers]
            for line, row in enumerate(rows, 2):  # noqa: B007  the message names it
                if len(row) != len(head):
                    raise ValueError(f"{len(row)} cells, not {len(head)}")
                values: list[Any] = [
                    read(cell) if cell or read is int else None for read, cell in zip(reads, row, strict=True)
                ]
                for index in indices:
                    if not -LARGEST <= values[index] <= LARGEST:
                        raise ValueError(f"{head[index]} beyond {LARGEST}")
                yield values
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; give the table of {what} in it") from None
    except (ValueError, OverflowError, csv.Error) as error:
        where = "" if line == 1 else f"line {line}: "
        raise UserError(
            f"{path}: not a table of {what} ({where}{error}); restore the file, or leave its run out"
        ) from None


@checked
def read_metrics(path: str | Path) -> dict[str, Series]:
    """Returns the columns of a ``metrics.csv`` as (round, value) pairs, without empty cells.

    Raises:
        UserError: If the file is no table of numbers by round.
    """
    rows = _numbers(Path(path), "metrics", "round")
    head = next(rows)
    columns, index = [Series() for _ in head], head.index("round")
    for row in rows:
        for series, value in zip(columns, row, strict=True):
            if value is not None:
                series.append(row[index], value)
    return {name: series for name, series in zip(head, columns, strict=True) if series and name != "round"}


def read_run(folder: Path | None) -> dict[str, Series]:
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
    buffer = StringIO()
    csv.writer(buffer).writerows(
        [
            f"'{cell}" if isinstance(cell, str) and cell[:1] in FORMULA and not NUMBER.fullmatch(cell) else cell
            for cell in row
        ]
        for row in (head, *rows)
    )
    return buffer.getvalue()


def markdown(lines: Iterable[Iterable[str]]) -> str:
    """Returns lines of cells, the first of which is the head, as a Markdown table."""
    head, *body = [list(line) for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


MEASUREMENTS = "flatness.jsonl"
"""In the run folder: a line for each measurement."""
PROTOCOL = "loss without weight decay, eval mode, no augmentation, in the precision of the weights"
Number = Real | None
"""None: not finite, or undefined."""
MEASUREMENT: dict[str, Any] = {
    **dict.fromkeys(("name", "model", "data"), str),
    **dict.fromkeys(("value", "error", "residual"), Number),
    "samples": int,
    "settings": dict[str, Any],
    "details": {**dict.fromkeys(("eigenvalues?", "grid?", "density?"), list[Number]), "clients?": dict[str, Number]},
}
"""The form of a measurement of flatness, see `fits`."""


def read_measurements(run: Path) -> list[dict[str, Any]]:
    """Returns the measurements of a run, by round; a crash may have cut the very last line short.

    Raises:
        UserError: If the file is damaged.
    """
    path = run / MEASUREMENTS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    form = {**MEASUREMENT, "round": int}
    return [parse_json(line, path, form) for line in lines if line.endswith(b"\n")]


def last_measurements(run: Path) -> dict[str, dict[str, Any]]:
    """Returns the last measurement of each name.

    Raises:
        UserError: As `read_measurements`.
    """
    return {measurement["name"]: measurement for measurement in read_measurements(run)}


def protocol(measured: Mapping[str, Any]) -> str:
    """Returns model, data and settings of a measurement in one line."""
    settings = [f"{name} {value}" for name, value in measured["settings"].items()]
    on = f"{measured['data']} ({measured['samples']:,})" if measured["samples"] else measured["data"]
    return ", ".join(part for part in (measured["model"], on, *settings) if part)
