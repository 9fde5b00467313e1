"""How the papers' tables and figures are made: ``recipes.yaml`` and ``paper_figures.yaml`` in this folder."""

import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, ensure
from fl_lightning.results.configs import load_yaml
from fl_lightning.results.papers import PAPERS, Cell


@dataclass(frozen=True)
class Row:
    """A row of a paper's tables over some of its files.

    Attributes:
        names: Its names in the tables; with a ``+`` in front, an addition to another row.
        over: Patterns of the files' names.
        settings: Settings over the file, as on the command line.
        source: Where the settings come from; docs/experiments.md shows it.
    """

    names: tuple[str, ...]
    over: tuple[str, ...]
    settings: str
    source: str


@dataclass(frozen=True)
class Recipe:
    """How the run of a cell is made.

    Attributes:
        command: The subcommand, ``fit`` or ``centralized``.
        config: Name of its config, such as ``experiment/fedgloss/cifar10_alpha0``.
        row: Settings of the row over the config.
        column: Settings of the column: size of the cohort, number of clients, local epochs, and its own over the file.
    """

    command: str
    config: str
    row: tuple[str, ...]
    column: tuple[str, ...]


def columns(source: str) -> dict[str, str]:
    """Returns the columns of a paper, or of the README of a paper's code, which is a table of its own.

    A column is data set, network and heterogeneity as in its cells, in a README also the participation. Its value is
    the name of its file, and settings over it.
    """
    return dict(_all()[source][0])


def rows(source: str) -> list[Row]:
    """Returns the rows of a paper, or of a README; of several that fit a name and a file, the first one counts."""
    return list(_all()[source][1])


def source_of(cell: Cell) -> str:
    """Returns the paper of a cell, or its table, if that is a README with rows and columns of its own."""
    return cell.table if cell.table in _all() else cell.paper


def recipe(cell: Cell) -> Recipe:
    """Returns how the run of a cell is made.

    Raises:
        UserError: If there is no recipe.
    """
    where = f"table = {cell.table}"
    ensure(bool(cell.dataset), f"{where}: our copy of the paper names no data set for this number")
    column = ", ".join((cell.dataset, cell.model, cell.heterogeneity))
    files = columns(source_of(cell))
    entry = files.get(column, files.get(f"{column}, {cell.participation}", ""))
    ensure(bool(entry), f"{where}: no config for {column}; see docs/experiments.md")
    file, *settings = shlex.split(entry)
    cohort, _, clients = cell.participation.partition("/")
    flags = [f"--trainer.clients_per_round={cohort}", f"--data.num_clients={clients}"] if clients else []
    flags += [f"--trainer.local_epochs={cell.epochs}"] if cell.epochs else []
    value = [f"--model.{cell.algorithm.rpartition(' ')[2]}"] if "=" in cell.algorithm else []
    return Recipe(
        command="centralized" if cell.heterogeneity == "centralized" else "fit",
        config=f"experiment/{cell.paper}/{file}",
        row=(*(word for row in _parts(cell, file) for word in shlex.split(row.settings)), *value),
        column=(*flags, *settings),
    )


def _parts(cell: Cell, file: str) -> list[Row]:
    """Returns the row of an algorithm such as ``FedDyn+SAM+SWA``, and those of its additions."""
    name = cell.algorithm.rpartition(" ")[0] if "=" in cell.algorithm else cell.algorithm  # as in "FedGF c=0.5"
    parts = name.split("+")
    for end in range(len(parts), 0, -1):
        names = ["+".join(parts[:end]), *(f"+{part}" for part in parts[end:])]
        matches = [row for name in names if (row := _find(source_of(cell), name, file)) is not None]
        if len(matches) == len(names):
            return matches
    raise UserError(f"algorithm = {cell.algorithm}: our copy of the paper has no settings of it over {file}")


def _find(source: str, name: str, file: str) -> Row | None:
    return next((r for r in rows(source) if name in r.names and any(fnmatchcase(file, over) for over in r.over)), None)


@cache
def _all() -> dict[str, tuple[dict[str, str], Sequence[Row]]]:
    return {
        paper: (
            part["columns"],
            [
                Row(
                    names=tuple(names.split(", ")),
                    over=tuple(row.get("over", "*").split(", ")),
                    settings=row.get("settings", ""),
                    source=row.get("from", ""),
                )
                for names, entries in part["rows"].items()
                for row in entries
            ],
        )
        for paper, part in _content("recipes.yaml").items()
    }


@dataclass(frozen=True)
class Selection:
    """Runs of a figure: cells of a table.

    Attributes:
        table: The table.
        rows: Its rows, by comma; empty: all.
        columns: Its columns, likewise.
        settings: Settings over all of these runs, as on the command line.
        name: What these runs are called in place of their algorithm, or a partition in place of its column.
        vary: Values of a setting of the model, or of ``epochs``, that are tried one after another over each cell.
    """

    table: str
    rows: str = ""
    columns: str = ""
    settings: str = ""
    name: str = ""
    vary: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper, or some of its panels.

    Attributes:
        paper: A key of `fl_lightning.results.papers.PAPERS`.
        number: Its number there; with a letter if other drawings are in the same figure, such as 3c.
        shows: What it shows, in our words.
        draws: The drawing: surface, plane, perturbation or trajectory of ``fl-lightning landscape``, line of
            ``interpolate``, corruptions; curves, bars, lines, spectrum, clients or cost; or partition, without runs.
        runs: The runs that it needs.
        measure: Measures that its runs take besides those of the tables, by comma.
        times: How often they take them in a run.
        metrics: Metrics of curves.
        value: The metric of bars, lines and clients, as a `Cell` names it.
        options: Options of a command that draws; its clients may be names of classes that they have alone.
        taken: What the text that we had does not say, and is assumed here.
        missing: What of the paper's figure is not drawn.
        schematic: Whether it shows no numbers, so that nothing is drawn.
    """

    paper: str
    number: str
    shows: str = ""
    draws: str = ""
    runs: tuple[Selection, ...] = ()
    measure: str = ""
    times: int = 1
    metrics: tuple[str, ...] = ()
    value: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    missing: str = ""
    schematic: bool = False

    @property
    def figure(self) -> str:
        """Its number in the paper, without a letter."""
        return self.number.rstrip(string.ascii_lowercase)

    @property
    def says(self) -> list[str]:
        """Lines that stand in the output and above the picture: whether it is the paper's, and what is assumed."""
        heading = f"{self.paper}, Figure {self.number}: {self.shows} ({self.draws})"
        state = (
            f"a part of the paper's figure; missing: {self.missing}" if self.missing else "as the paper describes it"
        )
        taken = [f"open in the text that we had, and assumed: {self.taken}"] if self.taken else []
        return [heading, state, *taken]

    @property
    def folder(self) -> str:
        """Name of the folder of its runs: that of their table, unless its runs are not those of one table."""
        own_folder = (
            self.measure or any(runs.settings for runs in self.runs) or len({runs.table for runs in self.runs}) > 1
        )
        return f"{self.paper}_{f'figure_{self.figure}' if own_folder else self.runs[0].table}"


def figures(paper: str) -> list[PaperFigure]:
    """Returns the figures of a paper, schematics included, in their order.

    Raises:
        UserError: If there is no such paper.
    """
    ensure(paper in PAPERS, f"paper = {paper}: no such paper; choose from {', '.join(PAPERS)}")
    return list(_figures()[paper])


def figure(paper: str, number: str) -> list[PaperFigure]:
    """Returns the drawings of a figure of a paper, or the one that has this letter.

    Raises:
        UserError: If there is no such figure, or it is a schematic.
    """
    drawings = [drawing for drawing in figures(paper) if number in (drawing.number, drawing.figure)]
    choice = ", ".join(dict.fromkeys(drawing.figure for drawing in figures(paper) if not drawing.schematic))
    ensure(bool(drawings), f"figure = {number}: no figure of {paper}; choose from {choice}")
    ensure(not drawings[0].schematic, f"figure = {number} of {paper}: it is a schematic; choose from {choice}")
    return drawings


@cache
def _figures() -> dict[str, list[PaperFigure]]:
    return {
        paper: [_figure(paper, str(number), **entry) for number, entry in entries.items()]
        for paper, entries in _content("paper_figures.yaml").items()
    }


def _figure(paper: str, number: str, runs: Sequence[dict[str, Any]] = (), **entry: Any) -> PaperFigure:
    selected = tuple(Selection(**{**selection, "table": str(selection["table"])}) for selection in runs)
    return PaperFigure(paper, number, runs=selected, **entry)


def _content(file: str) -> Any:
    return load_yaml(Path(__file__).with_name(file).read_text(encoding="utf-8"))
