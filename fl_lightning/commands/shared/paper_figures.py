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


def draw(figure: PaperFigure, made: Made, folder: Path, points: int | None) -> list[Path]:
    """Draws a figure: one picture, or where it has several rows and several columns, one for each column.

    Landscapes, spectra and numbers of clients are those of the first seed.

    Args:
        figure: The figure.
        made: Its runs, at least one a task.
        folder: Folder of the pictures and of their numbers.
        points: Points along each axis of a landscape; None: as the figure or the command has it.

    Returns:
        The pictures.

    Raises:
        UserError: If a run has not measured what is drawn.
    """
    before = _pictures(folder)
    if figure.draws in WHOLE:
        save_figure(WHOLE[figure.draws](figure, made, folder), folder / figure.draws)
    else:
        beside = {task: runs for task, runs in made.items() if task.recipe.command == "centralized"}
        for title, shown in panels({task: runs for task, runs in made.items() if task not in beside}).items():
            place = folder / title.replace("/", "of").replace(", ", "_")
            if figure.draws in DRAWN_BY_COMMANDS:
                _landscape(figure, {label: runs[0] for label, runs in shown.items()}, place, points)
            elif figure.draws == "curves":
                save_figure(_curves(figure, shown, beside), place / figure.draws)
            else:
                save_figure(DRAWN[figure.draws](figure, shown), place / figure.draws)
    return sorted(path for path, written in _pictures(folder).items() if before.get(path) != written)


def _pictures(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}


def panels(made: Made) -> dict[str, dict[str, Sequence[Path]]]:
    """Returns the runs by the title of their picture and by their label.

    Where rows and columns differ, a picture is that of a column, and its labels are the rows.
    """
    places, rows = differing([column(task.cells[0]) for task in made]), [task.cells[0].algorithm for task in made]
    if len({*rows}) == 1 and any(places):
        places, rows = [""] * len(rows), places
    of_place = grouped(zip(places, zip(rows, made.values(), strict=True), strict=True))
    return {place: dict(runs) for place, runs in of_place.items()}


def differing(texts: Sequence[str]) -> list[str]:
    """Returns the parts of texts, which are separated by commas, that not all of the texts have."""
    parts = [text.split(", ") for text in texts]
    common = set(parts[0]).intersection(*parts[1:])
    return [", ".join(part for part in own if part not in common) for own in parts]


def _landscape(figure: PaperFigure, runs: Mapping[str, Path], out: Path, points: int | None) -> None:
    """Runs ``landscape`` or ``interpolate`` on the checkpoints, with the paper's options."""
    first, *others = [str(RunFolder(run).last) for run in runs.values()]
    options = {"out": out, "labels": json.dumps([*runs]), **figure.options, **({"points": points} if points else {})}
    if classes := figure.options.get("clients"):
        options["clients"] = [k if isinstance(k, int) else _alone(next(iter(runs.values())), k) for k in classes]
    given = [f"--{n}={str(option).lower() if isinstance(option, bool) else option}" for n, option in options.items()]
    if figure.draws == "line":
        FederatedCLI("interpolate", first, others[0], *given).run()
    else:
        given += [f"--ckpt_path={first}", f"--compare={json.dumps(others)}", f"--kind={figure.draws}"]
        FederatedCLI("landscape", *given).run()


def _alone(run: Path, images: str) -> int:
    found = clients_of(run, images)
    ensure(bool(found), f"{run}: no client has images of {images} alone, which the figure needs; take its own data")
    say(f"client {found[0]}: images of {images}")
    return found[0]


def _title(figure: PaperFigure) -> str:
    if figure.value in EVALUATED:
        return f"{metrics.label(EVALUATED[figure.value])} (%)"
    return metrics.label(f"flatness/{MEASURED[figure.value][0] if figure.value in MEASURED else figure.value}")


def _numbers(figure: PaperFigure, made: Made, folder: Path) -> dict[Task, list[float]]:
    """Returns the figure's number of each run, and writes all of them as ``numbers.csv``."""
    numbers = {
        task: [n for run in runs if (n := our_number(run, figure.value)) is not None] for task, runs in made.items()
    }
    for task, values in numbers.items():
        ensure(bool(values), f"{made[task][0]}: {figure.value} is not measured; take another --out")
    folder.mkdir(parents=True, exist_ok=True)
    rows = ((column(task.cells[0]), task.cells[0].algorithm, n) for task, values in numbers.items() for n in values)
    write_table(folder / "numbers.csv", ("column", "row", figure.value), rows)
    return numbers


def _bars(figure: PaperFigure, made: Made, folder: Path) -> Figure:
    """Draws bars of rows and columns; the fewer of the two are the colours."""
    numbers = _numbers(figure, made, folder)
    places, rows = differing([column(task.cells[0]) for task in made]), [task.cells[0].algorithm for task in made]
    if len({*places}) < len({*rows}):
        places, rows = rows, places
    of_row = grouped(zip(rows, zip(places, numbers.values(), strict=True), strict=True))
    return plot_bars({row: dict(bars) for row, bars in of_row.items()}, _title(figure))


def _lines(figure: PaperFigure, made: Made, folder: Path) -> Figure:
    """Draws a panel for each setting that is tried."""
    found: dict[str, dict[str, list[tuple[float, list[float]]]]] = {}
    for (task, values), place in zip(_numbers(figure, made, folder).items(), _places(made), strict=True):
        assert task.setting is not None
        name, at = task.setting
        found.setdefault(name.rpartition(".")[2].replace("_", " "), {}).setdefault(place, []).append((at, values))
    return plot_lines(found, _title(figure))


def _places(made: Made) -> list[str]:
    """Returns what distinguishes the tasks besides the setting that they try."""
    places = [", ".join((task.cells[0].algorithm.partition(" ")[0], column(task.cells[0]))) for task in made]
    tried = [f"E={task.cells[0].epochs}" for task in made if task.setting and task.setting[0] == "epochs"]
    return [", ".join(part for part in text.split(", ") if part not in tried) for text in differing(places)]


def _curves(figure: PaperFigure, runs: Mapping[str, Sequence[Path]], beside: Made) -> Figure:
    """Draws curves of the runs, and how centralized ones end as dashed lines."""
    groups = {label: [read_run(folder) for folder in folders] for label, folders in runs.items()}
    for label, columns in groups.items():
        for name in figure.metrics:
            ensure(
                any(name in measured for measured in columns),
                f"{runs[label][0]}: {name} is not measured; take another --out",
            )
    levels = {
        f"centralized {task.cells[0].algorithm}": average([summarise(run).mean for run in own])
        for task, own in beside.items()
    }
    return curves.draw_curves(groups, figure.metrics, levels=levels)


def _spectrum(figure: PaperFigure, runs: Mapping[str, Sequence[Path]]) -> Figure:
    spectra = dict[str, list[float]]()
    for label, (run, *_) in runs.items():
        lists = (measured["details"].get("eigenvalues", [None]) for measured in last_measurements(run).values())
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
    measured = [one for one in metrics.read_measurements(run) if one["name"] == name]
    values = ((int(k), one["round"], x) for one in measured for k, x in one["details"]["clients"].items())
    return grouped((k, (t, x)) for k, t, x in values if x is not None)


def _cost(figure: PaperFigure, made: Made, folder: Path) -> Figure:
    """Draws what clients have sent and received against their passes until FedAvg's headline, a point a column."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for runs in panels(made).values():
        target = average([summarise(run).mean for run in runs["FedAvg"]])
        for label, (run, *_) in runs.items():
            found, reached = read_run(run), summarise(run, target=target).target_round
            passes, bits = (  # since the start of the run
                [y for at, y in found[name] if at <= (reached or 0)] for name in ("client/passes", "comm/total_bits")
            )
            lines.setdefault(label, []).extend([(passes[-1], [bits[-1] / 8e9])] if reached else [])
    most = max(map(len, lines.values()))
    shown = {
        text if len(points) == most else f"{text} ({most - len(points)} not reached)": points
        for text, points in lines.items()
    }
    return plot_lines({"forward and backward passes of all clients": shown}, "communication (GB)")


def _corruptions(figure: PaperFigure, runs: Mapping[str, Sequence[Path]]) -> Figure:
    found = {}
    for label, (run, *_) in runs.items():
        config = config_of(run)
        kind, data = setting_of(config, "data.class_path").rpartition(".")[2], setting_of(config, "data.data_dir")
        files = Path(data or "data") / f"{kind.replace('CIFAR', 'CIFAR-')}-C"
        if not (out := run / "corruptions" / "corruptions.csv").is_file():
            given = (f"--folder={files}", f"--ckpt_path={RunFolder(run).last}", f"--out={out.parent}")
            FederatedCLI("corruptions", *given).run()
        found[label] = out
    return plot_corruptions(found)


WHOLE: dict[str, Callable[[PaperFigure, Made, Path], Figure]] = {"bars": _bars, "lines": _lines, "cost": _cost}
"""Drawings with all columns in one picture."""
DRAWN: dict[str, Callable[[PaperFigure, Mapping[str, Sequence[Path]]], Figure]] = {
    "spectrum": _spectrum, "clients": _clients, "corruptions": _corruptions,
}  # fmt: skip
