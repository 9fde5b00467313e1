"""The page: figures and tables of compared runs, put into the template."""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fl_lightning import __version__
from fl_lightning.core import COLORS, Figure, render
from fl_lightning.results.importance import HEAD, Importance
from fl_lightning.results.report.tables import Runs, comparison, differences, environments, measurements, papers
from fl_lightning.results.table import Column, label, names

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
