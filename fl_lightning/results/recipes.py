"""How the cells of the papers' tables are run: ``recipes.yaml`` in this folder."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

from fl_lightning.core import UserError, ensure
from fl_lightning.results.papers import Cell

CODE = {"FL-Simulator": "configs/presets/flsim", "FL-SAM": "configs/presets/flsam"}
"""Tables of the README files of the papers' codes, whose settings are others, and the presets of these codes."""


@dataclass(frozen=True)
class Row:
    """A row of a paper's tables over some of its files.

    Attributes:
        names: Its names in the tables; with a ``+`` in front, an addition to another row.
        over: Patterns of the files' names.
        settings: Settings over the file, as on the command line.
        source: Where the settings come from.
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
        column: Settings of the column: size of the cohort, number of clients, local epochs.
    """

    command: str
    config: str
    row: tuple[str, ...]
    column: tuple[str, ...]


def columns(paper: str) -> dict[str, str]:
    """Returns a paper's columns: data set, network and heterogeneity as in its cells, and the name of their file."""
    return dict(_all()[paper][0])


def rows(paper: str) -> list[Row]:
    """Returns the rows of a paper; of several that fit a name and a file, the first one counts."""
    return list(_all()[paper][1])


def recipe(cell: Cell) -> Recipe:
    """Returns how the run of a cell is made.

    Raises:
        UserError: If there is no recipe.
    """
    where = f"table = {cell.table}"
    ensure(
        cell.table not in CODE,
        f"{where}: the README of the paper's code has settings of its own, with no config here; "
        f"{CODE.get(cell.table)} has the choices of its program",
    )
    ensure(bool(cell.dataset), f"{where}: our copy of the paper names no data set for this number")
    column = ", ".join((cell.dataset, cell.model, cell.heterogeneity))
    files = columns(cell.paper)
    ensure(column in files, f"{where}: no config for {column}; see docs/experiments.md")
    found = _parts(cell, files[column])
    cohort, _, clients = cell.participation.partition("/")
    flags = [f"--trainer.clients_per_round={cohort}", f"--data.num_clients={clients}"] if clients else []
    flags += [f"--trainer.local_epochs={cell.epochs}"] if cell.epochs else []
    value = [f"--model.{cell.algorithm.rpartition(' ')[2]}"] if "=" in cell.algorithm else []
    return Recipe(
        command="centralized" if cell.heterogeneity == "centralized" else "fit",
        config=f"experiment/{cell.paper}/{files[column]}",
        row=(*(word for row in found for word in shlex.split(row.settings)), *value),
        column=tuple(flags),
    )


def _parts(cell: Cell, file: str) -> list[Row]:
    """Returns the row of an algorithm such as ``FedDyn+SAM+SWA``, and those of its additions."""
    name = cell.algorithm.rpartition(" ")[0] if "=" in cell.algorithm else cell.algorithm  # as in "FedGF c=0.5"
    parts = name.split("+")
    for end in range(len(parts), 0, -1):
        names = ["+".join(parts[:end]), *(f"+{part}" for part in parts[end:])]
        found = [row for name in names if (row := _find(cell.paper, name, file)) is not None]
        if len(found) == len(names):
            return found
    raise UserError(f"algorithm = {cell.algorithm}: our copy of the paper has no settings of it over {file}")


def _find(paper: str, name: str, file: str) -> Row | None:
    return next((r for r in rows(paper) if name in r.names and any(fnmatchcase(file, over) for over in r.over)), None)


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
                for names, of in part["rows"].items()
                for row in of
            ],
        )
        for paper, part in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
    }
