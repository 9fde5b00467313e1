"""Figures of compared runs: metrics by round, flatness against accuracy, bars, lines and corruptions."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.core import (
    COLORS,
    COLUMN,
    PAGE,
    Axes,
    Figure,
    figure_files,
    grouped,
    line_style,
    marked_style,
    new_figure,
    place_legend,
    require,
    scale_axis,
    wrapped,
)
from fl_lightning.results.compare import Group
from fl_lightning.results.metrics import (
    CLOCK,
    MAIN,
    Columns,
    Pairs,
    average,
    deviation,
    is_flatness,
    is_result,
    label,
    read_metrics,
    table_text,
)

POINTS = 100
"""Number of parts of a long run; the mean over each part is drawn."""
SINGLE = 5000
"""Most single values of a run that a line joins."""
DIVERGED = 1000.0
"""Loss above which a panel of losses has a logarithmic axis."""
MOST = 12
"""Largest number of groups that are told apart by colour and marker."""
Runs = Path | Sequence[Path]


class Band(NamedTuple):
    """A metric over the runs of a group, at the rounds in which all of them measured it.

    Attributes:
        rounds: The rounds, ascending; mean rounds where parts of a run were averaged.
        mean: Mean over the runs.
        sd: Sample standard deviation over the runs; 0 of a single one.
    """

    rounds: list[float]
    mean: list[float]
    sd: list[float]


def read(runs: Mapping[str, Runs]) -> dict[str, list[Columns]]:
    """Returns the metrics of each run, by group.

    Args:
        runs: ``metrics.csv`` of a run, or of several with different seeds, by label.
    """
    return {
        label: [read_metrics(path) for path in ([paths] if isinstance(paths, Path) else paths)]
        for label, paths in runs.items()
    }


def curve(runs: Sequence[Columns], name: str) -> Band | None:
    """Returns mean and deviation of a metric over the runs of a group, in the rounds that all of them have.

    For a long run, the means over hundredths of its rounds are taken first.

    Args:
        runs: The metrics of each run; those without this one are left out.
        name: The metric.

    Returns:
        None if no run has it, or there is no common round.
    """
    series = [dict(run[name]) for run in runs if run.get(name)]
    common = sorted(set(series[0]).intersection(*series[1:])) if series else []
    if not common:
        return None
    means = [_means([(round, run[round]) for round in common]) for run in series]
    by_round = [[value for _, value in points] for points in zip(*means, strict=True)]
    return Band(
        [round for round, _ in means[0]], [*map(average, by_round)], [deviation(values) or 0.0 for values in by_round]
    )


def _means(values: Pairs) -> list[tuple[float, float]]:
    """Returns mean round and mean value of each part of a run that has measurements."""
    width = max(1, math.ceil(values[-1][0] / POINTS))
    parts = [list(part) for _, part in groupby(values, lambda pair: (pair[0] - 1) // width)]
    return [(fmean(round for round, _ in part), average([value for _, value in part])) for part in parts]


def drawn(groups: Mapping[str, Sequence[Columns]]) -> list[str]:
    """Returns the results that any run has, those of `MAIN` first."""
    measured = dict.fromkeys(name for runs in groups.values() for run in runs for name in run if is_result(name))
    return list(dict.fromkeys([*(name for name in MAIN if name in measured), *measured]))


def curve_files(runs: Mapping[str, Runs]) -> dict[str, str | bytes]:
    """Returns ``curves.csv``, with means, deviations and number of seeds, ``curves.png`` and ``.pdf``, by name.

    If all runs have a clock of the devices, there are ``curves_hours.png`` and ``.pdf``, too.
    """
    groups = read(runs)
    bands = [(text, name, curve(group, name), group) for text, group in groups.items() for name in drawn(groups)]
    rows = (
        (text, name, *point, sum(name in run for run in group))
        for text, name, band, group in bands
        if band is not None
        for point in zip(*band, strict=True)
    )
    return {
        "curves.csv": table_text(["run", "metric", "round", "mean", "sd", "seeds"], rows),
        **figure_files(draw_curves(groups), "curves"),
        **(figure_files(draw_curves(groups, hours=True), "curves_hours") if all_timed(groups) else {}),
    }


def plot_curves(runs: Mapping[str, Runs], names: Sequence[str] | None = None) -> Figure:
    """Draws metrics of one or more groups of runs by round, one colour a group: as wide as a page, one as a column.

    The band is the mean ± the standard deviation over the seeds. For a long run, the means over hundredths of its
    rounds are drawn; if it is the only one of its group, a thin line joins its single values, or `SINGLE` of them.

    Args:
        runs: ``metrics.csv`` of a run, or of several with different seeds, by label.
        names: The metrics; None: those of `MAIN` that were measured.

    Raises:
        UserError: If no run has one of ``names``.
    """
    groups = read(runs)
    for name in names or ():
        require(name in drawn(groups), "names", name, f"no run has it; choose from {', '.join(drawn(groups))}")
    return draw_curves(groups, names)


def all_timed(groups: Mapping[str, Sequence[Columns]]) -> bool:
    """Returns whether all runs have a clock of the clients' devices."""
    return all(run.get(CLOCK) for runs in groups.values() for run in runs)


def draw_curves(
    groups: Mapping[str, Sequence[Columns]],
    names: Sequence[str] | None = None,
    hours: bool = False,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """Draws metrics that are read already, as `plot_curves` does.

    Args:
        groups: The metrics of each run, by group; see `read`.
        names: The metrics; None: those of `MAIN` that were measured.
        hours: Whether against the mean hours of the clients' devices, which all runs have, in place of rounds.
        levels: Values of the first metric to compare with, drawn as dashed lines, by label.
    """
    across = "device hours" if hours else "round"
    names = [name for name in drawn(groups) if name in MAIN] if names is None else names
    rows, columns, width = panel_grid(len(names))
    with new_figure(width, 1.9 * rows + 0.4, grid="both") as figure:
        for i, name in enumerate(names):
            bottom = i + columns >= len(names)
            axes = figure.add_subplot(rows, columns, i + 1, xlabel=across if bottom else "", ylabel=label(name))
            _panel(axes, name, groups, hours)
        for i, (text, value) in enumerate((levels or {}).items()):
            figure.axes[0].axhline(value, label=text, color=str(0.3 * i), linestyle=(0, (4, 2 + i)), linewidth=0.8)
        place_legend(figure, always=len(groups) > 1)
    return figure


def panel_grid(panels: int) -> tuple[int, int, float]:
    """Returns rows and columns of panels, and the width of their figure: up to two panels stand side by side."""
    columns = 2 if panels > 1 else 1
    return max(-(-panels // columns), 1), columns, PAGE if columns > 1 else COLUMN


def _hours(runs: Sequence[Columns], rounds: Sequence[float]) -> list[float]:
    """Returns the mean hours of runs at rounds, also at those between two."""
    times = [dict(run[CLOCK]) for run in runs]
    common = sorted(set(times[0]).intersection(*times[1:]))
    return [float(x) for x in np.interp(rounds, common, [fmean(hours[at] for hours in times) / 3600 for at in common])]


def _panel(axes: Axes, name: str, groups: Mapping[str, Sequence[Columns]], hours: bool) -> None:
    means, ends = list[float](), list[float]()
    if not hours:
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    for i, (text, group) in enumerate(groups.items()):
        style, band = {**line_style(i), "gid": f"run-{i}"}, curve(group, name)
        if band is None:
            continue
        low, high = ([m + sign * sd for m, sd in zip(band.mean, band.sd, strict=True)] for sign in (-1, 1))
        means, ends = means + band.mean, ends + low
        x = _hours(group, band.rounds) if hours else band.rounds
        axes.plot(x, band.mean, label=text, marker="." if len(x) < 30 else None, **style)
        faint = {"color": style["color"], "gid": style["gid"]}
        if len(group) > 1:
            axes.fill_between(x, low, high, alpha=0.2, linewidth=0, **faint)
        elif len(x) < len(group[0][name]):
            pairs = group[0][name]
            rounds, values = zip(*pairs[:: -(-len(pairs) // SINGLE)], strict=True)
            axes.plot(_hours(group, rounds) if hours else rounds, values, linewidth=0.4, alpha=0.3, zorder=1, **faint)
    if is_flatness(name):
        scale_axis(axes.yaxis, ends)  # a band that reaches 0 has no place on a logarithmic axis
    elif name.endswith("loss") and max(means, default=0) > DIVERGED:
        scale_axis(axes.yaxis, means)  # the others' losses are seen beside that of a run that diverged


def plot_tradeoff(groups: Sequence[Group], measure: str) -> Figure:
    """Draws the headline of a metric against that of a measure of flatness.

    Up to `MOST` groups are points of a plane, one for each run. More are rows of two panels, in the order of the
    metric, with mean and standard deviation over their runs.

    Args:
        groups: The runs.
        measure: The measure, such as ``lambda_max``.
    """
    name, metric = f"flatness/{measure}", groups[0].runs[0].metric
    points = {
        group.name: [(run.flatness[measure], run.mean) for run in group.runs if measure in run.flatness]
        for group in groups
    }
    measured = {text: values for text, values in points.items() if values}
    if len(measured) > MOST:
        return _plot_rows(measured, f"{label(name)} (smaller is flatter)", metric)
    with new_figure(COLUMN, 2.5, grid="both") as figure:
        axes = figure.add_subplot(xlabel=f"{label(name)} (smaller is flatter)", ylabel=label(metric))
        axes.locator_params(axis="x", nbins=5)
        for i, (text, values) in enumerate(points.items()):
            style = {**marked_style(i), "linestyle": "none", "gid": f"run-{i}"}
            if values:
                axes.plot(*zip(*values, strict=True), label=text, clip_on=False, **style)
        scale_axis(axes.xaxis, [x for values in measured.values() for x, _ in values])
        place_legend(figure, always=len(groups) > 1)
    return figure


def _plot_rows(groups: Mapping[str, Pairs], flatness: str, metric: str) -> Figure:
    order = sorted(groups, key=lambda text: average([y for _, y in groups[text]]))
    with new_figure(PAGE, 0.14 * len(groups) + 0.6, grid="both") as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, title, column in ((left, label(metric), 1), (right, flatness, 0)):
            values = [[pair[column] for pair in groups[text]] for text in order]
            means, sds = [average(numbers) for numbers in values], [deviation(numbers) or 0.0 for numbers in values]
            axes.errorbar(
                means, range(len(order)), xerr=sds, fmt="o", markersize=3, linewidth=0.8, color=line_style(0)["color"]
            )
            axes.set(xlabel=title, ylim=(-0.7, len(order) - 0.3))
            if column == 1 and min(means) > 0 and max(means) < 1:
                # 0.9 and 0.99 are as far apart as 0.99 and 0.999; a deviation may reach beyond 0 or 1
                axes.set_xscale("logit", nonpositive="clip")
                low, high = axes.set_xlim(min(means) / 2, 1 - (1 - max(means)) / 2)
                ticks = [
                    tick for tick in (0.05, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999) if low < tick < high
                ]
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.set_xticks([], minor=True)
            else:
                scale_axis(axes.xaxis, means)
        left.set_yticks(range(len(order)), order)
    return figure


HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo")
"""Bars differ by more than their colour."""


def _bars(axes: Axes, i: int, count: int, places: Iterable[int], heights: Sequence[float], **style: Any) -> None:
    """Draws the bars of the i-th of several labels at the places of their groups."""
    width = 0.8 / count
    style |= {"color": COLORS[i % len(COLORS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
    axes.bar([place + (i - (count - 1) / 2) * width for place in places], heights, width, linewidth=0.4, **style)


def plot_bars(numbers: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> Figure:
    """Draws numbers as groups of bars, mean ± standard deviation over seeds; logarithmic over a wide range.

    Args:
        numbers: The values of the seeds, by the bar's label and by the group's; a bar may be missing.
        name: What the numbers are.
    """
    groups = list(dict.fromkeys(group for bars in numbers.values() for group in bars))
    with new_figure(COLUMN if len(numbers) * len(groups) <= 12 else PAGE, 2.4, grid="y") as figure:
        axes = figure.add_subplot(ylabel=name)
        for i, (text, bars) in enumerate(numbers.items()):
            heights, errors = [average(v) for v in bars.values()], [deviation(v) or 0.0 for v in bars.values()]
            places = map(groups.index, bars)
            _bars(axes, i, len(numbers), places, heights, yerr=errors, label=text, error_kw={"linewidth": 0.6})
        rotated = len(groups) > 4
        axes.set_xticks(range(len(groups)), groups, rotation=45 * rotated, ha="right" if rotated else "center")
        scale_axis(axes.yaxis, [average(v) for bars in numbers.values() for v in bars.values()])
        place_legend(figure)
    return figure


def plot_lines(panels: Mapping[str, Mapping[str, Sequence[tuple[float, Sequence[float]]]]], name: str) -> Figure:
    """Draws numbers against another one, mean ± standard deviation over seeds, in panels; logarithmic if x is wide.

    Args:
        panels: The points of each line, as the number on the x-axis and the values of the seeds there, by the name of
            the x-axis and by label.
        name: What the numbers are.
    """
    rows, columns, width = panel_grid(len(panels))
    with new_figure(width, 1.9 * rows + 0.4, grid="both") as figure:
        for index, (across, lines) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, index + 1, xlabel=wrapped(across, 2.6))
            axes.set_ylabel("" if index % columns else name)
            for i, (text, points) in enumerate(lines.items()):
                x, y = [x_value for x_value, _ in points], [average(values) for _, values in points]
                spread = [deviation(values) or 0.0 for _, values in points]
                style = {"elinewidth": 0.6, "capsize": 2, **marked_style(i)}
                axes.errorbar(x, y, spread if any(spread) else None, label=text, **style)
            scale_axis(axes.xaxis, [x_value for points in lines.values() for x_value, _ in points])
            tried, *others = (tuple(x_value for x_value, _ in points) for points in lines.values())
            if all(places == tried for places in others):
                axes.set_xticks(tried, [f"{x_value:g}" for x_value in tried])
        place_legend(figure)
    return figure


CLEAN = "clean"


class Accuracy(NamedTuple):
    """One row of the table of corruptions.

    Attributes:
        corruption: Name of the corruption; "clean" for the test set itself.
        severity: 1 to 5; 0 for the test set itself.
        acc: Share of the test images that are classified correctly.
    """

    corruption: str
    severity: int
    acc: float


def read_corruptions(path: Path) -> list[Accuracy]:
    """Returns the table that ``fl-lightning corruptions`` writes."""
    with path.open(newline="") as file:
        return [Accuracy(row["corruption"], int(row["severity"]), float(row["acc"])) for row in csv.DictReader(file)]


def plot_corruptions(runs: Mapping[str, Sequence[Accuracy] | Path]) -> Figure:
    """Draws the accuracy of one or more runs by corruption, at the highest severity and averaged over all of them.

    A thin line is the accuracy on the clean test set.

    Args:
        runs: Rows, or the file that contains them, of each run by its label.
    """
    tables = {text: read_corruptions(rows) if isinstance(rows, Path) else rows for text, rows in runs.items()}
    corrupted = [row for rows in tables.values() for row in rows if row.severity]
    names, highest = list(dict.fromkeys(row.corruption for row in corrupted)), max(row.severity for row in corrupted)
    with new_figure(COLUMN if len(names) * len(tables) <= 8 else PAGE, 4.2, grid="y") as figure:
        for index, (title, lowest) in enumerate(((f"severity {highest}", highest), ("mean over severities", 1))):
            axes = figure.add_subplot(2, 1, index + 1, title=title, ylabel="test accuracy (%)", ylim=(0, 100))
            for i, (text, rows) in enumerate(tables.items()):
                accuracies = grouped((row.corruption, row.acc) for row in rows if row.severity >= lowest)
                heights = [100 * average(accuracies.get(name, [])) for name in names]
                _bars(axes, i, len(tables), range(len(names)), heights, label=text)
                for clean in (row.acc for row in rows if row.corruption == CLEAN):
                    axes.axhline(100 * clean, **{**line_style(i), "linewidth": 0.8, "zorder": 0})
            labels = [name.replace("_", " ") for name in names] if index else [""] * len(names)
            axes.set_xticks(range(len(names)), labels, rotation=45, ha="right", rotation_mode="anchor")
        place_legend(figure, always=True)
    return figure
