"""Curves of one or more runs: accuracy, loss and flatness by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from fl_lightning.core import log_ticks
from fl_lightning.results.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 100
"""Parts of a run; the mean of each is drawn."""
PANELS = {
    "server/test/acc": "test accuracy",
    "server/test/miou": "test mIoU",
    "server/test/loss": "test loss",
    "flatness/lambda_max": "Hessian $\\lambda_{max}$",
    "flatness/discrepancy": "flatness discrepancy $\\Delta_F$",
}


def plot_curves(runs: dict[str, Path]) -> Figure:
    """Accuracy, loss, lambda_max and flatness discrepancy of one or more runs by round.

    Of a long run the means over hundredths of its rounds are drawn, and thin lines through the single values.

    Args:
        runs: ``metrics.csv`` of each run, by its label.
    """
    from matplotlib.figure import Figure

    columns = {label: read_metrics(path) for label, path in runs.items()}
    names = [name for name in PANELS if any(name in c for c in columns.values())]
    figure = Figure(figsize=(3.2 * max(len(names), 1), 2.8), layout="constrained")
    for i, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), i + 1, xlabel="round", ylabel=PANELS[name])
        for (label, metrics), style in zip(columns.items(), ("-", "--", "-.", ":") * len(columns), strict=False):
            if name in metrics:
                rounds, values = zip(*metrics[name], strict=True)
                shown = _means(rounds, values)
                (line,) = axes.plot(*shown, style, label=label, marker="." if len(shown[0]) < 30 else None)
                if len(shown[0]) < len(rounds):
                    axes.plot(rounds, values, color=line.get_color(), linewidth=0.5, alpha=0.3, zorder=1)
        axes.grid(alpha=0.3)
        if name == "flatness/lambda_max" and min(v for c in columns.values() for _, v in c.get(name, ())) > 0:
            axes.set_yscale("log")
            log_ticks(axes)
        if i == 0 and len(runs) > 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _means(rounds: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns mean round and mean value of each part of a run that has measurements."""
    width = max(1, math.ceil(rounds[-1] / POINTS))
    parts = [list(part) for _, part in groupby(zip(rounds, values, strict=True), lambda pair: (pair[0] - 1) // width)]
    means = [[mean(column) for column in zip(*part, strict=True)] for part in parts]
    return [at for at, _ in means], [value for _, value in means]
