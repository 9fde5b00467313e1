"""How the samples are divided among the clients: counts and their heat map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import COLUMN, PAGE, style
from fl_lightning.data.module import FederatedDataModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED = 20
"""Up to this number of classes every one has a tick."""


def class_counts(data: FederatedDataModule) -> NDArray[np.int64]:
    """Number of samples by client and class, ``(num_clients, num_classes)``, of a data module after setup.

    A sample that a client holds twice counts twice. Samples without a class count as of one class.
    """
    y, classes = data.strata.cpu().numpy(), data.num_classes if data.task.by_class else 1
    client = np.repeat(np.arange(data.num_clients), data.clients.sizes.numpy())
    cells = client * classes + y[data.clients.indices.numpy()]
    return np.bincount(cells, minlength=data.num_clients * classes).reshape(-1, classes)


def count_table(counts: NDArray[np.int64]) -> tuple[list[str], list[list[int]]]:
    """The counts as head and rows of a table: client, number of samples, and samples of each class, if of several.

    Args:
        counts: By :func:`class_counts`.
    """
    by_class = counts if counts.shape[1] > 1 else counts[:, :0]
    head = ["client", "samples", *map(str, range(by_class.shape[1]))]
    return head, [[k, *row] for k, row in enumerate(np.column_stack([counts.sum(1), by_class]).tolist())]


def heat_map(counts: NDArray[np.int64]) -> Figure:
    """Draws the samples of each client (x) and class (y) as shades, white where there are none.

    The shades only get darker, so they can be read in grey and by the colour-blind. The figure is as wide as a column
    of a paper, with more than 60 clients as the page.

    Args:
        counts: By :func:`class_counts`.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts.shape
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # a single sample differs from none
    width = COLUMN if clients <= 60 else PAGE
    height = float(np.clip(0.13 * classes, 1.0, 3.5)) + 0.6
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes: Any = figure.add_subplot(xlabel="client", ylabel="class")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if classes <= LABELLED:
            axes.set_yticks(range(classes))
        image = axes.imshow(
            np.ma.masked_equal(counts.T, 0), cmap=shades, aspect="auto", origin="lower", interpolation="nearest", vmin=0
        )
        figure.colorbar(image, label="samples", pad=0.02)
    return figure
