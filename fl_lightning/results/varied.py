"""The settings that vary over the runs of a sweep: pivot tables, importance, and a panel for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import (
    COLORMAP,
    COLORS,
    COLUMN,
    PAGE,
    Figure,
    ensure,
    figure_files,
    grouped,
    new_figure,
    require,
    scale_axis,
    wrapped,
)
from fl_lightning.results.compare import Group, Seeds, shown
from fl_lightning.results.configs import find_setting, settings_of, short_names, varying
from fl_lightning.results.curves import panel_grid
from fl_lightning.results.metrics import NUMBER, known, label, table_text
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
        return [self.names[0], *(f"{self.names[1]}\u00a0{value}" for value in self.columns)]

    def text(self, markup: Markup | None = None) -> list[list[str]]:
        """Returns the rows of its table; see `fl_lightning.results.table.cell`."""
        groups = [*self.cells.values()]
        texts = {pair: cell(group, self.column, groups, markup) for pair, group in self.cells.items()}
        return [[row, *(texts.get((row, column), "") for column in self.columns)] for row in self.rows]

    @property
    def best(self) -> str:
        """The best mean in a line; nothing where no run is finite."""
        complete = {pair: group.values("mean") for pair, group in self.cells.items()}
        means = {pair: fmean(values) for pair, values in complete.items() if len(values) == len(self.cells[pair].runs)}
        if not means:
            return ""
        pair = (max if self.column.mode == "max" else min)(means, key=lambda pair: means[pair])
        where = ", ".join(f"{name} = {value}" for name, value in zip(self.names, pair, strict=True))
        clear = is_best(self.cells[pair], self.column, [*self.cells.values()])
        return f"best mean: {where}, {self.column.number(means[pair])}" + (
            "" if clear else "; not clearly better than all others"
        )

    def files(self) -> dict[str, str | bytes]:
        """Returns ``pivot.csv`` (full precision), ``pivot.tex`` (needs booktabs), ``pivot.pdf`` and ``pivot.png``."""
        rows = [[row, *means] for row, means in zip(self.rows, self._grid().tolist(), strict=True)]
        paper = replace(self, column=self.column.in_paper)
        marked = [[tex(row), *cells] for row, *cells in paper.text(LATEX)]
        return {
            "pivot.csv": table_text([head.replace("\u00a0", " ") for head in self.heads], rows),
            "pivot.tex": tabulars(self.heads, paper.text(), marked, 1),
            **figure_files(self.plot(), "pivot"),
        }

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
                group = self.cells.get((self.rows[i], self.columns[j]))
                if group is not None and np.isfinite(value):
                    is_light = np.dot(shades(image.norm(value))[:3], LUMINANCE) > 0.5
                    weight = "bold" if is_best(group, self.column, groups) else "normal"
                    style = {"color": "black" if is_light else "white", "fontsize": 7, "weight": weight}
                    axes.text(j, i, format(value, form), ha="center", va="center", **style)
            figure.colorbar(image, label=wrapped(label(self.metric), 0.2 * len(self.rows) + 0.8), pad=0.02)
        return figure

    def _grid(self) -> NDArray[np.float64]:
        means = {pair: fmean(values) for pair, group in self.cells.items() if (values := group.values("mean"))}
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
    varied = varying(configs)
    name_of = {key: name for name, key in short_names(varied).items()}
    chosen = [name.strip() for name in names.split(",")]
    listed = ", ".join(name_of.values())
    require(
        len(varied) > 1, "pivot", names, f"fewer than two settings vary in these runs: {listed or 'none'}; give more"
    )
    keys = [find_setting(varied, name, "pivot") for name in chosen]
    require(len({*keys}) == len(keys) == 2, "pivot", names, f"give two settings, as in rho,alpha; choose from {listed}")
    others = [key for key in varied if key not in keys]
    combinations = list(dict.fromkeys(tuple(config.get(key) for key in others) for config in configs))
    row_texts, column_texts = (shown(config.get(key) for config in configs) for key in keys)
    parts = grouped(
        (
            (row_texts[config.get(keys[0])], column_texts[config.get(keys[1])]),
            (group, combinations.index(tuple(config.get(key) for key in others))),
        )
        for group, config in zip(groups, configs, strict=True)
    )
    cells = {pair: _together(", ".join(pair), part) for pair, part in parts.items()}
    rows, columns = (sorted({pair[i] for pair in cells}, key=_order) for i in (0, 1))
    run = groups[0].runs[0]
    column = Column("mean", "mean", "mean", run.mode, fraction=known(run.metric).unit == "fraction")
    labels = [name_of[key] for key in (*keys, *others)]
    return Pivot((labels[0], labels[1]), rows, columns, cells, labels[2:], column, run.metric)


def _together(name: str, parts: Sequence[tuple[Group, int]]) -> Group:
    """Returns the runs of several groups as one, in which a seed counts once for each of their other settings."""
    seeds: list[Seeds] = [(*(seed or ()), kind) for group, kind in parts for seed in group.seeds]
    folders = [folder for group, _ in parts for folder in group.folders]
    return Group(name, folders, seeds, [run for group, _ in parts for run in group.runs])


def _order(value: str) -> tuple[float, str]:
    return (float(value) if NUMBER.fullmatch(value) else float("inf"), value)


LEAST = 5
"""Fewest configs of which importances are computed."""
TREES, REPEATS = 200, 20
SIDE_BY_SIDE = 3
"""Most names that stand side by side below a panel."""
HEAD = ("setting", "importance", "sd", "rank correlation")


class Importance(NamedTuple):
    """How much a setting matters.

    Attributes:
        name: Short name of the setting.
        lost: R² that the forest loses when the setting is shuffled among the configs, mean over shuffles.
        sd: Standard deviation over shuffles.
        correlation: Spearman's rank correlation with the metric; NaN of a setting that is no number.
    """

    name: str
    lost: float
    sd: float
    correlation: float

    def text(self) -> list[str]:
        """Returns the cells of its row below `HEAD`."""
        sign = "" if math.isnan(self.correlation) else f"{self.correlation:+.2f}"
        return [self.name, f"{self.lost:.3f}", f"{self.sd:.3f}", sign]


@dataclass(frozen=True)
class Tried:
    """The configs of a sweep whose metric is finite.

    Attributes:
        settings: The values of each setting that varies, as text, by short name.
        values: The metric of each config, mean over its runs.
        metric: Its name.
    """

    settings: dict[str, list[str]]
    values: list[float]
    metric: str

    @property
    def tells(self) -> bool:
        """Whether there are importances: of a setting that varies, in enough configs that are not all alike."""
        return bool(self.settings) and len(self.values) >= LEAST and len({*self.values}) > 1

    @cached_property
    def importances(self) -> tuple[list[Importance], str]:
        """The importance of each setting, the largest first, and a line on how well the forest fits.

        A random forest learns the metric from the settings; a setting is as important as the R² that is lost when its
        values are shuffled (L. Breiman, Random Forests, Machine Learning 2001). Seeds are fixed.

        Raises:
            UserError: If there are too few configs, all are alike, or no setting that all of them have varies.
        """
        from scipy.stats import spearmanr
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.inspection import permutation_importance

        n = len(self.values)
        ensure(
            self.tells,
            f"importance: {n} configs with a finite {self.metric}; it takes {LEAST}, not all alike, and a setting that "
            f"varies and that all have; leave importance out",
        )
        columns = [_codes(texts) for texts in self.settings.values()]
        x, y = np.array(columns).T, np.array(self.values)
        forest = RandomForestRegressor(TREES, oob_score=True, random_state=0).fit(x, y)
        lost = permutation_importance(forest, x, y, n_repeats=REPEATS, random_state=0)
        correlations = [
            float(spearmanr(column, y).statistic) if _numbers(texts) else math.nan
            for column, texts in zip(columns, self.settings.values(), strict=True)
        ]
        numbers = (self.settings, lost["importances_mean"].tolist(), lost["importances_std"].tolist(), correlations)
        unsorted = (Importance(*row) for row in zip(*numbers, strict=True))
        return sorted(unsorted, key=lambda importance: -importance.lost), (
            f"{n} configs; R² that a random forest loses when a setting is shuffled; on configs that it has not seen, "
            f"its R² is {forest.oob_score_:.2f}"
        )

    def files(self) -> dict[str, str]:
        """Returns ``importance.csv``."""
        return {"importance.csv": table_text(HEAD, self.importances[0])}

    def plot(self) -> Figure:
        """Draws the metric of each config against each setting, a panel a setting; logarithmic over a wide range."""
        rows, columns, width = panel_grid(len(self.settings))
        with new_figure(width, 1.6 * rows + 0.2, grid="both") as figure:
            for index, (name, texts) in enumerate(self.settings.items()):
                axes = figure.add_subplot(rows, columns, index + 1, xlabel=wrapped(name, 2.6))
                axes.set_ylabel("" if index % columns else label(self.metric))
                if _numbers(texts):
                    numbers = [float(text) for text in texts]
                    axes.plot(numbers, self.values, ".", color=COLORS[0])
                    axes.locator_params(axis="x", nbins=5)
                    axes.xaxis.set_major_formatter("{x:g}")
                    scale_axis(axes.xaxis, numbers)
                else:
                    axes.plot(texts, self.values, ".", color=COLORS[0])
                    axes.tick_params(axis="x", labelrotation=90 if len({*texts}) > SIDE_BY_SIDE else 0)
        return figure


def tried(groups: Sequence[Group]) -> Tried:
    """Returns the settings that vary and that all configs have, with the metric, of configs with finite runs."""
    finite = [group for group in groups if len(group.values("mean")) == len(group.runs)]
    configs = [settings_of(group.folders[0]) for group in finite]
    keys = [key for key in varying(configs) if all(key in config for config in configs)]
    texts = {key: shown(config[key] for config in configs) for key in keys}
    settings = {name: [texts[key][config[key]] for config in configs] for name, key in short_names(keys).items()}
    return Tried(settings, [fmean(group.values("mean")) for group in finite], groups[0].runs[0].metric)


def _numbers(texts: Sequence[str]) -> bool:
    return all(NUMBER.fullmatch(text) and math.isfinite(float(text)) for text in texts)


def _codes(texts: Sequence[str]) -> NDArray[np.float64]:
    """Returns values as numbers: themselves, or their places in the order of names."""
    categories = sorted(set(texts))
    return np.array([float(text) if _numbers(texts) else categories.index(text) for text in texts], float)
