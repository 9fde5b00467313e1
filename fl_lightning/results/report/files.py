"""What a run folder holds beside its metrics: config, provenance, partition, measurements, landscapes, papers' cells.

Files that others may have written are taken as they are; one that is not readable is an error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError
from fl_lightning.results.clients import ClientTable, read_clients
from fl_lightning.results.compare import Group, Seeds
from fl_lightning.results.configs import config_files, flatten, read_config

Json = dict[str, Any]


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
        landscapes: Results of ``landscape`` and ``interpolate``, by the file's path in the run folder.
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
    landscapes: dict[str, Json]
    cells: list[Json]


def read_group(group: Group) -> list[RunFiles]:
    """Reads the files of each run of a group.

    Raises:
        UserError: If one is not readable.
    """
    return [_read(group, folder, seeds) for folder, seeds in zip(group.folders, group.seeds, strict=True)]


def partitions(runs: Sequence[RunFiles]) -> list[tuple[Json, list[str]]]:
    """The different partitions, and the runs that have each."""
    found: dict[str, tuple[Json, list[str]]] = {}
    for run in runs:
        if run.partition:
            found.setdefault(repr(run.partition), (run.partition, []))[1].append(run.label)
    return list(found.values())


def spectra(runs: Sequence[RunFiles]) -> dict[str, list[float]]:
    """Measured eigenvalues, largest first, by run."""
    return {at: sorted(of["eigenvalues"], reverse=True) for at, of in _details(runs).items() if "eigenvalues" in of}


def densities(runs: Sequence[RunFiles]) -> dict[str, tuple[list[float], list[float]]]:
    """Measured densities of the spectrum, as eigenvalues and density there, by run."""
    return {at: (of["grid"], of["density"]) for at, of in _details(runs).items() if "density" in of}


def _details(runs: Sequence[RunFiles]) -> dict[str, Json]:
    """Details of the measurements by run, and by place where a run has several."""
    found: dict[str, Json] = {}
    for run in runs:
        detailed = [measurement for measurement in run.measurements if measurement["details"]]
        many = len({measurement["where"] for measurement in detailed}) > 1
        for measurement in detailed:
            name = f"{run.label}, {measurement['where']}" if many else run.label
            found.setdefault(name, {}).update(measurement["details"])
    return found


def _read(group: Group, folder: Path, seeds: Seeds) -> RunFiles:
    seed = f", seed {seeds[0]}" if seeds else f", {folder.name}"
    configs = config_files(folder)
    cells = _load(folder / "reproduction.json")
    return RunFiles(
        label=group.name + (seed if len(group.runs) > 1 else ""),
        folder=folder,
        settings=flatten(read_config([*configs.values()][-1])) if configs else {},
        config="\n".join(_text_of(path, round) for round, path in configs.items()),
        provenance=_load(folder / "provenance.json"),
        partition=_load(folder / "partition.json"),
        clients=read_clients(folder),
        measurements=[*_monitored(folder / "flatness.jsonl"), *_measured(folder)],
        landscapes=_landscapes(folder),
        cells=cells if isinstance(cells, list) else [cells] if cells else [],
    )


def _text_of(config: Path, round: int) -> str:
    return (f"# after round {round}\n" if round else "") + config.read_text(encoding="utf-8")


def _monitored(path: Path) -> list[Json]:
    """The last line of each measure; a crash may have cut the very last one short."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    last = {found["name"]: found for found in (_parse(line, path) for line in lines)}
    return [{**found, "where": f"during the run, after round {found['round']}"} for found in last.values()]


def _measured(folder: Path) -> list[Json]:
    measured = []
    for path in _below(folder, "flatness"):
        found = _load(path)
        where = f"{path.relative_to(folder)}, after round {found.get('round')}"
        measured += [{**measurement, "where": where} for measurement in found.get("measurements", ())]
    return measured


def _landscapes(folder: Path) -> dict[str, Json]:
    found = {str(path.relative_to(folder)): _load(path) for path in _below(folder, "landscape", "interpolate")}
    return {path: values for path, values in found.items() if all("loss" in of for of in values.values())}


def _below(folder: Path, *names: str) -> list[Path]:
    """JSON files in subfolders of the run folder whose names begin so."""
    return sorted(path for name in names for path in folder.glob(f"{name}*/**/*.json"))


def _load(path: Path) -> Any:
    return _parse(path.read_text(encoding="utf-8"), path) if path.is_file() else {}


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not readable ({error}); restore or remove it") from None
