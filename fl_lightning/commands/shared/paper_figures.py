"""The drawings of the papers' figures, from the runs that `fl-lightning reproduce` has made."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.core import Figure, ensure, grouped, save_figure
from fl_lightning.flatness.plots import plot_spectrum
from fl_lightning.results import (
    EVALUATED,
    MEASURED,
    PaperFigure,
    average,
    clients,
    clients_of,
    config_of,
    curves,
    last_measurements,
    metrics,
    our_number,
    plot_bars,
    plot_by_client,
    plot_corruptions,
    plot_lines,
    read_run,
    say,
    setting_of,
    summarise,
    write_table,
)
from fl_lightning.sweeps.reproduction import Task, column
from fl_lightning.trainer import RunFolder

Made = Mapping[Task, Sequence[Path]]
"""The run folders of each task, one for each seed."""
DRAWN_BY_COMMANDS = ("surface", "plane", "perturbation", "trajectory", "line")


def draw(figure: PaperFigure, runs: Made, folder: Path, points: int | None) -> list[Path]:
    """Draws a figure: one picture, or where it has several rows and several columns, one for each column.

    Landscapes, spectra and numbers of clients are those of the first seed.

    Args:
        figure: The figure.
        runs: Its runs, at least one a task.
        folder: Folder of the pictures and of their numbers.
        points: Points along each axis of a landscape; None: as the figure or the command has it.

    Returns:
        The pictures.

    Raises:
        UserError: If a run has not measured what is drawn.
    """
    before = _pictures(folder)
    if figure.draws in WHOLE:
        save_figure(WHOLE[figure.draws](figure, runs, folder), folder / figure.draws)
    else:
        centralized = {task: paths for task, paths in runs.items() if task.recipe.command == "centralized"}
        for title, panel in panels({task: paths for task, paths in runs.items() if task not in centralized}).items():
            place = folder / title.replace("/", "of").replace(", ", "_")
            if figure.draws in DRAWN_BY_COMMANDS:
                _landscape(figure, {label: paths[0] for label, paths in panel.items()}, place, points)
            elif figure.draws == "curves":
                save_figure(_curves(figure, panel, centralized), place / figure.draws)
            else:
                save_figure(DRAWN[figure.draws](figure, panel), place / figure.draws)
    return sorted(path for path, written in _pictures(folder).items() if before.get(path) != written)


def _pictures(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}


def panels(runs: Made) -> dict[str, dict[str, Sequence[Path]]]:
    """Returns the runs by the title of their picture and by their label.

    Where rows and columns differ, a picture is that of a column, and its labels are the rows.
    """
    places, rows = differing([column(task.cells[0]) for task in runs]), [task.cells[0].algorithm for task in runs]
    if len({*rows}) == 1 and any(places):
        places, rows = [""] * len(rows), places
    by_place = grouped(zip(places, zip(rows, runs.values(), strict=True), strict=True))
    return {place: dict(pairs) for place, pairs in by_place.items()}


def differing(texts: Sequence[str]) -> list[str]:
    """Returns the parts of texts, which are separated by commas, that not all of the texts have."""
    parts = [text.split(", ") for text in texts]
    common = set(parts[0]).intersection(*parts[1:])
    return [", ".join(part for part in own_parts if part not in common) for own_parts in parts]


def _landscape(figure: PaperFigure, runs: Mapping[str, Path], out: Path, points: int | None) -> None:
    """Runs ``landscape`` or ``interpolate`` on the checkpoints, with the paper's options."""
    first, *others = [str(RunFolder(run).last) for run in runs.values()]
    options = {"out": out, "labels": json.dumps([*runs]), **figure.options, **({"points": points} if points else {})}
    if classes := figure.options.get("clients"):
        options["clients"] = [k if isinstance(k, int) else _alone(next(iter(runs.values())), k) for k in classes]
    args = [f"--{n}={str(option).lower() if isinstance(option, bool) else option}" for n, option in options.items()]
    if figure.draws == "line":
        FederatedCLI("interpolate", first, others[0], *args).run()
    else:
        args += [f"--ckpt_path={first}", f"--compare={json.dumps(others)}", f"--kind={figure.draws}"]
        FederatedCLI("landscape", *args).run()


def _alone(run: Path, images: str) -> int:
    ids = clients_of(run, images)
    ensure(bool(ids), f"{run}: no client has images of {images} alone, which the figure needs; take its own data")
    say(f"client {ids[0]}: images of {images}")
    return ids[0]


def _title(figure: PaperFigure) -> str:
    if figure.value in EVALUATED:
        return f"{metrics.label(EVALUATED[figure.value])} (%)"
    return metrics.label(f"flatness/{MEASURED[figure.value][0] if figure.value in MEASURED else figure.value}")


def _numbers(figure: PaperFigure, runs: Made, folder: Path) -> dict[Task, list[float]]:
    """Returns the figure's number of each run, and writes all of them as ``numbers.csv``."""
    numbers = {
        task: [n for run in paths if (n := our_number(run, figure.value)) is not None] for task, paths in runs.items()
    }
    for task, values in numbers.items():
        ensure(bool(values), f"{runs[task][0]}: {figure.value} is not measured; take another --out")
    folder.mkdir(parents=True, exist_ok=True)
    rows = ((column(task.cells[0]), task.cells[0].algorithm, n) for task, values in numbers.items() for n in values)
    write_table(folder / "numbers.csv", ("column", "row", figure.value), rows)
    return numbers


def _bars(figure: PaperFigure, runs: Made, folder: Path) -> Figure:
    """Draws bars of rows and columns; the fewer of the two are the colours."""
    numbers = _numbers(figure, runs, folder)
    places, rows = differing([column(task.cells[0]) for task in runs]), [task.cells[0].algorithm for task in runs]
    if len({*places}) < len({*rows}):
        places, rows = rows, places
    by_row = grouped(zip(rows, zip(places, numbers.values(), strict=True), strict=True))
    return plot_bars({row: dict(bars) for row, bars in by_row.items()}, _title(figure))


def _lines(figure: PaperFigure, runs: Made, folder: Path) -> Figure:
    """Draws a panel for each setting that is tried."""
    panels: dict[str, dict[str, list[tuple[float, list[float]]]]] = {}
    for (task, values), place in zip(_numbers(figure, runs, folder).items(), _places(runs), strict=True):
        assert task.setting is not None
        name, value = task.setting
        panels.setdefault(name.rpartition(".")[2].replace("_", " "), {}).setdefault(place, []).append((value, values))
    return plot_lines(panels, _title(figure))


def _places(runs: Made) -> list[str]:
    """Returns what distinguishes the tasks besides the setting that they try."""
    places = [", ".join((task.cells[0].algorithm.partition(" ")[0], column(task.cells[0]))) for task in runs]
    tried = [f"E={task.cells[0].epochs}" for task in runs if task.setting and task.setting[0] == "epochs"]
    return [", ".join(part for part in text.split(", ") if part not in tried) for text in differing(places)]


def _curves(figure: PaperFigure, runs: Mapping[str, Sequence[Path]], centralized: Made) -> Figure:
    """Draws curves of the runs, and how centralized ones end as dashed lines."""
    groups = {label: [read_run(folder) for folder in folders] for label, folders in runs.items()}
    for label, group in groups.items():
        for name in figure.metrics:
            ensure(
                any(name in columns for columns in group),
                f"{runs[label][0]}: {name} is not measured; take another --out",
            )
    levels = {
        f"centralized {task.cells[0].algorithm}": average([summarise(run).mean for run in folders])
        for task, folders in centralized.items()
    }
    return curves.draw_curves(groups, figure.metrics, levels=levels)


def _spectrum(figure: PaperFigure, runs: Mapping[str, Sequence[Path]]) -> Figure:
    spectra = dict[str, list[float]]()
    for label, (run, *_) in runs.items():
        lists = (measurement["details"].get("eigenvalues", [None]) for measurement in last_measurements(run).values())
        spectra[label] = next((values for values in lists if None not in values), [])
        ensure(bool(spectra[label]), f"{run}: no eigenvalues are measured; take another --out")
    return plot_spectrum(spectra)


def _clients(figure: PaperFigure, runs: Mapping[str, Sequence[Path]]) -> Figure:
    panels = {label: _by_client(folders[0], figure.value) for label, folders in runs.items()}
    return plot_by_client(panels, "accuracy" if figure.value == "accuracy" else _title(figure))


def _by_client(run: Path, name: str) -> dict[int, list[tuple[float, float]]]:
    """Returns rounds and values of each client: its accuracy, or a measure of the local models."""
    if name == "accuracy":
        _, rows = metrics.read_numbers(run / clients.FILE, "clients", "round", "client")
        return grouped((int(row["client"]), (row["round"], row["acc"])) for row in rows)
    measurements = [measurement for measurement in metrics.read_measurements(run) if measurement["name"] == name]
    values = (
        (int(k), measurement["round"], x)
        for measurement in measurements
        for k, x in measurement["details"]["clients"].items()
    )
    return grouped((k, (t, x)) for k, t, x in values if x is not None)


def _cost(figure: PaperFigure, runs: Made, folder: Path) -> Figure:
    """Draws what clients have sent and received against their passes until FedAvg's headline, a point a column."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for panel in panels(runs).values():
        target = average([summarise(run).mean for run in panel["FedAvg"]])
        for label, (run, *_) in panel.items():
            columns, reached = read_run(run), summarise(run, target=target).target_round
            passes, bits = (  # since the start of the run
                [y for t, y in columns[name] if t <= (reached or 0)] for name in ("client/passes", "comm/total_bits")
            )
            lines.setdefault(label, []).extend([(passes[-1], [bits[-1] / 8e9])] if reached else [])
    most = max(map(len, lines.values()))
    labelled = {
        text if len(points) == most else f"{text} ({most - len(points)} not reached)": points
        for text, points in lines.items()
    }
    return plot_lines({"forward and backward passes of all clients": labelled}, "communication (GB)")


def _corruptions(figure: PaperFigure, runs: Mapping[str, Sequence[Path]]) -> Figure:
    tables = {}
    for label, (run, *_) in runs.items():
        config = config_of(run)
        kind, data = setting_of(config, "data.class_path").rpartition(".")[2], setting_of(config, "data.data_dir")
        folder = Path(data or "data") / f"{kind.replace('CIFAR', 'CIFAR-')}-C"
        if not (out := run / "corruptions" / "corruptions.csv").is_file():
            args = (f"--folder={folder}", f"--ckpt_path={RunFolder(run).last}", f"--out={out.parent}")
            FederatedCLI("corruptions", *args).run()
        tables[label] = out
    return plot_corruptions(tables)


WHOLE: dict[str, Callable[[PaperFigure, Made, Path], Figure]] = {"bars": _bars, "lines": _lines, "cost": _cost}
"""Drawings with all columns in one picture."""
DRAWN: dict[str, Callable[[PaperFigure, Mapping[str, Sequence[Path]]], Figure]] = {
    "spectrum": _spectrum, "clients": _clients, "corruptions": _corruptions,
}  # fmt: skip
