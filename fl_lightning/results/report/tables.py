"""The tables of the page, as rows of plain values."""

import json
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from fl_lightning.results.compare import Group
from fl_lightning.results.configs import EXECUTION
from fl_lightning.results.papers import COLUMNS, Cell, find
from fl_lightning.results.report.files import Json, RunFiles
from fl_lightning.results.table import TABLES, Column, cell, is_best

Runs = Sequence[tuple[Group, Sequence[RunFiles]]]


class Text(NamedTuple):
    """A cell of the comparison.

    Attributes:
        text: Its text.
        best: Whether it is the best of its column.
    """

    text: str
    best: bool


class Table(NamedTuple):
    """A table of the comparison.

    Attributes:
        name: Its name.
        columns: Its columns.
        rows: Its cells, by group.
    """

    name: str
    columns: list[Column]
    rows: list[tuple[Group, list[Text]]]


class PaperRow(NamedTuple):
    """A paper's number beside ours, in the paper's unit.

    Attributes:
        run: Our runs.
        cell: The paper's cell.
        fraction: The share of the paper's rounds that we trained for.
        ours: Our mean, with the deviation over seeds; empty if our runs do not have this number.
        difference: Ours minus the paper's; empty if one is missing.
    """

    run: str
    cell: Cell
    fraction: float
    ours: str
    difference: str


class Environment(NamedTuple):
    """Code, versions and machine of some starts of runs.

    Attributes:
        what: As ``provenance.json`` holds them.
        starts: Run, date, round and command of each.
    """

    what: Json
    starts: list[Json]


def comparison(groups: Sequence[Group], shown: Sequence[Column]) -> list[Table]:
    """The tables of the comparison: results, who is served, and costs."""
    found = []
    for name in TABLES:
        columns = [column for column in shown if column.table == name]
        rows = [(group, [Text(cell(group, c), is_best(group, c, groups)) for c in columns]) for group in groups]
        found += [Table(name, columns, rows)] if columns else []
    return found


def papers(runs: Runs) -> list[PaperRow]:
    """The papers' numbers that the runs reproduce."""
    rows = []
    for group, files in runs:
        cells = {tuple(sorted(found.items())): found for run in files for found in run.cells}
        for found in cells.values():
            (paper, *_) = find(**{key: found[key] for key in COLUMNS if key in found})
            values = _ours(group, paper.metric)
            ours = f"{mean(values):.2f}" if values else ""
            ours += f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            known = values and paper.value is not None
            difference = f"{mean(values) - (paper.value or 0):+.2f}" if known else ""
            rows.append(PaperRow(group.name, paper, float(found.get("fraction", 1)), ours, difference))
    return rows


def _ours(group: Group, metric: str) -> list[float]:
    """Our values of a paper's metric; accuracy and mIoU in per cent, as papers print them."""
    if metric in ("acc", "miou") and group.runs[0].metric.endswith(metric):
        return [100 * value for value in group.values("mean")]
    return group.values(f"flatness/{metric}")


def differences(runs: Runs) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The settings in which the configs of the groups differ: names of the groups, and a row for each setting."""
    configured = [(group.name, files[0].settings) for group, files in runs if files[0].settings]
    keys = dict.fromkeys(key for _, settings in configured for key in settings if not _execution(key))
    rows = [(key, [settings.get(key, "–") for _, settings in configured]) for key in keys]
    return [name for name, _ in configured], [(key, values) for key, values in rows if len(set(values)) > 1]


def _execution(key: str) -> bool:
    return key.startswith("trainer.") and key.split(".")[1] in EXECUTION


def measurements(runs: Runs) -> list[Json]:
    """The measurements of flatness of the first run of each group, with the name of the run."""
    return [{"run": files[0].label, **found} for _, files in runs for found in files[0].measurements]


def environments(files: Sequence[RunFiles]) -> list[Environment]:
    """What the runs were made with: runs that were started alike are one environment, in the order of their starts."""
    found: dict[str, Environment] = {}
    for run in files:
        for start in run.provenance.get("starts", ()):
            what = {key: start[key] for key in ("code", "versions", "machine", "engine", "precision")}
            environment = found.setdefault(json.dumps(what, sort_keys=True), Environment(what, []))
            environment.starts.append({"run": run.label, **{key: start[key] for key in ("date", "round", "command")}})
    return list(found.values())
