"""``fl-lightning compare``."""

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_lightning.results.compare import cell, columns, compare, of_run, write
from fl_lightning.results.summary import LAST

SUMMARY = "Compare finished runs: statistics over seeds as table, CSV and LaTeX, and their curves."


def run(
    runs: list[str],
    /,
    target: float | None = None,
    last: int = LAST,
    metric: str | None = None,
    reference: str | None = None,
    out: str | None = None,
) -> None:
    """Prints a table of finished runs, and writes it as CSV and LaTeX.

    Args:
        runs: Run folders.
        target: A value of the metric to be reached, such as an accuracy of 0.8; null: that of the reference, if any.
        last: Rounds at the end whose evaluations are averaged.
        metric: Name of the metric, larger is better; null: what the data evaluate on the test set.
        reference: One of the runs, such as FedAvg's: its mean of the last rounds is the target, its bits are B.
        out: Folder for compare.csv, compare.tex, curves.png and curves.pdf; null: only the table is printed.
    """
    groups = compare(runs, target, last, metric, reference)
    shown = columns(groups, None if reference is None else of_run(groups, reference))
    table = Table(title=groups[0].runs[0].metric)
    for i, title in enumerate(["run", "seeds", *(column.title for column in shown)]):
        table.add_column(title, justify="right" if i else "left")
    for group in groups:
        table.add_row(escape(group.name), str(len(group.runs)), *(cell(group, c, "{} ± {}", "×") for c in shown))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if out is not None:
        write(groups, shown, Path(out))
        console.print(f"results: {out}", soft_wrap=True, highlight=False)
