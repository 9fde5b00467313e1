"""``fl-lightning report``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_lightning.commands.compare import say_left_out
from fl_lightning.core import Figure, check_folder, drawing, ensure, figure_files, make_folder, write_together
from fl_lightning.data.histogram import Histogram, heat_map
from fl_lightning.flatness.plots import plot_density, plot_spectrum
from fl_lightning.results import (
    PROTOCOL,
    Runs,
    compare,
    config_files,
    curves,
    densities,
    is_private,
    metrics,
    partitions,
    plot_clients,
    read_config,
    read_group,
    report_page,
    say,
    spectra,
    table,
    title,
    tried,
    with_values,
)


def run(
    runs: list[str],
    /,
    target: float | None = None,
    last: int | None = None,
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    reference: str | None = None,
    figures: bool = False,
    out: str = "report",
) -> None:
    """Writes a page of everything that the folders of runs hold: curves, tables, flatness, partitions, provenance.

    Args:
        runs: Run folders, or folders above them, such as runs/.
        target: A value of the metric to be reached, such as an accuracy of 0.8; null: that of the reference, if any.
        last: Rounds at the end whose evaluations and measurements are averaged; null: those of each run's headline.
        metric: Name of the metric; null: what the data evaluate on the test set.
        mode: Whether large (max) or small (min) values of the metric are good; null: as its name says.
        reference: A run or its name, such as FedAvg: its mean of the last rounds is the target, its bits are B, and
            differences are taken from it; null: from the first row.
        figures: Whether each figure of the page is also a file, as PDF and PNG, which takes several times as long.
        out: A folder for report.html, the tables and the curves; or the page's own name, such as mine.html, with the
            folder mine/ beside it for the others.
    """
    page = Path(out) if out.endswith(".html") else Path(out) / "report.html"
    folder = page.with_suffix("") if out.endswith(".html") else page.parent
    check_folder(folder)
    groups = compare.compare(runs, target, last, metric, reference, mode)
    for run_folder in (run_folder for group in groups for run_folder in group.folders):
        ensure(
            not any(is_private(read_config(path)) for path in config_files(run_folder).values()),
            f"runs = {run_folder}: a run under trainer.privacy, whose losses and clients are not private; leave it "
            "out: fl-lightning compare shows it here",
        )
    columns = table.columns(groups, None if reference is None else compare.of_run(groups, reference))
    files = [(group, read_group(group)) for group in groups]
    settings = tried(groups)
    sweep = settings if len(settings.settings) > 2 and settings.tells else None
    with drawing():
        drawings = draw(files, columns)
        drawings["sweep"] = [("Metric of each config by setting", "settings", sweep.plot())] if sweep else []
        text = report_page(
            files,
            columns,
            PROTOCOL,
            {section: {title: figure for title, _, figure in drawn} for section, drawn in drawings.items()},
            sweep.importances if sweep else None,
        )
        beside = {
            **table.table_files(groups, columns),
            **curves.curve_files({group.name: group.metrics for group in groups}),
            **(sweep.files() if sweep else {}),
        }
        for _, name, figure in (entry for drawn in drawings.values() for entry in drawn if figures):
            beside |= figure_files(figure, name)
    make_folder(folder)
    write_together({page: text, **{folder / name: content for name, content in beside.items()}})
    say_left_out(groups)
    say(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    say(f"tables and curves: {folder}" + ("" if figures else "; --figures writes each figure as PDF and PNG"))


def draw(runs: Runs, columns: Sequence[table.Column]) -> dict[str, list[tuple[str, str, Figure]]]:
    """Draws the figures of a report, one column of a paper wide.

    Args:
        runs: The groups of runs, with the files of each run.
        columns: The columns of the table.

    Returns:
        The title, the name of the file and the figure of each, by section of the page.
    """
    groups, files = [group for group, _ in runs], [run for _, members in runs for run in members]
    measured = curves.read({group.name: group.metrics for group in groups})
    clients = {group.name: [run.clients for run in members if run.clients is not None] for group, members in runs}
    metric = next((evaluated.metric for tables in clients.values() for evaluated in tables), "")
    eigenvalues, density = spectra(files), densities(files)
    return {
        "curves": [
            (
                f"{title(name)}{suffix}",
                f"{name.replace('/', '_')}{suffix.replace(' ', '_')}",
                curves.draw_curves(measured, [name], bool(suffix)),
            )
            for name in curves.drawn(measured)
            for suffix in (("", " by device hours") if curves.all_timed(measured) and name in metrics.MAIN else ("",))
        ],
        "per-client": [
            (text, name, plot_clients(by_group, column))
            for text, name, column in (
                ("Global model", "clients", metric),
                ("Local models", "clients_local", f"local_{metric}"),
            )
            if any((by_group := {group: with_values(tables, column) for group, tables in clients.items()}).values())
        ],
        "tradeoff": [
            (column.title, f"tradeoff_{column.key}", curves.plot_tradeoff(groups, column.key))
            for column in columns
            if column.statistic.startswith("flatness/") and column.against is None
        ],
        "spectra": [
            *([("Eigenvalues of the curvature", "spectrum", plot_spectrum(eigenvalues))] if eigenvalues else []),
            *([("Density of the eigenvalues", "density", plot_density(density))] if density else []),
        ],
        "partitions": [
            (_clients_of(partition, labels), f"partition_{i}", _partition(partition))
            for i, (partition, labels) in enumerate(partitions(files))
        ],
    }


def _partition(partition: Mapping[str, Any]) -> Figure:
    counts = np.array([[row.get(str(c), 0) for c in range(partition["classes"])] for row in partition["counts"]])
    return heat_map(
        Histogram(partition.get("unit", "class"), partition.get("names", [*map(str, range(counts.shape[1]))]), counts)
    )


def _clients_of(partition: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Returns the title of a partition: the clients that it shows, and the runs that have it."""
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f"{len(partition['counts']):,} of {partition['clients']:,} clients: {'; '.join(labels[:3])}{more}"
