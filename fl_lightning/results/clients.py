"""Who is served: the evaluation of each client, its statistics over clients, and its figure."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.core import COLORS, COLUMN, MARKERS, PAGE, SPAN, UserError, line_style, log_levels, style
from fl_lightning.results.curves import LABELS, place_legend
from fl_lightning.results.metrics import Mode, mode_of, read_directions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "client_evaluation.csv"
"""In the run folder: a row for each measured round and client."""
GLOBAL, LOCAL = "server/clients", "client/test"
"""Where metrics of the global model on the clients' test data are logged, and where those of the local models."""
SHARES = np.linspace(0, 1, 201)
"""Shares of the clients at which sorted values are averaged over seeds."""
BINS = 8
"""Groups of clients of similar size."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ClientTable:
    """The last evaluation of each client in a run.

    Attributes:
        round: Rounds done.
        metric: Name of the data's metric, such as acc.
        mode: Whether large or small values of the metric are good.
        samples: Training samples of each client, ``(n,)``.
        columns: By name (``acc``, ``loss``, ``local_acc``, ``local_loss``) a value of each client, ``(n,)``; NaN where
            there is none.
    """

    round: int
    metric: str
    mode: Mode
    samples: Numbers
    columns: Mapping[str, Numbers]

    def known(self, column: str) -> tuple[Numbers, Numbers]:
        """Samples and values of the clients that have a value, ``(k,)`` each."""
        values = self.columns[column]
        return self.samples[np.isfinite(values)], values[np.isfinite(values)]


def statistics(values: ArrayLike, samples: ArrayLike, mode: Mode = "max") -> dict[str, float]:
    """Statistics of a value over clients, by the ending of its name.

    Args:
        values: Value of each client, ``(n,)``.
        samples: Training samples of each client, ``(n,)``.
        mode: Whether large or small values are good.

    Returns:
        The mean over clients (its ending is empty), ``_weighted`` by their samples, ``_std`` (the standard deviation
        with n), ``_worst_decile`` (the mean of the worst n // 10 clients, of at least one), and ``_worst``.
    """
    found = np.asarray(values, dtype=np.float64)
    ordered = worst_first(found, mode)
    return {
        "": float(found.mean()),
        "_weighted": float(np.average(found, weights=np.asarray(samples, dtype=np.float64))),
        "_std": float(found.std()),
        "_worst_decile": float(ordered[: max(1, len(found) // 10)].mean()),
        "_worst": float(ordered[0]),
    }


def worst_first(values: Numbers, mode: Mode) -> Numbers:
    """Values ``(n,)`` in order, the worst first."""
    return np.sort(values) if mode == "max" else np.sort(values)[::-1]


def sorted_curve(tables: Sequence[ClientTable], column: str = "") -> Numbers:
    """The values of a run's clients, the worst first, at `SHARES` of the clients; the mean over runs, ``(201,)``.

    Args:
        tables: The runs of a group.
        column: The value; by default the metric of the global model.
    """
    rows = []
    for table in tables:
        ordered = worst_first(table.known(column or table.metric)[1], table.mode)
        rows.append(ordered[np.minimum((SHARES * len(ordered)).astype(int), len(ordered) - 1)])
    return np.mean(rows, axis=0)  # type: ignore[no-any-return]


def by_samples(tables: Sequence[ClientTable], column: str = "") -> tuple[Numbers, Numbers]:
    """Mean samples and mean value of up to `BINS` groups of clients, of equal numbers and ordered by samples.

    Args:
        tables: The runs of a group, whose clients are taken together.
        column: As for `sorted_curve`.
    """
    samples, values = together(tables, column)
    parts = np.array_split(np.argsort(samples, kind="stable"), min(BINS, len(samples)))
    return np.array([samples[part].mean() for part in parts]), np.array([values[part].mean() for part in parts])


def together(tables: Iterable[ClientTable], column: str = "") -> tuple[Numbers, Numbers]:
    """Samples and values of the clients of all tables, ``(n,)`` each."""
    samples, values = zip(*(table.known(column or table.metric) for table in tables), strict=True)
    return np.concatenate(samples), np.concatenate(values)


def read_clients(folder: Path) -> ClientTable | None:
    """Reads the last evaluation of each client; None if a run folder holds none.

    Raises:
        UserError: If the file is no such table.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            head, *rows = list(reader)
        first, names = head[:3], head[3:]
        if first != ["round", "client", "samples"] or not names:
            raise ValueError("the columns do not begin with round, client, samples")
        rows = [row for row in rows if len(row) == len(head)]  # a crash may have cut the last one short
        last = max(int(row[0]) for row in rows)
        clients: dict[int, dict[str, float]] = {}
        for row in rows:
            if int(row[0]) == last:
                cells = zip(names, row[3:], strict=True)
                known = {name: float(cell) for name, cell in cells if cell}
                clients.setdefault(int(row[1]), {}).update(known, samples=float(row[2]))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a table of clients ({error}); restore the file, or remove it") from None
    columns = {name: np.array([clients[k].get(name, np.nan) for k in sorted(clients)]) for name in ("samples", *names)}
    mode = mode_of(f"{GLOBAL}/{names[0]}", None, read_directions(folder))
    return ClientTable(last, names[0], mode, columns.pop("samples"), columns)


def plot_clients(groups: Mapping[str, Sequence[ClientTable]]) -> Figure:
    """Draws the metric of the global model by client: sorted, with the worst tenth shaded, and by number of samples.

    The sorted values are means over the seeds of a group. By number of samples, a point is a client, and the line joins
    the means of up to eight groups of clients of similar size; this panel is left out if all are of one size.

    Args:
        groups: The last evaluations of one or more runs with different seeds, by label.
    """
    from matplotlib.figure import Figure

    first = next(iter(groups.values()))[0]
    sizes = len({size for tables in groups.values() for table in tables for size in table.samples.tolist()}) > 1
    with style():
        figure = Figure(figsize=(PAGE if sizes else COLUMN, 2.5), layout="constrained")
        label = LABELS.get(f"server/test/{first.metric}", first.metric)
        ordered = figure.add_subplot(1, 1 + sizes, 1, xlabel="% of clients, worst first (shaded: worst 10 %)")
        ordered.set_ylabel(f"{label} of a client")
        ordered.axvspan(0, 10, color="0.9", zorder=0)
        for i, (name, tables) in enumerate(groups.items()):
            ordered.plot(100 * SHARES, sorted_curve(tables), label=name, drawstyle="steps-post", **line_style(i))
        ordered.set_xlim(0, 100)
        if sizes:
            _draw_sizes(figure.add_subplot(1, 2, 2, xlabel="training samples of a client", sharey=ordered), groups)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
        place_legend(figure)
    return figure


def _draw_sizes(axes: Axes, groups: Mapping[str, Sequence[ClientTable]]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    smallest, largest = np.inf, 0.0
    for i, tables in enumerate(groups.values()):
        samples, values = together(tables)
        axes.plot(samples, values, ".", color=COLORS[i % len(COLORS)], markersize=4, alpha=0.4, markeredgewidth=0)
        axes.plot(*by_samples(tables), marker=MARKERS[i % len(MARKERS)], **line_style(i))
        smallest, largest = min(smallest, samples.min()), max(largest, samples.max())
    if largest > SPAN * smallest:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(log_levels(*axes.get_xlim())))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
