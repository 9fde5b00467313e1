"""``fl-lightning report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from fl_lightning.commands.compare import left_out
from fl_lightning.results.compare import Group, compare, of_run
from fl_lightning.results.summary import LAST
from fl_lightning.results.table import Column, columns, write

SUMMARY = "Write a report of runs: one HTML page that opens offline, with its tables and figures beside it."


def run(
    runs: list[str],
    /,
    target: float | None = None,
    last: int = LAST,
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    reference: str | None = None,
    out: str = "report",
) -> None:
    """Writes a page of everything that the folders of runs hold: curves, tables, flatness, partitions, provenance.

    Args:
        runs: Run folders, or folders above them, such as runs/.
        target: A value of the metric to be reached, such as an accuracy of 0.8; null: that of the reference, if any.
        last: Rounds at the end whose evaluations are averaged.
        metric: Name of the metric; null: what the data evaluate on the test set.
        mode: Whether large (max) or small (min) values of the metric are good; null: as its name says.
        reference: One of the runs, such as FedAvg's: its mean of the last rounds is the target, its bits are B.
        out: A folder for report.html, the tables and the figures; or the page's own name, such as mine.html, with the
            folder mine/ beside it for the others.
    """
    from fl_lightning.results.curves import write_curves
    from fl_lightning.results.report import write_report
    from fl_lightning.trainer.measurements import PROTOCOL

    groups = compare(runs, target, last, metric, reference, mode)
    shown = columns(groups, None if reference is None else of_run(groups, reference))
    page = Path(out) if out.endswith(".html") else Path(out) / "report.html"
    folder = page.with_suffix("") if out.endswith(".html") else page.parent
    write(groups, shown, folder)
    write_curves({group.name: group.metrics for group in groups}, folder)
    write_report(groups, shown, page, PROTOCOL)
    _draw(groups, shown, folder)
    console = Console()
    for line in left_out(groups):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)", soft_wrap=True, highlight=False)
    console.print(f"tables and figures: {folder}", soft_wrap=True, highlight=False)


def _draw(groups: Sequence[Group], shown: Sequence[Column], folder: Path) -> None:
    """The figures for print, one column of a paper wide: curves, flatness against the metric, partitions, spectra."""
    import numpy as np

    from fl_lightning.core import save_figure
    from fl_lightning.data.counts import Histogram, heat_map
    from fl_lightning.flatness.plots import plot_density, plot_spectrum
    from fl_lightning.results.clients import plot_clients
    from fl_lightning.results.curves import PANELS, drawn, plot_curves, read
    from fl_lightning.results.report.files import densities, partitions, read_group, spectra
    from fl_lightning.results.tradeoff import plot_tradeoff

    paths = {group.name: group.metrics for group in groups}
    for name in drawn(read(paths)):
        if name in PANELS:
            save_figure(plot_curves(paths, [name]), folder / name.replace("/", "_"))
    for column in shown:
        if column.of.startswith("flatness/"):
            save_figure(plot_tradeoff(groups, column.key), folder / f"tradeoff_{column.key}")
    clients = {group.name: [run.clients for run in read_group(group) if run.clients is not None] for group in groups}
    if of := {name: tables for name, tables in clients.items() if tables}:
        save_figure(plot_clients(of), folder / "clients")
    files = [run for group in groups for run in read_group(group)]
    for i, (found, _) in enumerate(partitions(files)):
        counts = [[row.get(str(c), 0) for c in range(found["classes"])] for row in found["counts"]]
        names = found.get("names", [*map(str, range(found["classes"]))])
        save_figure(heat_map(Histogram(found.get("unit", "class"), names, np.array(counts))), folder / f"partition_{i}")
    if eigenvalues := spectra(files):
        save_figure(plot_spectrum(eigenvalues), folder / "spectrum")
    if density := densities(files):
        save_figure(plot_density(density), folder / "density")
