"""``fl-lightning data``: the partition of the samples among the clients, as table, CSV file and heat map."""

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import check_folder, make_folder, save_figure
from fl_lightning.data.histogram import class_counts, count_table, heat_map, histogram
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.results import filled, say, show_table, write_table

ROWS, COLUMNS = 12, 12
"""Maximum number of clients and classes in the printed table; the CSV file has all."""


def run(data: FederatedDataModule, out: str | None = None) -> None:
    """Prints the partition; with ``out`` it also writes the whole table and the heat map.

    Args:
        data: The data; they are set up if necessary.
        out: Folder for ``clients.csv``, ``heatmap.png`` and ``heatmap.pdf``.

    Raises:
        UserError: If the data are faulty or cannot be divided, or the folder cannot be created.
    """
    if out is not None:
        check_folder(out)
    data.prepare_data()
    data.setup()
    counts = class_counts(data)
    _print(data, counts)
    if out is not None:
        folder = make_folder(out)
        write_table(folder / "clients.csv", *count_table(counts))
        save_figure(heat_map(histogram(data)), folder / "heatmap")
        say(f"written to {folder}: clients.csv, heatmap.png, heatmap.pdf")


def _print(data: FederatedDataModule, counts: NDArray[np.int64]) -> None:
    by_class, clients = data.task.by_class, len(counts)
    classes = counts.shape[1] if by_class else 0
    sizes, held_out = counts.sum(1), len(data.val_indices)
    different = np.array([len(np.unique(part)) for part in data.clients])
    distinct = len(np.unique(data.clients.indices))
    for n, line in (
        (1, f"{type(data).__name__}, {type(data.partition).__name__}, data.seed {data.seed}: {clients:,} clients, "
         f"{f'{classes:,} classes, ' * by_class}{sizes.sum():,} samples"),
        (data.partition.replacement, f"with replacement: {distinct:,} of them are different"),
        (without := len(data.y_train) - held_out - distinct, f"with no client: {without:,} training samples"),
        (held_out, f"held out for validation: {held_out:,} samples"),
    ):  # fmt: skip
        if n:
            say(line)

    statistics = (
        (False, "samples of a client", sizes, ",.1f"),
        (True, "classes of a client", (counts > 0).sum(1), ",.1f"),
        (True, "share of its largest class", counts.max(1) / sizes, ".3f"),
        (False, "share of different samples", different / sizes, ".3f"),
        (True, "samples of a class", counts.sum(0), ",.1f"),
    )
    lines = [
        [name, *(f"{v:{form}}".removesuffix(".0") for v in (values.min(), values.mean(), values.max()))]
        for of_classes, name, values, form in statistics
        if by_class or not of_classes
    ]
    show_table(filled(["", "min", "mean", "max"], lines, left=4))

    more = [f"{classes - COLUMNS:,} more"] if classes > COLUMNS else []
    heads = ["client", "samples", *map(str, range(min(classes, COLUMNS))), *more]
    numbers = np.column_stack(
        [sizes, counts[:, : min(classes, COLUMNS)], *([counts[:, COLUMNS:].sum(1)] if more else [])]
    )
    rows = [(str(k), *row) for k, row in enumerate(numbers)]
    if clients > ROWS:
        rows[ROWS - 2 : -1] = [("…",)]
    cells = [[name, *(f"{n:,}" if n else "" for n in row)] for name, *row in (*rows, ("all", *numbers.sum(0)))]
    show_table(filled(heads, cells, left=len(heads)))
