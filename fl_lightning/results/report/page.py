"""The page: figures and tables of compared runs, put into the template."""

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fl_lightning import __version__
from fl_lightning.results.compare import Group
from fl_lightning.results.curves import curve, drawn, read
from fl_lightning.results.report import clients, figures
from fl_lightning.results.report.files import RunFiles, densities, partitions, read_group, spectra
from fl_lightning.results.report.tables import comparison, differences, environments, measurements, papers
from fl_lightning.results.table import Column

TEMPLATE = "report.html.j2"
CONTENTS = {
    "table": "Comparison",
    "papers": "Beside the papers",
    "curves": "Curves",
    "served": "Who is served",
    "tradeoff": "Flatness and accuracy",
    "spectra": "Spectra",
    "landscapes": "Loss landscapes",
    "partitions": "Partitions",
    "settings": "Settings",
    "provenance": "Provenance",
    "protocol": "Protocol",
}
"""The sections by their ids."""


def write_report(groups: Sequence[Group], shown: Sequence[Column], page: Path, protocol: str) -> None:
    """Writes the report of compared runs: one HTML file that refers to nothing outside of it.

    Args:
        groups: The runs.
        shown: The columns of the table.
        page: The file.
        protocol: What all measurements of flatness have in common.

    Raises:
        UserError: If a file in a run folder is not readable.
    """
    runs = [(group, read_group(group)) for group in groups]
    files = [run for _, of in runs for run in of]
    specs = _figures(groups, files, [column.key for column in shown if column.of.startswith("flatness/")])
    specs["served"] = clients.figures(_client_tables(runs))
    found = papers(runs)
    context = {
        "title": _title(runs),
        "version": __version__,
        "date": f"{datetime.now():%d %B %Y, %H:%M}",
        "groups": groups,
        "runs": runs,
        "first": groups[0].runs[0],
        "comparison": comparison(groups, shown),
        "papers": found,
        "differences": differences(runs),
        "measurements": measurements(runs),
        "protocol": protocol,
        "environments": environments(files),
        "changes": {key: text for run in files for key, text in run.provenance.get("changes", {}).items()},
        "evaluations": sorted({run.evaluations for group in groups for run in group.runs}),
        "contents": [(id, name) for id, name in CONTENTS.items() if specs.get(id, True) and (id != "papers" or found)],
        "legend": [{"name": group.name, **figures.legend(i)} for i, group in enumerate(groups)],
        "sections": {section: list(found) for section, found in specs.items()},
        "figures": {f"{s}: {name}": spec for s, found in specs.items() for name, spec in found.items()},
        "label": lambda name: Markup(name) if name in figures.TITLES.values() else name,  # ours have subscripts
        "plotly": _plotly(),
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_template().render(context), encoding="utf-8")


def _title(runs: Sequence[tuple[Group, Sequence[RunFiles]]]) -> str:
    """The algorithms and data sets, as far as the configs name them; or the names of the groups."""
    settings = [files[0].settings for _, files in runs]
    models, data = (list(dict.fromkeys(s[part] for s in settings if part in s)) for part in ("model", "data"))
    names = models or [group.name for group, _ in runs]
    listed = ", ".join(names) if len(names) <= 5 else f"{len(names)} algorithms"
    return f"{listed} on {', '.join(data)}" if data else listed


def _figures(
    groups: Sequence[Group], files: Sequence[RunFiles], measures: Sequence[str]
) -> dict[str, dict[str, figures.Spec]]:
    """The figures by section and title."""
    columns = read({group.name: group.metrics for group in groups})
    metric = groups[0].runs[0].metric
    curves = {}
    for name in drawn(columns):
        found = {label: (i, curve(of, name)) for i, (label, of) in enumerate(columns.items())}
        curves[figures.title(name)] = figures.curves(name, {k: (i, band) for k, (i, band) in found.items() if band})
    return {
        "curves": curves,
        "tradeoff": {figures.title(f"flatness/{m}"): figures.tradeoff(groups, m, metric) for m in measures},
        "spectra": _spectra(files),
        "landscapes": {
            f"{name} · {run.label} · {path}": spec
            for run in files
            for path, found in run.landscapes.items()
            for name, spec in figures.landscape(found).items()
        },
        "partitions": _partitions(files),
    }


def _client_tables(runs: Sequence[tuple[Group, Sequence[RunFiles]]]) -> clients.Tables:
    tables = {group.name: (i, [f.clients for f in of if f.clients is not None]) for i, (group, of) in enumerate(runs)}
    return {name: (i, of) for name, (i, of) in tables.items() if of}


def _spectra(files: Sequence[RunFiles]) -> dict[str, figures.Spec]:
    specs = {}
    if found := spectra(files):
        lines = {name: (range(1, len(values) + 1), values) for name, values in found.items()}
        positive = all(min(values) > 0 for values in found.values())
        specs["Eigenvalues of the Hessian"] = figures.lines(lines, "index i", "eigenvalue λ<sub>i</sub>", positive)
    if density := densities(files):
        specs["Density of the Hessian’s spectrum"] = figures.density(density)
    return specs


def _partitions(files: Sequence[RunFiles]) -> dict[str, figures.Spec]:
    """A heat map of each partition that differs from the others."""
    specs = {}
    for found, labels in partitions(files):
        clients, all_ = min(len(found["counts"]), figures.CLIENTS), found["clients"]
        which = f"{clients:,} of {all_:,} clients" if clients < all_ else f"{clients:,} clients"
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        specs[f"{which}: {'; '.join(labels[:3])}{more}"] = figures.partition(found)
    return specs


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(__package__, "")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template(TEMPLATE)
