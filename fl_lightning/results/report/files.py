"""The files of a run folder beside its metrics: config, provenance, partition, measurements, pictures, papers' cells.

Files that others may have written are taken as they are; one that is not readable is an error.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from fl_lightning.core import Interval, NonNegative, ensure, fits, grouped, hidden_text, hidden_words, read_json
from fl_lightning.results.clients import ClientTable, read_clients
from fl_lightning.results.compare import Group, Seeds
from fl_lightning.results.configs import config_files, read_config, settings_of
from fl_lightning.results.metrics import MEASUREMENT, last_measurements
from fl_lightning.results.papers import COLUMNS

Json = dict[str, Any]


def _is_code(value: Any) -> bool:
    """Returns whether a value is the code of the working folder and the package, as far as it is known."""
    code = {"commit": str, "changes": str | None, "unknown_files": list[str]}
    return fits(value, dict) and all(found is None or fits(found, code) for found in value.values())


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
    alike = grouped((repr(run.partition), run) for run in runs if run.partition)
    return [(of[0].partition, [run.label for run in of]) for of in alike.values()]


def spectra(runs: Sequence[RunFiles]) -> dict[str, list[float]]:
    """Returns the measured eigenvalues, largest first, by run; see `_details` for the names."""
    return {label: sorted(found["eigenvalues"], reverse=True) for label, found in _details(runs, "eigenvalues")}


def densities(runs: Sequence[RunFiles]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the measured densities of the spectrum, as eigenvalues and density there, by run; see `_details`."""
    return {label: (found["grid"], found["density"]) for label, found in _details(runs, "density")}


def _details(runs: Sequence[RunFiles], key: str) -> Iterator[tuple[str, Json]]:
    """Yields the details of the measurements that have a key, with a label.

    The label is the run, the matrix unless it is the Hessian of all weights, and data and place if they are not the
    same in all measurements. What is not finite is left out.
    """
    values = [(run, of, of["details"].get(key)) for run in runs for of in run.measurements]
    found = [(run, measured) for run, measured, given in values if given and None not in given]
    differing = [name for name in ("data", "where") if len({measured[name] for _, measured in found}) > 1]
    for run, measured in found:
        matrix = [measured["settings"].get(name) for name in ("operator", "parameters")]
        parts = [*(part for part in matrix if part not in (None, "hessian")), *(measured[name] for name in differing)]
        yield ", ".join([run.label, *parts]), measured["details"]


def _read(group: Group, folder: Path, seeds: Seeds) -> RunFiles:
    seed = f", seed {seeds[0]}" if seeds else f", {folder.name}"
    return RunFiles(
        label=group.name + (seed if len(group.runs) > 1 else ""),
        folder=folder,
        settings=settings_of(folder),
        config="\n".join(_text_of(path, round) for round, path in config_files(folder).items()),
        provenance=_provenance(folder / "provenance.json"),
        partition=_partition(folder / "partition.json"),
        clients=read_clients(folder),
        measurements=[*_monitored(folder), *_measured(folder)],
        pictures=_below(folder, "png", "landscape", "interpolate"),
        cells=read_json(folder / "reproduction.json", [REPRODUCED], []),
    )


def _text_of(config: Path, round: int) -> str:
    return (f"# after round {round}\n" if round else "") + str(yaml.safe_dump(read_config(config), sort_keys=False))


def _provenance(path: Path) -> Json:
    """Returns the content of ``provenance.json`` without the secrets that earlier versions have kept."""
    found: Json = read_json(path, PROVENANCE, {"starts": [], "changes": {}})
    for start in found["starts"]:
        try:
            words = shlex.split(start["command"])
        except ValueError:  # no command that a run writes
            words = start["command"].split()
        if (kept := hidden_words(words)) != words:
            start["command"] = shlex.join(kept)
    return {**found, "changes": {key: hidden_text(text) for key, text in found["changes"].items()}}


def _partition(path: Path) -> Json:
    found: Json = read_json(path, PARTITION, {})
    named = len(found.get("names", range(found.get("classes", 0)))) == found.get("classes", 0)
    ensure(found == {} or (found["counts"] and named), f"{path}: not what a run writes there; restore or remove it")
    return found


def _monitored(folder: Path) -> list[Json]:
    return [
        {**found, "where": f"during the run, after round {found['round']}"}
        for found in last_measurements(folder).values()
    ]


def _measured(folder: Path) -> list[Json]:
    files = [(path.relative_to(folder), read_json(path, MEASURED)) for path in _below(folder, "json", "flatness")]
    return [
        {**measurement, "where": f"{path}, after round {found['round']}"}
        for path, found in files
        for measurement in found["measurements"]
    ]


def _below(folder: Path, suffix: str, *names: str) -> list[Path]:
    """Returns the files with a suffix in subfolders of the run folder whose names begin so."""
    return sorted(path for name in names for path in folder.glob(f"{name}*/**/*.{suffix}"))
