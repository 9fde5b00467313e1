"""Curves of runs by round: accuracy, loss and flatness, as mean and band over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from fl_lightning.core import COLUMN, PAGE, SPAN, line_style, log_ticks, require, style
from fl_lightning.results.metrics import Band, Pairs, band, is_flatness, read_metrics, write_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 100
"""Parts of a run; the mean of each is drawn."""
PANELS = (
    "server/test/acc",
    "server/test/miou",
    "server/test/loss",
    "server/clients/acc_worst_decile",
    "flatness/lambda_max",
    "flatness/discrepancy",
)
"""Metrics that are drawn if they were measured."""
LABELS = {
    "server/test/acc": "test accuracy",
    "server/test/miou": "test mIoU",
    "server/test/loss": "test loss",
    "server/clients/acc_worst_decile": "accuracy, worst 10 % of clients",
    "client/train/loss": "training loss",
    "flatness/lambda_max": r"Hessian $\lambda_{max}$",
    "flatness/discrepancy": r"flatness discrepancy $\Delta_F$",
    "flatness/sharpness_global": "sharpness of the global model",
    "flatness/sharpness_local": "sharpness of the local models",
}
"""Labels of metrics."""

Columns = Mapping[str, Pairs]
Runs = Path | Sequence[Path]


def read(runs: Mapping[str, Runs]) -> dict[str, list[Columns]]:
    """Returns the metrics of each run, by group.

    Args:
        runs: ``metrics.csv`` of a run, or of several with different seeds, by label.
    """
    lists = {label: [paths] if isinstance(paths, Path) else paths for label, paths in runs.items()}
    return {label: [read_metrics(path) for path in paths] for label, paths in lists.items()}


def curve(runs: Sequence[Columns], name: str) -> Band | None:
    """Returns mean and deviation of a metric over the runs of a group, in the rounds that all of them have.

    Of a long run, the means over hundredths of its rounds are taken first.

    Args:
        runs: The metrics of each run; those without this one are left out.
        name: The metric.

    Returns:
        None if no run has it, or there is no common round.
    """
    having = [dict(run[name]) for run in runs if run.get(name)]
    common = sorted(set(having[0]).intersection(*having[1:])) if having else []
    return band([_means([(at, run[at]) for at in common]) for run in having]) if common else None


def _means(values: Pairs) -> list[tuple[float, float]]:
    """Returns mean round and mean value of each part of a run that has measurements."""
    width = max(1, math.ceil(values[-1][0] / POINTS))
    parts = [list(part) for _, part in groupby(values, lambda pair: (pair[0] - 1) // width)]
    return [(mean(at for at, _ in part), mean(value for _, value in part)) for part in parts]


def drawn(groups: Mapping[str, Sequence[Columns]]) -> list[str]:
    """Returns the metrics worth a curve that any run has: of the server, the training loss, and of flatness."""
    names = dict.fromkeys([*PANELS, *(name for runs in groups.values() for run in runs for name in run)])
    having = {name for runs in groups.values() for run in runs for name in run}
    return [n for n in names if n in having and (n.startswith("server/") or n == "client/train/loss" or is_flatness(n))]


def write_curves(runs: Mapping[str, Runs], out: Path) -> None:
    """Writes ``curves.csv``, with the number of seeds and mean and deviation over them, ``curves.png`` and ``.pdf``."""
    from fl_lightning.core import save_figure

    groups = read(runs)
    bands = [(label, name, curve(group, name), group) for label, group in groups.items() for name in drawn(groups)]
    rows = (
        (label, name, *point, sum(name in run for run in group))
        for label, name, found, group in bands
        if found is not None
        for point in zip(*found, strict=True)
    )
    write_table(out / "curves.csv", ["run", "metric", "round", "mean", "sd", "seeds"], rows)
    save_figure(plot_curves(runs), out / "curves")


def plot_curves(runs: Mapping[str, Runs], names: Sequence[str] | None = None) -> Figure:
    """Draws metrics of one or more groups of runs by round, one colour a group: as wide as a page, one as a column.

    The band is the mean ± the standard deviation over the seeds. Of a long run the means over hundredths of its rounds
    are drawn, of a single one with a thin line through the single values.

    Args:
        runs: ``metrics.csv`` of a run, or of several with different seeds, by label.
        names: The metrics; None: accuracy or mIoU, loss, lambda_max and discrepancy, as far as they were measured.

    Raises:
        UserError: If no run has one of ``names``.
    """
    from matplotlib.figure import Figure

    groups = read(runs)
    if names is None:
        names = [name for name in drawn(groups) if name in PANELS]
    for name in names:
        require(name in drawn(groups), "names", name, f"no run has it; choose from {', '.join(drawn(groups))}")
    wide = 2 if len(names) > 1 else 1
    rows = max(-(-len(names) // wide), 1)
    with style():
        figure = Figure(figsize=(PAGE if wide > 1 else COLUMN, 1.9 * rows + 0.4), layout="constrained")
        for i, name in enumerate(names):
            axes = figure.add_subplot(rows, wide, i + 1, ylabel=LABELS.get(name, name))
            _panel(axes, name, groups)
            if i + wide >= len(names):
                axes.set_xlabel("round")
        place_legend(figure)
    return figure


def place_legend(figure: Figure) -> None:
    """Adds one legend below the panels, unless there is only one line; its lines of text make the figure higher."""
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(lines) > 1:
        columns = max(int(18 * figure.get_figwidth() // (max(map(len, lines)) + 9)), 1)  # letters of 7 pt in a line
        figure.set_figheight(figure.get_figheight() + 0.15 * (len(lines) // columns))
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False)


def _panel(axes: Axes, name: str, groups: Mapping[str, Sequence[Columns]]) -> None:
    ends: list[float] = []
    for i, (label, group) in enumerate(groups.items()):
        look = line_style(i)
        found = curve(group, name)
        if found is None:
            continue
        low, high = ([m + sign * sd for m, sd in zip(found.mean, found.sd, strict=True)] for sign in (-1, 1))
        ends += low
        few = "." if len(found.rounds) < 30 else None
        axes.plot(found.rounds, found.mean, label=label, marker=few, **look)
        if len(group) > 1:
            axes.fill_between(found.rounds, low, high, color=look["color"], alpha=0.2, linewidth=0)
        elif len(found.rounds) < len(group[0][name]):
            axes.plot(*zip(*group[0][name], strict=True), color=look["color"], linewidth=0.4, alpha=0.3, zorder=1)
    axes.grid(alpha=0.3)
    # a band that reaches 0 has no place on a logarithmic axis
    if is_flatness(name) and min(ends) > 0 and max(ends) > SPAN * min(ends):
        axes.set_yscale("log")
        log_ticks(axes)
