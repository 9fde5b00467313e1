"""What the settings of a sweep do to its metric: parallel coordinates, and the importance of each setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import COLORMAP, PAGE, SPAN, Figure, ensure, log_levels, new_figure, wrapped
from fl_lightning.results.compare import Group, plain
from fl_lightning.results.configs import settings_of, short_names, varying
from fl_lightning.results.metrics import NUMBER, table_text
from fl_lightning.results.names import Mode, label

LEAST = 5
"""Fewest configs of which importances are computed."""
TREES, REPEATS = 200, 20
TICKED = 6
"""Most values of a setting that each have a tick."""
SPREAD = 0.05
"""Part of an axis over which lines through one value are spread."""
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
        mode: Whether large (max) or small (min) values are good.
    """

    settings: dict[str, list[str]]
    values: list[float]
    metric: str
    mode: Mode

    def importances(self) -> tuple[list[Importance], str]:
        """Returns the importance of each setting, the largest first, and a line on how well the forest fits.

        A random forest learns the metric from the settings; a setting is as important as the R² that is lost when its
        values are shuffled (L. Breiman, Random Forests, Machine Learning 2001). Seeds are fixed.

        Raises:
            UserError: If there are too few configs.
        """
        from scipy.stats import spearmanr
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.inspection import permutation_importance

        n = len(self.values)
        enough = n >= LEAST and len(set(self.values)) > 1
        ensure(enough, f"importance: {n} configs with a finite {self.metric}; it takes {LEAST}, not all alike")
        columns = [_codes(texts) for texts in self.settings.values()]
        x, y = np.array(columns).T, np.array(self.values)
        forest = RandomForestRegressor(TREES, oob_score=True, random_state=0).fit(x, y)
        lost = permutation_importance(forest, x, y, n_repeats=REPEATS, random_state=0)
        signs = [
            float(spearmanr(column, y).statistic) if _numbers(texts) else math.nan
            for column, texts in zip(columns, self.settings.values(), strict=True)
        ]
        numbers = (self.settings, lost["importances_mean"].tolist(), lost["importances_std"].tolist(), signs)
        found = sorted((Importance(*of) for of in zip(*numbers, strict=True)), key=lambda each: -each.lost)
        return found, (
            f"{n} configs; R² that a random forest loses when a setting is shuffled; on configs that it has not seen, "
            f"its R² is {forest.oob_score_:.2f}"
        )

    def files(self) -> dict[str, str]:
        """Returns ``importance.csv``."""
        return {"importance.csv": table_text(HEAD, self.importances()[0])}

    def plot(self) -> Figure:
        """Draws a line for each config through its settings to the metric, whose scale is the bar of colours."""
        from matplotlib import colormaps

        y = np.array(self.values)
        low, high = float(y.min()), float(y.max())
        heights = (y - low) / ((high - low) or 1.0)
        shades = colormaps[COLORMAP if self.mode == "max" else f"{COLORMAP}_r"]
        scales = [_scale(texts) for texts in self.settings.values()]
        lines = np.array([*(_apart(place, heights) for place, _ in scales), heights]).T
        end = len(scales)
        with new_figure(PAGE, 2.6) as figure:
            axes: Any = figure.add_subplot(xlim=(-0.3, end), ylim=(-0.04, 1.04), yticks=[])
            for i in np.argsort(y if self.mode == "max" else -y):  # the best on top
                axes.plot(range(end + 1), lines[i], color=shades(heights[i]), alpha=0.8, linewidth=1)
            for i, (_, ticks) in enumerate(scales):
                axes.axvline(i, color="black", linewidth=0.6)
                for at, text in ticks:
                    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}
                    axes.text(i - 0.03, at, text, ha="right", va="center", fontsize=7, bbox=box, zorder=3)
            axes.set_xticks(range(end), [wrapped(name, PAGE / (end + 1)) for name in self.settings])
            axes.tick_params(bottom=False)
            axes.spines[["left", "top", "bottom"]].set_visible(False)
            bar = axes.inset_axes((1.0, 0.04 / 1.08, 0.02, 1 / 1.08))
            bar.imshow(
                np.linspace(0, 1, 256)[:, None], cmap=shades, aspect="auto", origin="lower", extent=(0, 1, low, high)
            )
            bar.set(xticks=[], ylabel=label(self.metric))
            bar.yaxis.tick_right()
            bar.yaxis.set_label_position("right")
        return figure


def tried(groups: Sequence[Group]) -> Tried:
    """Returns the settings that vary and that all configs have, with the metric, of configs with finite runs."""
    finite = [group for group in groups if len(group.values("mean")) == len(group.runs)]
    configs = [settings_of(group.folders[0]) for group in finite]
    keys = [key for key in varying(configs) if all(key in config for config in configs)]
    settings = {name: [plain(config[key]) for config in configs] for name, key in short_names(keys).items()}
    run = groups[0].runs[0]
    return Tried(settings, [fmean(group.values("mean")) for group in finite], run.metric, run.mode)


def _numbers(texts: Sequence[str]) -> bool:
    return all(NUMBER.fullmatch(text) and math.isfinite(float(text)) for text in texts)


def _codes(texts: Sequence[str]) -> NDArray[np.float64]:
    """Returns values as numbers: themselves, or their places in the order of names."""
    kinds = sorted(set(texts))
    return np.array([float(text) if _numbers(texts) else kinds.index(text) for text in texts], float)


def _apart(places: NDArray[np.float64], heights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns places on an axis; lines through the same one lie a little apart, by the height of their ends."""
    moved = places.copy()
    for place in np.unique(places):
        (through,) = np.nonzero(places == place)
        ranks = np.argsort(np.argsort(heights[through]))
        moved[through] += SPREAD * (ranks / max(len(through) - 1, 1) - 0.5) * (len(through) > 1)
    return moved


def _scale(texts: Sequence[str]) -> tuple[NDArray[np.float64], list[tuple[float, str]]]:
    """Returns the heights of values on an axis from 0 to 1, logarithmic over a wide range, and its ticks."""
    values = _codes(texts)
    low, high = float(values.min()), float(values.max())
    wide = _numbers(texts) and low > 0 and high > SPAN * low
    named = {float(value): text for value, text in zip(values, texts, strict=True)}
    if len(named) > TICKED and _numbers(texts):
        levels = log_levels(low, high) if wide else np.linspace(low, high, TICKED).tolist()
        named = {level: f"{level:.3g}" for level in levels if low <= level <= high}

    def height(value: Any) -> Any:
        return np.log(value / low) / np.log(high / low) if wide else (value - low) / ((high - low) or 1.0)

    return height(values), [(float(height(at)), text) for at, text in named.items()]
