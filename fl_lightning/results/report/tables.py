"""The tables of the page, as rows of plain values."""

import json
from collections.abc import Sequence

from fl_lightning.results.compare import Group
from fl_lightning.results.configs import different, is_execution
from fl_lightning.results.papers import COLUMNS, Line, beside, find
from fl_lightning.results.report.files import Json, RunFiles
from fl_lightning.results.table import TABLES, Column, cell, is_best

Runs = Sequence[tuple[Group, Sequence[RunFiles]]]
"""The groups of runs, with the files of each run."""
Cells = tuple[Group, list[tuple[str, bool]]]
"""A row of the comparison: the text of its cells, and whether each is the best of its column."""


def comparison(groups: Sequence[Group], shown: Sequence[Column]) -> list[tuple[str, list[Column], list[Cells]]]:
    """Returns name, columns and rows of the tables of the comparison: results, per-client performance, and costs."""
    found = []
    for name in TABLES:
        columns = [column for column in shown if column.table == name]
        rows = [(group, [(cell(group, c), is_best(group, c, groups)) for c in columns]) for group in groups]
        found += [(name, columns, rows)] if columns else []
    return found


def papers(runs: Runs) -> list[tuple[str, Line]]:
    """Returns the name of our runs, and both numbers."""
    rows = []
    for group, files in runs:
        for found in {json.dumps(found, sort_keys=True): found for run in files for found in run.cells}.values():
            (paper, *_) = find(**{key: found[key] for key in COLUMNS if key in found})
            how = float(found.get("fraction", 1)), (), found.get("settings", "")
            rows.append((group.name, beside(paper, group.folders, *how)))
    return rows


def differences(runs: Runs) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the names of the groups, and a row for each setting in which their configs differ."""
    configured = [(group.name, files[0].settings) for group, files in runs if files[0].settings]
    keys = [key for key in different([settings for _, settings in configured]) if not is_execution(key)]
    rows = [(key, [settings.get(key, "–") for _, settings in configured]) for key in keys]
    return [name for name, _ in configured], rows


def measurements(runs: Runs) -> list[Json]:
    """Returns the measurements of flatness of the first run of each group, with the name of the run."""
    return [{"run": files[0].label, **found} for _, files in runs for found in files[0].measurements]


def environments(files: Sequence[RunFiles]) -> list[tuple[Json, list[Json]]]:
    """Returns code, versions and machine of the runs, and the starts (run, date, round, command) that share them."""
    found: dict[str, tuple[Json, list[Json]]] = {}
    for run in files:
        for start in run.provenance["starts"]:
            what = {key: start[key] for key in ("code", "versions", "machine", "engine", "precision")}
            _, starts = found.setdefault(json.dumps(what, sort_keys=True), (what, []))
            starts.append({"run": run.label, **{key: start[key] for key in ("date", "round", "command")}})
    return list(found.values())
