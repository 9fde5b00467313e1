"""Figures of single numbers of runs: bars by name, and lines against another number."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_lightning.core import (
    COLORS,
    COLUMN,
    DASHES,
    PAGE,
    Figure,
    grouped,
    marked_style,
    new_figure,
    place_legend,
    scale_axis,
    wrapped,
)
from fl_lightning.results.metrics import average, deviation


def plot_bars(numbers: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> Figure:
    """Draws numbers as groups of bars, mean ± standard deviation over seeds; logarithmic over a wide range.

    Args:
        numbers: The values of the seeds, by the bar's label and by the group's; a bar may be missing.
        name: What the numbers are.
    """
    places = list(dict.fromkeys(place for of in numbers.values() for place in of))
    width = 0.8 / len(numbers)
    with new_figure(COLUMN if len(numbers) * len(places) <= 12 else PAGE, 2.4, grid="y") as figure:
        axes = figure.add_subplot(ylabel=name)
        for i, (label, of) in enumerate(numbers.items()):
            at = [places.index(place) + (i - (len(numbers) - 1) / 2) * width for place in of]
            heights, errors = [average(v) for v in of.values()], [deviation(v) or 0.0 for v in of.values()]
            axes.bar(
                at,
                heights,
                width,
                yerr=errors,
                label=label,
                linewidth=0.4,
                error_kw={"linewidth": 0.6},
                edgecolor="white",
                color=COLORS[i % len(COLORS)],
                hatch=HATCHES[i % len(HATCHES)],
            )
        turned = len(places) > 4
        axes.set_xticks(range(len(places)), places, rotation=45 * turned, ha="right" if turned else "center")
        scale_axis(axes.yaxis, [average(v) for of in numbers.values() for v in of.values()])
        place_legend(figure)
    return figure


def plot_lines(panels: Mapping[str, Mapping[str, Sequence[tuple[float, Sequence[float]]]]], name: str) -> Figure:
    """Draws numbers against another one, mean ± standard deviation over seeds, in panels; logarithmic if x is wide.

    Args:
        panels: The points of each line, as the number on the x-axis and the values of the seeds there, by the name of
            the x-axis and by label.
        name: What the numbers are.
    """
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with new_figure(COLUMN if columns == 1 else PAGE, 1.9 * rows + 0.4, grid="both") as figure:
        for place, (across, lines) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, place + 1, xlabel=wrapped(across, 2.6))
            axes.set_ylabel("" if place % columns else name)
            for i, (label, points) in enumerate(lines.items()):
                x, y = [at for at, _ in points], [average(values) for _, values in points]
                spread = [deviation(values) or 0.0 for _, values in points]
                look = {"elinewidth": 0.6, "capsize": 2, **marked_style(i)}
                axes.errorbar(x, y, spread if any(spread) else None, label=label, **look)
            scale_axis(axes.xaxis, [at for points in lines.values() for at, _ in points])
            tried, *others = (tuple(at for at, _ in points) for points in lines.values())
            if all(other == tried for other in others):
                axes.set_xticks(tried, [f"{at:g}" for at in tried])
        place_legend(figure)
    return figure


def plot_by_client(panels: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]], name: str) -> Figure:
    """Draws a number of each client by round, a faint point each, and the mean over the clients of a round as a line.

    Args:
        panels: The rounds and values of each client, by the panel's title.
        name: What the numbers are.
    """
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with new_figure(COLUMN if columns == 1 else PAGE, 2.1 * rows + 0.3, grid="both") as figure:
        values = [value for clients in panels.values() for points in clients.values() for _, value in points]
        first = None
        for place, (title, clients) in enumerate(panels.items()):
            axes = first = figure.add_subplot(rows, columns, place + 1, title=title, sharey=first)
            x, y = np.array([point for points in clients.values() for point in points]).T
            rounds = np.unique(x)
            axes.plot(x, y, ".", color=COLORS[4], markersize=3, markeredgewidth=0, alpha=0.5, label="a client")
            axes.plot(rounds, [y[x == at].mean() for at in rounds], color=COLORS[0], label="mean of the clients")
            axes.set_ylabel("" if place % columns else name)
            axes.locator_params(axis="x", integer=True)
            axes.set_xlabel("round" if place + columns >= len(panels) else "")
            scale_axis(axes.yaxis, values)
        place_legend(figure)
    return figure


CLEAN = "clean"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo")
"""Bars differ by more than their colour."""


class Accuracy(NamedTuple):
    """One row of the table.

    Attributes:
        corruption: Name of the corruption; "clean" for the test set itself.
        severity: 1 to 5; 0 for the test set itself.
        acc: Share of the test images that are classified correctly.
    """

    corruption: str
    severity: int
    acc: float


def means(rows: Sequence[Accuracy]) -> dict[str, float]:
    """Returns the accuracy on the clean test set, and its mean over corruptions, by severity and over all."""
    ordered = sorted(rows, key=lambda row: row.severity)
    found = grouped((f"severity {row.severity}" if row.severity else CLEAN, row.acc) for row in ordered)
    found["all"] = [row.acc for row in rows if row.severity]
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def read(path: Path) -> list[Accuracy]:
    """Returns the table that ``fl-lightning corruptions`` writes."""
    with path.open(newline="") as file:
        return [Accuracy(row["corruption"], int(row["severity"]), float(row["acc"])) for row in csv.DictReader(file)]


def plot_corruptions(runs: Mapping[str, Sequence[Accuracy] | Path]) -> Figure:
    """Draws the accuracy of one or more runs by corruption, at the highest severity and averaged over all of them.

    A thin line is the accuracy on the clean test set.

    Args:
        runs: Rows, or the file that contains them, of each run by its label.
    """
    tables = {label: read(rows) if isinstance(rows, Path) else rows for label, rows in runs.items()}
    corrupted = [row for rows in tables.values() for row in rows if row.severity]
    names, highest = list(dict.fromkeys(row.corruption for row in corrupted)), max(row.severity for row in corrupted)
    width = 0.8 / len(tables)
    with new_figure(COLUMN if len(names) * len(tables) <= 8 else PAGE, 4.2, grid="y") as figure:
        for place, (title, least) in enumerate(((f"severity {highest}", highest), ("mean over severities", 1))):
            axes = figure.add_subplot(2, 1, place + 1, title=title, ylabel="test accuracy (%)", ylim=(0, 100))
            for i, (label, rows) in enumerate(tables.items()):
                color, hatch = COLORS[i % len(COLORS)], HATCHES[i % len(HATCHES)]
                shown = [row for row in rows if row.severity >= least]
                heights = [100 * np.mean([r.acc for r in shown if r.corruption == name] or [np.nan]) for name in names]
                at = np.arange(len(names)) + (i - (len(tables) - 1) / 2) * width
                axes.bar(at, heights, width, label=label, color=color, hatch=hatch, edgecolor="white", linewidth=0.4)
                for clean in (row.acc for row in rows if row.corruption == CLEAN):
                    axes.axhline(100 * clean, color=color, linestyle=DASHES[i % len(DASHES)], linewidth=0.8, zorder=0)
            labels = [name.replace("_", " ") for name in names] if place else [""] * len(names)
            axes.set_xticks(range(len(names)), labels, rotation=45, ha="right", rotation_mode="anchor")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure
