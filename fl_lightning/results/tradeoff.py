"""Flatness against accuracy, for print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fl_lightning.core import COLORS, COLUMN, MARKERS, style
from fl_lightning.results.compare import Group
from fl_lightning.results.curves import LABELS, place_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_tradeoff(groups: Sequence[Group], measure: str) -> Figure:
    """Draws a point for each run: its metric against a measure of its flatness, both means of its last rounds.

    Args:
        groups: The runs.
        measure: The measure, such as ``lambda_max``.
    """
    from matplotlib.figure import Figure

    metric = groups[0].runs[0].metric
    with style():
        figure = Figure(figsize=(COLUMN, 2.5), layout="constrained")
        name = f"flatness/{measure}"
        axes = figure.add_subplot(xlabel=LABELS.get(name, measure), ylabel=LABELS.get(metric, metric))
        for i, group in enumerate(groups):
            runs = [run for run in group.runs if measure in run.flatness]
            x, y = [run.flatness[measure] for run in runs], [run.mean for run in runs]
            if not runs:
                continue
            axes.plot(x, y, MARKERS[i % len(MARKERS)], color=COLORS[i % len(COLORS)], label=group.name, clip_on=False)
        axes.grid(alpha=0.3)
        place_legend(figure)
    return figure
