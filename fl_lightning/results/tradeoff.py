"""Flatness against accuracy, for print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fl_lightning.core import COLUMN, MARKERS, line_style, place_legend, style
from fl_lightning.results.compare import Group
from fl_lightning.results.names import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_tradeoff(groups: Sequence[Group], measure: str) -> Figure:
    """Draws a point for each run: the headline of its metric against that of a measure of its flatness.

    Args:
        groups: The runs.
        measure: The measure, such as ``lambda_max``.
    """
    from matplotlib.figure import Figure

    metric = groups[0].runs[0].metric
    with style():
        figure = Figure(figsize=(COLUMN, 2.5), layout="constrained")
        name = f"flatness/{measure}"
        axes = figure.add_subplot(xlabel=f"{label(name)} (smaller is flatter)", ylabel=label(metric))
        for i, group in enumerate(groups):
            runs = [run for run in group.runs if measure in run.flatness]
            x, y = [run.flatness[measure] for run in runs], [run.mean for run in runs]
            if not runs:
                continue
            look = {**line_style(i), "linestyle": "none", "marker": MARKERS[i % len(MARKERS)], "gid": f"run-{i}"}
            axes.plot(x, y, label=group.name, clip_on=False, **look)
        axes.grid(alpha=0.3)
        place_legend(figure)
    return figure
