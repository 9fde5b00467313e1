"""``fl-lightning compare``."""

from collections.abc import Sequence
from typing import Literal

from rich.markup import escape

from fl_lightning.core import check_folder, figure_files, make_folder, require, write_together
from fl_lightning.results import compare, curve_files, filled, say, short_path, show_table, table, varied

BEST = table.Markup(best="[bold]{}[/]")


def run(
    runs: list[str],
    /,
    target: float | None = None,
    last: int | None = None,
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    reference: str | None = None,
    pivot: str | None = None,
    importance: bool = False,
    columns: str | None = None,
    names: str | None = None,
    out: str | None = None,
) -> None:
    """Prints a table of finished runs, and writes it as CSV and LaTeX.

    Args:
        runs: Run folders, or folders above them, such as runs/.
        target: A value of the metric to be reached, such as an accuracy of 0.8; null: that of the reference, if any.
        last: Rounds at the end whose evaluations and measurements are averaged; null: those of each run's headline.
        metric: Name of the metric; null: what the data evaluate on the test set.
        mode: Whether large (max) or small (min) values of the metric are good; null: as its name says.
        reference: A run or its name, such as FedAvg: its mean of the last rounds is the target, its bits are B, and
            differences are taken from it; null: from the first row.
        pivot: Two settings that vary, such as rho,alpha: the metric by both is printed in place of the table.
        importance: Whether the settings that vary are ranked by how much they matter, in place of the table.
        columns: Columns to show, as compare.csv names them, such as mean,lambda_max; null: all.
        names: Names of the rows in their order, for table and figures, such as Ours,FedSAM; the numbers that were set
            differently stand beside them; null: the settings that differ.
        out: Folder for compare.csv, compare.tex, and curves as PDF, PNG and CSV, and the pivot with its
            heat map, importances with the metric by each setting; null: only the table is printed.
    """
    if out is not None:
        check_folder(out)
    groups = compare.compare(runs, target, last, metric, reference, mode, None if names is None else names.split(","))
    shown = table.columns(groups, None if reference is None else compare.of_run(groups, reference))
    if columns is not None:
        known = {column.key: column for column in shown}
        for name in (wanted := columns.split(",")):
            require(name in known, "columns", name, f"choose from {', '.join(known)}")
        shown = [known[name] for name in wanted]
    keys = [*map(escape, table.names(groups))]
    labels = [[*map(escape, table.label(group))] for group in groups]
    pivoted = None if pivot is None else varied.pivot(groups, pivot)
    settings = varied.tried(groups) if importance else None
    rounds = ", ".join(f"{n:,}" for n in sorted({run.rounds for group in groups for run in group.runs}))
    for name, title in {**table.TABLES, "results": f"{groups[0].runs[0].metric} of {rounds} rounds"}.items():
        chosen = [column for column in shown if column.table == name]
        if chosen and pivoted is None and settings is None:
            heads = [*keys, "seeds", *(column.head for column in chosen)]
            lines = [
                [*label, str(len(group.runs)), *(table.cell(group, column, groups, BEST) for column in chosen)]
                for group, label in zip(groups, labels, strict=True)
            ]
            show_table(filled(heads, lines, len(keys), title=title), len(keys))
    if pivoted is not None:
        rows = [[escape(row), *means] for row, *means in pivoted.text(BEST)]
        show_table(filled([*map(escape, pivoted.heads)], rows, title=pivoted.title))
        say(pivoted.best)
    if settings is not None:
        ranked, about = settings.importances
        texts = [map(escape, entry.text()) for entry in ranked]
        show_table(filled(varied.HEAD, texts, title=f"importance for {settings.metric}"))
        say(about)
    say_left_out(groups)
    if out is not None:
        files: dict[str, str | bytes] = {
            **table.table_files(groups, shown),
            **curve_files({group.name: group.metrics for group in groups}),
            **({} if pivoted is None else pivoted.files()),
            **({} if settings is None else {**settings.files(), **figure_files(settings.plot(), "settings")}),
        }
        folder = make_folder(out)
        write_together({folder / name: content for name, content in files.items()})
        say(f"results: {out}")


def say_left_out(groups: Sequence[compare.Group]) -> None:
    """Prints a line for each run that does not count."""
    for group in groups:
        for folder in group.left_out:
            say(f"left out: {short_path(folder)} ({group.name} has another run of the same settings and seed)")
