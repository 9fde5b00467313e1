"""The page: figures and tables of compared runs, put into the template."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fl_lightning import __version__
from fl_lightning.core import COLORS, Figure, grouped, render
from fl_lightning.results.compare import Group
from fl_lightning.results.configs import different, is_execution
from fl_lightning.results.papers import COLUMNS, Line, beside, find
from fl_lightning.results.report.files import Json, RunFiles
from fl_lightning.results.table import TABLES, Column, cell, is_best, label, names
from fl_lightning.results.varied import HEAD, Importance

Runs = Sequence[tuple[Group, Sequence[RunFiles]]]
"""The groups of runs, with the files of each run."""
Cells = tuple[Group, list[tuple[str, bool]]]
"""A row of the comparison: the text of its cells, and whether each is the best of its column."""


def comparison(groups: Sequence[Group], shown: Sequence[Column]) -> list[tuple[str, list[Column], list[Cells]]]:
    """Returns name, columns and rows of the tables of the comparison: results, per-client performance, and costs."""
    tables = {name: [column for column in shown if column.table == name] for name in TABLES}
    return [
        (name, columns, [(group, [(cell(group, c), is_best(group, c, groups)) for c in columns]) for group in groups])
        for name, columns in tables.items()
        if columns
    ]


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
    """Returns the starts of the runs that share code, versions and machine: the first one, and all of them."""
    shared = ("code", "versions", "machine", "engine", "precision")
    alike = grouped(
        (json.dumps([start[key] for key in shared], sort_keys=True), {"run": run.label, **start})
        for run in files
        for start in run.provenance["starts"]
    )
    return [(starts[0], starts) for starts in alike.values()]


ZOOM = 1.5
"""Largest size of a drawing on the page, relative to its size on paper."""
TEMPLATE = "report.html.j2"
CONTENTS = {
    "table": "Comparison",
    "papers": "Beside the papers",
    "sweep": "Settings that matter",
    "curves": "Curves",
    "per-client": "Per-client performance",
    "tradeoff": "Flatness and accuracy",
    "spectra": "Spectra",
    "landscapes": "Loss landscapes",
    "partitions": "Partitions",
    "settings": "Settings",
    "provenance": "Provenance",
    "protocol": "Protocol",
}
"""The sections by their ids."""


def report_page(
    runs: Runs,
    shown: Sequence[Column],
    protocol: str,
    figures: Mapping[str, Mapping[str, Figure]],
    importances: tuple[Sequence[Importance], str] | None = None,
) -> str:
    """Returns the report of compared runs: one HTML page that refers to nothing outside of it.

    Args:
        runs: The groups of runs, with the files of each run.
        shown: The columns of the table.
        protocol: What all measurements of flatness have in common.
        figures: The figures by section and title; those of landscapes are taken from the run folders.
        importances: Of the settings of a sweep, and what they are; None: without that table.
    """
    groups, files = [group for group, _ in runs], [run for _, of in runs for run in of]
    pictures: dict[str, Figure | Path] = {
        f"{run.label} · {path.relative_to(run.folder)}": path for run in files for path in run.pictures
    }
    number, found = count(), papers(runs)
    sections = {
        section: {title: _element(figure, title, next(number)) for title, figure in of.items()}
        for section, of in {**figures, "landscapes": pictures}.items()
    }
    context = {
        "title": _title(runs),
        "version": __version__,
        "date": f"{datetime.now():%d %B %Y, %H:%M}",
        "groups": groups,
        "runs": runs,
        "first": groups[0].runs[0],
        "windows": sorted({run.last for group in groups for run in group.runs}),
        "rounds": sorted({run.rounds for group in groups for run in group.runs}),
        "names": names(groups),
        "label": label,
        "comparison": comparison(groups, shown),
        "papers": found,
        "importances": importances,
        "importance_head": HEAD,
        "differences": differences(runs),
        "measurements": measurements(runs),
        "protocol": protocol,
        "environments": environments(files),
        "changes": {key: text for run in files for key, text in run.provenance["changes"].items()},
        "evaluations": sorted({run.evaluations for group in groups for run in group.runs}),
        "contents": [(id, name) for id, name in CONTENTS.items() if sections.get(id, found if id == "papers" else 1)],
        "colors": [COLORS[i % len(COLORS)] for i in range(len(groups))],
        "sections": sections,
    }
    return str(_template().render(context))


def _element(figure: Figure | Path, title: str, number: int) -> Markup:
    """Returns the element that shows a figure.

    Args:
        figure: A drawing, or the PNG file of a picture.
        title: What it shows, for readers who do not see it.
        number: Its number on the page, so that no two drawings share an id.
    """
    if isinstance(figure, Path):
        data = base64.b64encode(figure.read_bytes()).decode()
        return Markup(f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">')
    (svg,) = render(figure, svg={"Date": None})
    drawing = svg.decode().partition("<svg")[2].partition(">")[2]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'\bid="(run-\d+)"', r'class="\1"', drawing)  # the lines of a run, which its button hides
    drawing = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>f{number}-", drawing)
    width, height = 72 * figure.get_size_inches()
    most = f"max-width: {ZOOM * width / 72:.3g}in"
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" style="{most}">'
    return Markup(head + drawing)


def _title(runs: Runs) -> str:
    """Returns the algorithms and data sets, as far as the configs name them; or the names of the groups."""
    settings = [files[0].settings for _, files in runs]
    models, data = (list(dict.fromkeys(s[part] for s in settings if part in s)) for part in ("model", "data"))
    names = models or [group.name for group, _ in runs]
    listed = ", ".join(names) if len(names) <= 5 else f"{len(names)} algorithms"
    return f"{listed} on {', '.join(data)}" if data else listed


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(__package__, "")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template(TEMPLATE)
