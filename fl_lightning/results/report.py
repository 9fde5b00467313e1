"""The report of runs: one HTML page that opens offline, made from all files of the run folders.

These are, beside the metrics, config, provenance, partition, measurements, pictures and papers' cells. Files that
others may have written are taken as they are; one that is not readable is an error.
"""

import base64
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import yaml
from markupsafe import Markup, escape

from fl_lightning import __version__
from fl_lightning.core import (
    COLORS,
    Figure,
    Interval,
    NonNegative,
    ensure,
    fits,
    grouped,
    hidden_text,
    hidden_words,
    read_json,
    render,
)
from fl_lightning.results.clients import ClientTable, read_clients
from fl_lightning.results.compare import Group, Seeds
from fl_lightning.results.configs import config_files, different, is_execution, read_config, settings_of
from fl_lightning.results.metrics import MEASUREMENT, last_measurements
from fl_lightning.results.papers import COLUMNS, Line, beside, find
from fl_lightning.results.table import TABLES, Column, cell, is_best, label, names
from fl_lightning.results.varied import HEAD, Importance

Json = dict[str, Any]


def _is_code(value: Any) -> bool:
    """Returns whether a value is the code of the working folder and the package, as far as it is known."""
    code = {"commit": str, "changes": str | None, "unknown_files": list[str]}
    return fits(value, dict) and all(state is None or fits(state, code) for state in value.values())


PROVENANCE: Json = {
    "starts": [
        {
            "date": str,
            "round": int,
            "command": str,
            "versions": dict[str, str],
            "machine": {
                "system": str,
                "cpu": str,
                "cores": int | None,
                "threads": int,
                "device": str,
                "processes": int,
            },
            "engine": str | None,
            "precision": str,
            "code": _is_code,
        }
    ],
    "changes": dict[str, str],
}
"""The form of ``provenance.json``, see `fits`."""
PARTITION: Json = {
    "clients": int,
    "classes": Annotated[int, Interval("[1, 1e5]")],
    "counts": list[dict[str, Annotated[int, Interval("[0, 1e15]")]]],
    "unit?": str,
    "names?": list[str],
}
"""The form of ``partition.json``."""
MEASURED: Json = {"round": int, "measurements": [MEASUREMENT]}
"""The form of a file of the command ``flatness``."""
REPRODUCED: Json = {
    "paper": str,
    **dict.fromkeys((f"{name}?" for name in COLUMNS if name != "paper"), str),
    "fraction?": NonNegative,
    "settings?": str,
}
"""The form of a paper's cell that a run reproduces."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run; empty where there is none.

    Attributes:
        label: Name of its group, with its seed if the group has several.
        folder: The run folder.
        settings: The last config by key as on the command line.
        config: The text of its config files.
        provenance: ``provenance.json``.
        partition: ``partition.json``.
        clients: The last evaluation of each client; None if there is none.
        measurements: The last measurement of each name during the run, then those of the command ``flatness``; each has
            ``where``, which says so.
        pictures: Pictures that ``landscape`` and ``interpolate`` have drawn.
        cells: The papers' cells that the run reproduces, from ``reproduction.json``.
    """

    label: str
    folder: Path
    settings: dict[str, Any]
    config: str
    provenance: Json
    partition: Json
    clients: ClientTable | None
    measurements: list[Json]
    pictures: list[Path]
    cells: list[Json]


def read_group(group: Group) -> list[RunFiles]:
    """Reads the files of each run of a group.

    Raises:
        UserError: If one is not readable.
    """
    return [_read(group, folder, seeds) for folder, seeds in zip(group.folders, group.seeds, strict=True)]


def partitions(runs: Sequence[RunFiles]) -> list[tuple[Json, list[str]]]:
    """Returns the partitions that differ, and the runs that have each."""
    by_partition = grouped((repr(run.partition), run) for run in runs if run.partition)
    return [(members[0].partition, [run.label for run in members]) for members in by_partition.values()]


def spectra(runs: Sequence[RunFiles]) -> dict[str, list[float]]:
    """Returns the measured eigenvalues, largest first, by run; see `_details` for the names."""
    return {label: sorted(details["eigenvalues"], reverse=True) for label, details in _details(runs, "eigenvalues")}


def densities(runs: Sequence[RunFiles]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the measured densities of the spectrum, as eigenvalues and density there, by run; see `_details`."""
    return {label: (details["grid"], details["density"]) for label, details in _details(runs, "density")}


def _details(runs: Sequence[RunFiles], key: str) -> Iterator[tuple[str, Json]]:
    """Yields the details of the measurements that have a key, with a label.

    The label is the run, the matrix unless it is the Hessian of all weights, whether these are merged, and data and
    place if they are not the same in all measurements. What is not finite is left out.
    """
    candidates = [(run, measured, measured["details"].get(key)) for run in runs for measured in run.measurements]
    matches = [(run, measured) for run, measured, value in candidates if value and None not in value]
    differing = [name for name in ("data", "where") if len({measured[name] for _, measured in matches}) > 1]
    for run, measured in matches:
        settings = measured["settings"]
        matrix = [settings.get("operator"), settings.get("parameters"), "merged" if settings.get("merged") else None]
        parts = [*(part for part in matrix if part not in (None, "hessian")), *(measured[name] for name in differing)]
        yield ", ".join([run.label, *parts]), measured["details"]


def _read(group: Group, folder: Path, seeds: Seeds) -> RunFiles:
    twice = len({pair[0] for pair in group.seeds if pair}) < len(group.runs)  # then only those of the data differ
    seed = f", seed {seeds[0]}{f', data seed {seeds[1]}' if twice else ''}" if seeds else f", {folder.name}"
    return RunFiles(
        label=group.name + (seed if len(group.runs) > 1 else ""),
        folder=folder,
        settings=settings_of(folder),
        config="\n".join(
            (f"# after round {round}\n" if round else "") + yaml.safe_dump(read_config(path), sort_keys=False)
            for round, path in config_files(folder).items()
        ),
        provenance=_provenance(folder / "provenance.json"),
        partition=_partition(folder / "partition.json"),
        clients=read_clients(folder),
        measurements=[
            *(
                {**measurement, "where": f"during the run, after round {measurement['round']}"}
                for measurement in last_measurements(folder).values()
            ),
            *(
                {**measurement, "where": f"{path.relative_to(folder)}, after round {content['round']}"}
                for path, content in ((path, read_json(path, MEASURED)) for path in _below(folder, "json", "flatness"))
                for measurement in content["measurements"]
            ),
        ],
        pictures=_below(folder, "png", "landscape", "interpolate"),
        cells=read_json(folder / "reproduction.json", [REPRODUCED], []),
    )


def _provenance(path: Path) -> Json:
    """Returns the content of ``provenance.json`` without the secrets that earlier versions have kept."""
    provenance: Json = read_json(path, PROVENANCE, {"starts": [], "changes": {}})
    for start in provenance["starts"]:
        try:
            words = shlex.split(start["command"])
        except ValueError:  # no command that a run writes
            words = start["command"].split()
        if (public := hidden_words(words)) != words:
            start["command"] = shlex.join(public)
    return {**provenance, "changes": {key: hidden_text(text) for key, text in provenance["changes"].items()}}


def _partition(path: Path) -> Json:
    partition: Json = read_json(path, PARTITION, {})
    consistent = len(partition.get("names", range(partition.get("classes", 0)))) == partition.get("classes", 0)
    ensure(
        partition == {} or (partition["counts"] and consistent),
        f"{path}: not what a run writes there; restore or remove it",
    )
    return partition


def _below(folder: Path, suffix: str, *names: str) -> list[Path]:
    """Returns the files with a suffix in subfolders of the run folder whose names begin so."""
    return sorted(path for name in names for path in folder.glob(f"{name}*/**/*.{suffix}"))


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
        for entry in {json.dumps(entry, sort_keys=True): entry for run in files for entry in run.cells}.values():
            (paper, *_) = find(**{key: entry[key] for key in COLUMNS if key in entry})
            arguments = float(entry.get("fraction", 1)), (), entry.get("settings", "")
            rows.append((group.name, beside(paper, group.folders, *arguments)))
    return rows


def differences(runs: Runs) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the names of the groups, and a row for each setting in which their configs differ."""
    configured = [(group.name, files[0].settings) for group, files in runs if files[0].settings]
    keys = [key for key in different([settings for _, settings in configured]) if not is_execution(key)]
    rows = [(key, [settings.get(key, "–") for _, settings in configured]) for key in keys]
    return [name for name, _ in configured], rows


def measurements(runs: Runs) -> list[Json]:
    """Returns the measurements of flatness of the first run of each group, with the name of the run."""
    return [{"run": files[0].label, **measurement} for _, files in runs for measurement in files[0].measurements]


def environments(files: Sequence[RunFiles]) -> list[tuple[Json, list[Json]]]:
    """Returns the starts of the runs that share code, versions and machine: the first one, and all of them."""
    shared = ("code", "versions", "machine", "engine", "precision")
    by_environment = grouped(
        (json.dumps([start[key] for key in shared], sort_keys=True), {"run": run.label, **start})
        for run in files
        for start in run.provenance["starts"]
    )
    return [(starts[0], starts) for starts in by_environment.values()]


ZOOM = 1.5
"""Largest size of a drawing on the page, relative to its size on paper."""
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
        importances: Importances of the settings of a sweep, and a line on them; None: no such table.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    groups, files = [group for group, _ in runs], [run for _, members in runs for run in members]
    pictures: dict[str, Figure | Path] = {
        f"{run.label} · {path.relative_to(run.folder)}": path for run in files for path in run.pictures
    }
    numbers, lines = count(), papers(runs)
    sections = {
        section: {title: _element(figure, title, next(numbers)) for title, figure in drawn.items()}
        for section, drawn in {**figures, "landscapes": pictures}.items()
    }
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        {
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
            "papers": lines,
            "importances": importances,
            "importance_head": HEAD,
            "differences": differences(runs),
            "measurements": measurements(runs),
            "protocol": protocol,
            "environments": environments(files),
            "changes": {key: text for run in files for key, text in run.provenance["changes"].items()},
            "evaluations": sorted({run.evaluations for group in groups for run in group.runs}),
            "contents": [
                (id, name) for id, name in CONTENTS.items() if sections.get(id, lines if id == "papers" else 1)
            ],
            "colors": [COLORS[i % len(COLORS)] for i in range(len(groups))],
            "sections": sections,
        }
    )


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
    style = f"max-width: {ZOOM * width / 72:.3g}in"
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" style="{style}">'
    return Markup(head + drawing)


def _title(runs: Runs) -> str:
    """Returns the algorithms and data sets, as far as the configs name them; or the names of the groups."""
    settings = [files[0].settings for _, files in runs]
    models, data = (list(dict.fromkeys(s[part] for s in settings if part in s)) for part in ("model", "data"))
    names = models or [group.name for group, _ in runs]
    listed = ", ".join(names) if len(names) <= 5 else f"{len(names)} algorithms"
    return f"{listed} on {', '.join(data)}" if data else listed
