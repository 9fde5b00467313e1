"""The page of rows: their table, where they are from and what checks found, and their figure."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fl_lightning.core import Figure
from fl_lightning.results import find_runs, read_config
from fl_lightning.results.compare import compare
from fl_lightning.results.curves import plot_curves, plot_tradeoff
from fl_lightning.results.metrics import markdown
from fl_lightning.results.rows import ABOUT
from fl_lightning.results.table import Markup, cell, columns, differences
from fl_lightning.studies.check import verdict
from fl_lightning.studies.store import about

FEW = 4
"""Most groups whose curves are drawn; of more, a reader cannot tell one from another."""


def page(rows: Sequence[str | Path]) -> tuple[str, Callable[[], Figure]]:
    """Returns the page of rows, as Markdown, and what draws it: curves, or accuracy against lambda_max of many methods.

    Args:
        rows: Rows of a store, or the store; its ``about.yaml`` gives title, text and reference.

    Raises:
        UserError: If a row is damaged.
    """
    groups = compare(sorted(find_runs(rows)))
    heading = _about(groups[0].folders[0])
    shown = [c for c in columns(groups) if c.table in ("results", "clients") and c.key != "std_rounds"]
    reference = next((group for group in groups if group.name == heading.get("reference")), groups[0])
    kept = {group.name: [about(row) for row in group.folders] for group in groups}
    shown += differences(shown, reference, reference.name)
    bold = Markup(best="**{}**")
    head = ["method", "seeds", "checked", *(c.head for c in shown)]
    lines = [
        [
            group.name,
            str(len(group.runs)),
            _checked(group.folders),
            *(cell(group, column, groups, bold) for column in shown),
        ]
        for group in groups
    ]
    first = kept[groups[0].name][0]["starts"][0]
    starts = [start for of in kept.values() for row in of for start in row["starts"]]
    commits, cpus = (
        sorted({(start["commit"] or "unknown")[:7] + " with changes" * start["changed"] for start in starts}),
        sorted({start["cpu"] for start in starts}),
    )
    made = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, torch {first['torch']}, {first['precision']}."
    checked = (
        "*Checked* counts the rows that another process has trained again to the bit. Differences are means over the "
        "common seeds, with 95 % intervals by Student's t; bold if those against all other rows leave out 0, or, with "
        "one seed, the best."
    )
    text = "\n\n".join([f"# {heading['title']}", heading["text"], markdown([head, *lines]).strip(), checked, made])
    runs = {group.name: group.metrics for group in groups}
    return text, lambda: plot_curves(runs) if len(groups) <= FEW else plot_tradeoff(groups, "lambda_max")


def _checked(rows: Sequence[Path]) -> str:
    """Returns how many rows are equal to the bit, and how many are wrong, by the newest check of each."""
    found = [verdict(row) for row in rows]
    wrong = found.count(False)
    return f"{found.count(True)}" + (f", {wrong} wrong" if wrong else "")


def _about(row: Path) -> dict[str, str]:
    found = next((folder / ABOUT for folder in row.parents if (folder / ABOUT).is_file()), None)
    return {"title": "Ledger", "text": "", **(read_config(found) if found else {})}
