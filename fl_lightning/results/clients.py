"""Per-client performance: the evaluation of each client, its statistics over clients, and its figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.core import (
    COLORS,
    COLUMN,
    PAGE,
    Figure,
    ensure,
    line_style,
    marked_style,
    new_figure,
    place_legend,
    scale_axis,
)
from fl_lightning.results.curves import panel_grid
from fl_lightning.results.metrics import OWN, Mode, label, mode_of, read_directions, read_numbers

FILE = "client_evaluation.csv"
"""In the run folder: a row for each measured round and client."""
GLOBAL, UNSEEN, ADAPTED, LOCAL = OWN, "server/unseen_clients", "client/adapted", "client/test"
"""Sections of metrics.csv with the performance on the clients' test data of the global model or the clients' own ones,
of the own models of clients that have not trained, as they are and adapted, and of local models."""
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
        columns: A value of each client, ``(n,)``, by name (``acc``, ``loss``, ``local_acc``, ``local_loss``); NaN for
            a client without one.
    """

    round: int
    metric: str
    mode: Mode
    samples: Numbers
    columns: Mapping[str, Numbers]

    def known(self, column: str) -> tuple[Numbers, Numbers]:
        """Returns samples and values of the clients that have a finite value, ``(k,)`` each."""
        values = self.columns[column]
        return self.samples[np.isfinite(values)], values[np.isfinite(values)]


def statistics(values: ArrayLike, samples: ArrayLike, mode: Mode = "max") -> dict[str, float]:
    """Returns statistics of a value over clients, by the ending of their names.

    Args:
        values: Value of each client, ``(n,)``.
        samples: Training samples of each client, ``(n,)``.
        mode: Whether large or small values are good.

    Returns:
        The mean over clients (its ending is empty), ``_weighted`` by their samples, ``_std`` (the standard deviation
        with n), ``_worst_decile`` (the mean of the worst n // 10 clients, of at least one), and ``_worst``.
    """
    numbers = np.asarray(values, dtype=np.float64)
    ordered = worst_first(numbers, mode) if np.isfinite(numbers).all() else np.full(len(numbers), numbers.mean())
    return {
        "": float(numbers.mean()),
        "_weighted": float(np.average(numbers, weights=np.asarray(samples, dtype=np.float64))),
        "_std": float(numbers.std()),
        "_worst_decile": float(ordered[: max(1, len(numbers) // 10)].mean()),
        "_worst": float(ordered[0]),
    }


def worst_first(values: Numbers, mode: Mode) -> Numbers:
    """Returns values ``(n,)`` in order, the worst first."""
    return np.sort(values) if mode == "max" else np.sort(values)[::-1]


def sorted_curve(tables: Sequence[ClientTable], column: str = "") -> Numbers:
    """Returns the clients' values, the worst first, at `SHARES` of the clients, as means over runs, ``(201,)``.

    Args:
        tables: The runs of a group.
        column: The value; by default the metric of the global model.
    """
    ordered = [worst_first(table.known(column or table.metric)[1], table.mode) for table in tables]
    rows = [values[np.minimum((SHARES * len(values)).astype(int), len(values) - 1)] for values in ordered]
    return np.mean(rows, axis=0)  # type: ignore[no-any-return]


def by_samples(tables: Sequence[ClientTable], column: str = "") -> tuple[Numbers, Numbers]:
    """Returns mean samples and mean value of up to `BINS` groups of equally many clients, ordered by samples.

    Args:
        tables: The runs of a group, whose clients are taken together.
        column: As for `sorted_curve`.
    """
    samples, values = together(tables, column)
    parts = np.array_split(np.argsort(samples, kind="stable"), min(BINS, len(samples)))
    return np.array([samples[part].mean() for part in parts]), np.array([values[part].mean() for part in parts])


def together(tables: Iterable[ClientTable], column: str = "") -> tuple[Numbers, Numbers]:
    """Returns samples and values of the clients of all tables, ``(n,)`` each."""
    samples, values = zip(*(table.known(column or table.metric) for table in tables), strict=True)
    return np.concatenate(samples), np.concatenate(values)


def read_clients(folder: Path) -> ClientTable | None:
    """Returns the last evaluation of each client; None if a run folder holds none.

    Raises:
        UserError: If the file is no such table.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    head, rows = read_numbers(path, "clients", "round", "client", "samples")
    names = [name for name in head if name not in ("round", "client", "samples")]
    ensure(bool(rows and names), f"{path}: not a table of clients (without values); restore the file, or remove it")
    last = max(row["round"] for row in rows)
    clients: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["round"] == last:
            clients.setdefault(row["client"], {}).update(row)
    columns = {name: np.array([clients[k].get(name, np.nan) for k in sorted(clients)]) for name in ("samples", *names)}
    mode = mode_of(f"{GLOBAL}/{names[0]}", None, read_directions(folder))
    return ClientTable(int(last), names[0], mode, columns.pop("samples"), columns)


def with_values(tables: Sequence[ClientTable], column: str) -> list[ClientTable]:
    """Returns the tables in which a client has a finite value of a column."""
    return [table for table in tables if column in table.columns and len(table.known(column)[1])]


def plot_clients(groups: Mapping[str, Sequence[ClientTable]], column: str = "") -> Figure:
    """Draws a value by client: sorted, with the worst tenth shaded, and by number of samples.

    The sorted values are means over the seeds of a group. By number of samples, a point is a client, and the line joins
    the means of up to eight groups of clients of similar size; this panel is left out if all are of one size.

    Args:
        groups: The last evaluations of one or more runs with different seeds, by label; a label may have none.
        column: The value; by default the metric of the global model.
    """
    first = next(table for tables in groups.values() for table in tables)
    sizes = len({size for tables in groups.values() for table in tables for size in table.samples.tolist()}) > 1
    with new_figure(PAGE if sizes else COLUMN, 2.5, grid="both") as figure:
        ordered = figure.add_subplot(1, 1 + sizes, 1, xlabel="% of clients, worst first (shaded: worst 10 %)")
        ordered.set_ylabel(f"{label(f'server/test/{first.metric}')} of a client")
        ordered.axvspan(0, 10, color="0.9", zorder=0)
        drawn = [(i, name, tables) for i, (name, tables) in enumerate(groups.items()) if tables]
        for i, name, tables in drawn:
            style = {**line_style(i), "gid": f"run-{i}", "drawstyle": "steps-post"}
            ordered.plot(100 * SHARES, sorted_curve(tables, column), label=name, **style)
        ordered.set_xlim(0, 100)
        if sizes:
            axes = figure.add_subplot(1, 2, 2, xlabel="training samples of a client", sharey=ordered)
            for i, _, tables in drawn:
                samples, values = together(tables, column)
                style = {**line_style(i), "gid": f"run-{i}"}
                cloud = {"linestyle": "none", "marker": ".", "markersize": 4, "alpha": 0.4, "markeredgewidth": 0}
                axes.plot(samples, values, rasterized=len(samples) > 500, **{**style, **cloud})
                axes.plot(*by_samples(tables, column), **{**style, **marked_style(i)})
            scale_axis(axes.xaxis, np.concatenate([together(tables, column)[0] for _, _, tables in drawn]))
        place_legend(figure, always=len(groups) > 1)
    return figure


def plot_by_client(panels: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]], name: str) -> Figure:
    """Draws a number of each client by round, a faint point each, and the mean over the clients of a round as a line.

    Args:
        panels: The rounds and values of each client, by the panel's title.
        name: What the numbers are.
    """
    rows, columns, width = panel_grid(len(panels))
    with new_figure(width, 2.1 * rows + 0.3, grid="both") as figure:
        first = None
        for index, (title, clients) in enumerate(panels.items()):
            axes = first = figure.add_subplot(rows, columns, index + 1, title=title, sharey=first)
            x, y = np.array([point for points in clients.values() for point in points]).T
            rounds = np.unique(x)
            axes.plot(x, y, ".", color=COLORS[4], markersize=3, markeredgewidth=0, alpha=0.5, label="a client")
            axes.plot(rounds, [y[x == round].mean() for round in rounds], color=COLORS[0], label="mean of the clients")
            axes.set(ylabel="" if index % columns else name, xlabel="round" if index + columns >= len(panels) else "")
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        scale_axis(axes.yaxis, [y for clients in panels.values() for points in clients.values() for _, y in points])
        place_legend(figure)
    return figure
