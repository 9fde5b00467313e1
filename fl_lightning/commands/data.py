"""How the samples are divided among the clients: a table, a CSV file and the two figures of the papers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core.errors import UserError
from fl_lightning.data.module import FederatedDataModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

SUMMARY = "Show how the samples are divided among the clients: table, CSV file, figures."
ROWS, COLUMNS = 12, 12
"""Clients and classes that the table on the terminal has at most; the CSV file has all."""

DISCS = 100
"""Clients and classes that the bubble figure has at most."""


def class_counts(data: FederatedDataModule) -> NDArray[np.int64]:
    """Samples of each client and class, ``(num_clients, num_classes)``, of a data module that is set up.

    A sample that a client holds twice counts twice.
    """
    y = data.y_train.cpu()
    return np.stack([y[part].bincount(minlength=data.num_classes).numpy() for part in data.clients])


def run(data: FederatedDataModule, out: str | None = None) -> None:
    """Print the division; with ``out`` also write the whole table and the figures.

    Args:
        data: The data; set up if they are not.
        out: Folder for ``clients.csv``, ``heatmap.png``, ``heatmap.pdf``, ``bubbles.png`` and ``bubbles.pdf``.

    Raises:
        UserError: If the data are faulty or cannot be divided, or the folder cannot be made.
    """
    data.prepare_data()
    data.setup()
    counts = class_counts(data)
    _print(data, counts)
    if out is not None:
        from fl_lightning.core.figures import save_figure

        folder = Path(out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out = {out}: no folder can be made there ({error.strerror}); give another one") from None
        write_csv(counts, folder / "clients.csv")
        for name, figure in (("heatmap", heat_map(counts)), ("bubbles", bubbles(counts))):
            save_figure(figure, folder / name)
        print(f"written to {folder}: clients.csv; heatmap and bubbles as .png and .pdf")


def write_csv(counts: NDArray[np.int64], path: Path) -> None:
    """A row for each client: its number, its samples, and those of each class.

    Args:
        counts: By :func:`class_counts`.
        path: The file.
    """
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["client", "samples", *range(counts.shape[1])])
        writer.writerows([k, row.sum(), *row] for k, row in enumerate(counts))


def heat_map(counts: NDArray[np.int64]) -> Figure:
    """Samples of each client (across) and class (up) as shades, white where there are none.

    The shades only get darker, so they can be read in grey and by the colour-blind.

    Args:
        counts: By :func:`class_counts`.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    clients, classes = counts.shape
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # a single sample is told from none
    figure, axes = _axes(min(max(0.11 * clients, 2.5), 12.0), min(max(0.22 * classes, 1.5), 8.0))
    cells = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(cells, cmap=shades, aspect="auto", origin="lower", interpolation="nearest", vmin=0)
    figure.colorbar(image, label="samples", pad=0.02)
    return figure


def bubbles(counts: NDArray[np.int64]) -> Figure:
    """Samples of each client (across) and class (up) as the areas of discs, of the first `DISCS` clients and classes.

    Args:
        counts: By :func:`class_counts`.
    """
    from matplotlib.collections import EllipseCollection

    part = counts[:DISCS, :DISCS]
    clients, classes = part.shape
    cell = min(max(14 / max(part.shape), 0.12), 0.3)
    figure, axes = _axes(cell * (clients + 6), cell * classes)
    for name, shown, of in (("client", clients, counts.shape[0]), ("class", classes, counts.shape[1])):
        if shown < of:
            axes.set(**{"xlabel" if name == "client" else "ylabel": f"{name} (the first {shown} of {of:,})"})
    key = sorted({max(1, round(part.max() / n)) for n in (1, 4, 16)}, reverse=True)
    k, c = np.nonzero(part)
    places = [*zip(k, c, strict=True), *((clients + 1, classes - 1 - 1.5 * i) for i in range(len(key)))]
    width = np.sqrt(np.array([*part[k, c], *key]) / part.max()) * 0.98  # the largest one just fits into its cell
    discs = EllipseCollection(
        width, width, 0, units="xy", offsets=places, offset_transform=axes.transData, color="#1f3b66", clip_on=False
    )
    axes.add_collection(discs)
    for i, n in enumerate(key):
        axes.text(clients + 2, classes - 1 - 1.5 * i, f"{n:,}", va="center", fontsize="small")
    axes.set(aspect="equal", anchor="W", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with axes of about this size, in inches."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(width + 1.4, height + 0.8), layout="constrained")
    axes = figure.add_subplot(xlabel="client", ylabel="class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure, axes


def _print(data: FederatedDataModule, counts: NDArray[np.int64]) -> None:
    from rich.console import Console
    from rich.table import Table

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
    table = Table("", "least", "mean", "most")
    for name, (values, form) in stats.items():
        row = (values.min(), values.mean(), values.max())
        table.add_row(name, *(f"{v:{form}}".removesuffix(".0") for v in row))
    _print_right(console, table)

    shown = min(classes, COLUMNS)
    rest = classes - shown
    table = Table("client", "samples", *map(str, range(shown)), *([f"{rest:,} more"] if rest else []))
    numbers = np.column_stack([sizes, counts[:, :shown], *([counts[:, shown:].sum(1)] if rest else [])])
    some = range(clients if clients <= ROWS else ROWS - 2)
    for k in some:
        table.add_row(str(k), *_cells(numbers[k]))
    if len(some) < clients:
        table.add_row("…")
        table.add_row(str(clients - 1), *_cells(numbers[-1]))
    table.add_section()
    table.add_row("all", *_cells(numbers.sum(0)))
    _print_right(console, table)


def _cells(row: NDArray[np.int64]) -> list[str]:
    return [f"{n:,}" if n else "" for n in row]


def _print_right(console: Console, table: Table) -> None:
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
