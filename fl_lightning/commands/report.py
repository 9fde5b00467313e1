"""``fl-lightning report``."""

from pathlib import Path
from typing import Literal

from rich.console import Console

from fl_lightning.commands.compare import left_out
from fl_lightning.results.compare import compare, of_run
from fl_lightning.results.summary import LAST
from fl_lightning.results.table import columns, write

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
    write_report(groups, shown, page, PROTOCOL, f"{sum(len(group.runs) for group in groups)} runs")
    console = Console()
    for line in left_out(groups):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)", soft_wrap=True, highlight=False)
    console.print(f"tables and figures: {folder}", soft_wrap=True, highlight=False)
