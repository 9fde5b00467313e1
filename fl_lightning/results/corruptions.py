"""Accuracy by corruption and severity: table, means and figure."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_lightning.core import COLORS, COLUMN, DASHES, PAGE, Figure, new_figure

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
    found: dict[str, list[float]] = {CLEAN: []}
    for row in sorted(rows, key=lambda row: row.severity):
        found.setdefault(f"severity {row.severity}" if row.severity else CLEAN, []).append(row.acc)
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
    with new_figure(COLUMN if len(names) * len(tables) <= 8 else PAGE, 4.2) as figure:
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
            axes.grid(axis="y", alpha=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure
