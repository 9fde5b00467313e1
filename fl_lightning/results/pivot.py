"""The pivot of a sweep: a metric by two of its settings, as table and heat map."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import COLORMAP, COLUMN, PAGE, Figure, figure_files, new_figure, require, wrapped
from fl_lightning.results.compare import Group, Seeds, plain
from fl_lightning.results.configs import find_setting, settings_of, short_names, varying
from fl_lightning.results.metrics import NUMBER, table_text
from fl_lightning.results.names import known, label
from fl_lightning.results.table import LATEX, Column, Markup, cell, is_best, tabulars, tex

NARROW = 6
"""Most columns of a heat map that is as wide as a column of a paper."""
LUMINANCE = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in how bright a colour is."""


@dataclass(frozen=True)
class Pivot:
    """A metric by two settings.

    Attributes:
        names: Short names of the settings of the rows and of the columns.
        rows: Values of the first setting, ascending.
        columns: Values of the second setting, ascending.
        cells: The runs by both values; those of several configs, if other settings vary, too.
        others: Short names of these other settings.
        column: How numbers are printed, and which are good.
        metric: Name of the metric.
    """

    names: tuple[str, str]
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Group]
    others: list[str]
    column: Column
    metric: str

    @property
    def title(self) -> str:
        """What it shows."""
        return f"{self.metric}, mean over {', '.join(['seeds', *self.others])}"

    @property
    def heads(self) -> list[str]:
        """The heads of its table."""
        rows, columns = self.names
        return [rows, *(f"{columns}\u00a0{value}" for value in self.columns)]

    def text(self, markup: Markup | None = None) -> list[list[str]]:
        """Returns the rows of its table; see `fl_lightning.results.table.cell`."""
        groups = [*self.cells.values()]

        def text(row: str, column: str) -> str:
            found = self.cells.get((row, column))
            return "" if found is None else cell(found, self.column, groups, markup)

        return [[row, *(text(row, column) for column in self.columns)] for row in self.rows]

    @property
    def best(self) -> str:
        """The best mean in a line; nothing where no run is finite."""
        complete = {at: group.values("mean") for at, group in self.cells.items()}
        means = {at: fmean(found) for at, found in complete.items() if len(found) == len(self.cells[at].runs)}
        if not means:
            return ""
        at = (max if self.column.mode == "max" else min)(means, key=lambda place: means[place])
        where = ", ".join(f"{name} = {value}" for name, value in zip(self.names, at, strict=True))
        clear = is_best(self.cells[at], self.column, [*self.cells.values()])
        return f"best mean: {where}, {self.column.number(means[at])}" + (
            "" if clear else "; not clearly better than all others"
        )

    def files(self) -> dict[str, str | bytes]:
        """Returns ``pivot.csv`` (full precision), ``pivot.tex`` (needs booktabs), ``pivot.pdf`` and ``pivot.png``."""
        rows = [[row, *means] for row, means in zip(self.rows, self._grid().tolist(), strict=True)]
        paper = replace(self, column=self.column.in_paper)
        marked = [[tex(row), *cells] for row, *cells in paper.text(LATEX)]
        written = {
            "pivot.csv": table_text([head.replace("\u00a0", " ") for head in self.heads], rows),
            "pivot.tex": tabulars(self.heads, paper.text(), marked, 1),
        }
        return {**written, **figure_files(self.plot(), "pivot")}

    def plot(self) -> Figure:
        """Draws the means as a heat map with their numbers; bright is good, and what is clearly the best is bold."""
        from matplotlib import colormaps

        grid, groups, form = self._grid(), [*self.cells.values()], ".3f" if self.column.fraction else ".3g"
        width = COLUMN if len(self.columns) <= NARROW else PAGE
        with new_figure(width, 0.22 * len(self.rows) + 0.8) as figure:
            axes: Any = figure.add_subplot(xlabel=self.names[1], ylabel=self.names[0])
            shades = colormaps[COLORMAP if self.column.mode == "max" else f"{COLORMAP}_r"]
            image = axes.imshow(np.ma.masked_invalid(grid), cmap=shades, aspect="auto")
            axes.set_xticks(
                range(len(self.columns)), [wrapped(value, width / len(self.columns)) for value in self.columns]
            )
            axes.set_yticks(range(len(self.rows)), [wrapped(value, 1.0) for value in self.rows])
            for (i, j), value in np.ndenumerate(grid):
                found = self.cells.get((self.rows[i], self.columns[j]))
                if found is not None and np.isfinite(value):
                    light = np.dot(shades(image.norm(value))[:3], LUMINANCE) > 0.5
                    weight = "bold" if is_best(found, self.column, groups) else "normal"
                    look = {"color": "black" if light else "white", "fontsize": 7, "weight": weight}
                    axes.text(j, i, format(value, form), ha="center", va="center", **look)
            figure.colorbar(image, label=wrapped(label(self.metric), 0.2 * len(self.rows) + 0.8), pad=0.02)
        return figure

    def _grid(self) -> NDArray[np.float64]:
        values = {at: group.values("mean") for at, group in self.cells.items()}
        means = {at: fmean(found) for at, found in values.items() if found}
        return np.array([[means.get((row, column), np.nan) for column in self.columns] for row in self.rows])


def pivot(groups: Sequence[Group], names: str) -> Pivot:
    """Returns the headline of the compared metric by two settings.

    Args:
        groups: The runs.
        names: The settings of rows and columns with a comma between, each by the end of its key, as in ``rho,alpha``.

    Raises:
        UserError: If the names are not those of two settings that vary.
    """
    configs = [settings_of(group.folders[0]) for group in groups]
    apart = varying(configs)
    short = {key: name for name, key in short_names(apart).items()}
    given = [name.strip() for name in names.split(",")]
    listed = ", ".join(short.values())
    require(
        len(apart) > 1, "pivot", names, f"fewer than two settings vary in these runs: {listed or 'none'}; give more"
    )
    two = len(given) == 2 and given[0] != given[1]
    require(two, "pivot", names, f"give two settings, as in rho,alpha; choose from {listed}")
    keys = [find_setting(apart, name, "pivot") for name in given]
    others = [key for key in apart if key not in keys]
    parts: dict[tuple[str, str], list[tuple[Group, int]]] = {}
    kinds: dict[tuple[str | None, ...], int] = {}
    for group, config in zip(groups, configs, strict=True):
        at = plain(config.get(keys[0])), plain(config.get(keys[1]))
        parts.setdefault(at, []).append((group, kinds.setdefault(tuple(config.get(key) for key in others), len(kinds))))
    cells = {at: _together(", ".join(at), of) for at, of in parts.items()}
    rows, columns = (sorted({at[i] for at in cells}, key=_order) for i in (0, 1))
    run = groups[0].runs[0]
    form = Column("mean", "mean", "mean", run.mode, fraction=known(run.metric).unit == "fraction")
    pair = short[keys[0]], short[keys[1]]
    return Pivot(pair, rows, columns, cells, [short[key] for key in others], form, run.metric)


def _together(name: str, parts: Sequence[tuple[Group, int]]) -> Group:
    """Returns the runs of several groups as one, in which a seed counts once for each of their other settings."""
    seeds: list[Seeds] = [(*(seed or ()), kind) for group, kind in parts for seed in group.seeds]
    folders = [folder for group, _ in parts for folder in group.folders]
    return Group(name, folders, seeds, [run for group, _ in parts for run in group.runs])


def _order(value: str) -> tuple[float, str]:
    return (float(value) if NUMBER.fullmatch(value) else float("inf"), value)
