"""The partition of the samples among the clients: a table, a CSV file and a heat map."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import UserError, save_figure
from fl_lightning.data.module import FederatedDataModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

SUMMARY = "Show how the samples are divided among the clients: table, CSV file, heat map."
ROWS, COLUMNS = 12, 12
"""Maximum number of clients and classes in the printed table; the CSV file has all."""


def class_counts(data: FederatedDataModule) -> NDArray[np.int64]:
    """Number of samples by client and class, ``(num_clients, num_classes)``, of a data module after setup.

    A sample that a client holds twice counts twice.
    """
    y = data.y_train.cpu()
    return np.stack([y[part].bincount(minlength=data.num_classes).numpy() for part in data.clients])


def run(data: FederatedDataModule, out: str | None = None) -> None:
    """Prints the partition; with ``out`` also writes the whole table and the heat map.

    Args:
        data: The data; they are set up if necessary.
        out: Folder for ``clients.csv``, ``heatmap.png`` and ``heatmap.pdf``.

    Raises:
        UserError: If the data are faulty or cannot be divided, or the folder cannot be created.
    """
    data.prepare_data()
    data.setup()
    counts = class_counts(data)
    _print(data, counts)
    if out is not None:
        folder = Path(out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out = {out}: cannot create this folder ({error.strerror}); choose another one") from None
        write_csv(counts, folder / "clients.csv")
        save_figure(heat_map(counts), folder / "heatmap")
        print(f"written to {folder}: clients.csv, heatmap.png, heatmap.pdf")


def write_csv(counts: NDArray[np.int64], path: Path) -> None:
    """Writes a row for each client: its number, its samples, and those of each class.

    Args:
        counts: By :func:`class_counts`.
        path: The file.
    """
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["client", "samples", *range(counts.shape[1])])
        writer.writerows([k, row.sum(), *row] for k, row in enumerate(counts))


def heat_map(counts: NDArray[np.int64]) -> Figure:
    """Draws the samples of each client (x) and class (y) as shades, white where there are none.

    The shades only get darker, so they can be read in grey and by the colour-blind.

    Args:
        counts: By :func:`class_counts`.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts.shape
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # a single sample differs from none
    size = np.clip([0.11 * clients, 0.22 * classes], [2.5, 1.5], [12.0, 8.0]) + [1.4, 0.8]
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(xlabel="client", ylabel="class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if classes <= 20:
        axes.set_yticks(range(classes))
    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0), cmap=shades, aspect="auto", origin="lower", interpolation="nearest", vmin=0
    )
    figure.colorbar(image, label="samples", pad=0.02)
    return figure


def _print(data: FederatedDataModule, counts: NDArray[np.int64]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160
    clients, classes = counts.shape
    sizes, totals = counts.sum(1), counts.sum(0)
    distinct = len(np.unique(data.clients.indices))
    held_out = len(data.val_indices)
    without = len(data.y_train) - held_out - distinct
    for line in (
        f"{type(data).__name__}, {type(data.partition).__name__}, data.seed {data.seed}: {clients:,} clients, "
        f"{classes:,} classes, {sizes.sum():,} samples",
        *([f"with replacement: {distinct:,} of them are different"] if data.partition.replacement else []),
        *([f"with no client: {without:,} training samples"] if without else []),
        *([f"held out for validation: {held_out:,} samples"] if held_out else []),
    ):
        console.print(line, highlight=False, soft_wrap=True)

    stats: dict[str, tuple[NDArray[np.generic], str]] = {
        "samples of a client": (sizes, ",.1f"),
        "classes of a client": ((counts > 0).sum(1), ",.1f"),
        "share of its largest class": (counts.max(1) / sizes, ".3f"),
    }
    if data.partition.replacement:
        different = np.array([len(np.unique(part)) for part in data.clients])
        stats["share of different samples"] = (different / sizes, ".3f")
    stats["samples of a class"] = (totals, ",.1f")
    table = _table("", "min", "mean", "max")
    for name, (values, form) in stats.items():
        row = (values.min(), values.mean(), values.max())
        table.add_row(name, *(f"{v:{form}}".removesuffix(".0") for v in row))
    console.print(table)

    shown = min(classes, COLUMNS)
    rest = classes - shown
    table = _table("client", "samples", *map(str, range(shown)), *([f"{rest:,} more"] if rest else []))
    numbers = np.column_stack([sizes, counts[:, :shown], *([counts[:, shown:].sum(1)] if rest else [])])
    some = range(clients if clients <= ROWS else ROWS - 2)
    for k in some:
        table.add_row(str(k), *_cells(numbers[k]))
    if len(some) < clients:
        table.add_row("…")
        table.add_row(str(clients - 1), *_cells(numbers[-1]))
    table.add_section()
    table.add_row("all", *_cells(numbers.sum(0)))
    console.print(table)


def _cells(row: NDArray[np.int64]) -> list[str]:
    return [f"{n:,}" if n else "" for n in row]


def _table(first: str, *others: str) -> Table:
    from rich.table import Column, Table

    return Table(first, *(Column(name, justify="right") for name in others))
