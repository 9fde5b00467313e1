"""Counts of each client's samples by class, as a table and as a heat map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import COLORS, COLUMN, PAGE, Axes, Figure, new_figure, wrapped

if TYPE_CHECKING:  # a report draws heat maps without torch
    from fl_lightning.data.module import FederatedDataModule

LABELLED = 20
"""Largest number of groups at which each has a tick."""


@dataclass(frozen=True)
class Histogram:
    """Samples by client and group of targets.

    Attributes:
        unit: Kind of the groups, such as "class".
        names: Names of the groups.
        counts: Numbers of samples, ``(num_clients, groups)``.
    """

    unit: str
    names: list[str]
    counts: NDArray[np.int64]


def histogram(data: FederatedDataModule, most: int | None = None) -> Histogram:
    """Counts the samples of each client by class, by tenths of a number, or by label.

    A sample that a client holds twice counts twice.

    Args:
        data: The data module after setup.
        most: Largest number of clients; the first ones count.
    """
    unit, names, groups = data.task.groups(data.y_train.cpu(), data.num_classes)
    sizes = data.clients.sizes.numpy()[:most]
    held = groups.numpy()[data.clients.indices.numpy()[: sizes.sum()]]
    cells = np.repeat(np.arange(len(sizes)), sizes)[:, None] * len(names) + held
    counts = np.bincount(cells[held >= 0], minlength=len(sizes) * len(names))
    return Histogram(unit, names, counts.reshape(-1, len(names)))


def class_counts(data: FederatedDataModule) -> NDArray[np.int64]:
    """Counts samples by client and class, ``(num_clients, num_classes)``, in a data module after setup.

    A sample that a client holds twice counts twice. Samples without classes count as a single class.
    """
    return histogram(data).counts if data.task.by_class else data.clients.sizes.numpy()[:, None]


def count_table(counts: NDArray[np.int64]) -> tuple[list[str], list[list[int]]]:
    """Returns head and rows of a table: client, its samples, and its samples of each class if there are several.

    Args:
        counts: By :func:`class_counts`.
    """
    by_class = counts if counts.shape[1] > 1 else counts[:, :0]
    head = ["client", "samples", *map(str, range(by_class.shape[1]))]
    return head, [[k, *row] for k, row in enumerate(np.column_stack([counts.sum(1), by_class]).tolist())]


def heat_map(panel: Histogram) -> Figure:
    """Draws the samples of each client (x) and class, or other group, (y) as shades, white where there are none.

    The shades only get darker, so they can be read in grey and by the colour-blind. The figure is as wide as a column
    of a paper, with more than 60 clients as the page.

    Args:
        panel: By :func:`histogram`.
    """
    with new_figure(COLUMN if len(panel.counts) <= 60 else PAGE, _height(panel)) as figure:
        figure.colorbar(_shade(figure.add_subplot(), panel), label="samples", pad=0.02)
    return figure


def heat_maps(panels: Mapping[str, Histogram]) -> Figure:
    """Draws partitions below each other: `heat_map`, and the samples that all clients have of each class as bars.

    A title adds the mean number of classes of a client, and the standard deviation of the bars.

    Args:
        panels: The partitions by title.
    """
    with new_figure(PAGE, sum(0.2 + _height(panel) for panel in panels.values())) as figure:
        grid = figure.add_gridspec(len(panels), 2, width_ratios=(3, 1), height_ratios=[*map(_height, panels.values())])
        for row, (title, panel) in enumerate(panels.items()):
            totals, classes = panel.counts.sum(0), (panel.counts > 0).sum(1).mean()
            axes = figure.add_subplot(grid[row, 0])
            spread = f"{classes:.3g} classes a client, class sizes deviate by {totals.std():.5g}"
            axes.set_title(wrapped(f"{title}: {spread}", 4.5))
            figure.colorbar(_shade(axes, panel), label="samples", pad=0.02)
            bars = figure.add_subplot(grid[row, 1], sharey=axes, xlabel="samples of all clients")
            bars.barh(range(len(totals)), totals, color=COLORS[0])
            bars.tick_params(labelleft=False)
    return figure


def _height(panel: Histogram) -> float:
    return float(np.clip(0.13 * panel.counts.shape[1], 1.0, 3.5)) + 0.6


def _shade(axes: Axes, panel: Histogram) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    shades = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # a single sample differs from none
    axes.set(xlabel="client", ylabel=panel.unit)
    axes.locator_params(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    if len(panel.names) <= LABELLED:
        axes.set_yticks(range(len(panel.names)), panel.names)
    counts = np.ma.masked_equal(panel.counts.T, 0)
    return axes.imshow(counts, cmap=shades, aspect="auto", origin="lower", interpolation="nearest", vmin=0)
