"""The page of a ledger: a table of means over seeds, differences to a reference on the same seeds, and its rows."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from fl_lightning.core import Figure
from fl_lightning.results import ledger
from fl_lightning.results.compare import compare
from fl_lightning.results.curves import plot_curves, plot_tradeoff
from fl_lightning.results.metrics import markdown
from fl_lightning.results.table import Markup, cell, columns, differences

ABOUT = "about.yaml"
"""In the folder of a ledger: title, text, and the reference's folder."""


FEW = 4
"""Most groups whose curves are drawn; of more, a reader cannot tell one from another."""


def page(rows: Sequence[Path]) -> tuple[str, Figure]:
    """Returns the page of rows, as Markdown, and its figure: curves, or accuracy against lambda_max of many methods.

    Args:
        rows: The rows; ``about.yaml`` of the nearest folder above the first one gives title, text and reference.

    Raises:
        UserError: If a row is damaged.
    """
    about = _about(rows[0])
    groups = compare(rows)
    shown = [c for c in columns(groups) if c.table in ("results", "clients") and c.key != "std_rounds"]
    reference = next((group for group in groups if group.name == about.get("reference")), groups[0])
    kept = {group.name: [ledger.about(row) for row in group.folders] for group in groups}
    shown += differences(shown, reference, reference.name)
    bold = Markup(best="**{}**")
    head = ["method", "seeds", "checked", *(c.head for c in shown)]
    lines = [
        [
            group.name,
            str(len(group.runs)),
            str(sum(any(check["same"] for check in row["checks"]) for row in kept[group.name])),
            *(cell(group, column, groups, bold) for column in shown),
        ]
        for group in groups
    ]
    first = kept[groups[0].name][0]["starts"][0]
    starts = [start for of in kept.values() for row in of for start in row["starts"]]
    commits, cpus = sorted({start["commit"][:7] for start in starts}), sorted({start["cpu"] for start in starts})
    made = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, torch {first['torch']}, {first['precision']}."
    checked = (
        "*Checked* counts the rows that another process has trained again to the bit. Differences are means over the "
        "common seeds, with 95 % intervals by Student's t; bold if those against all other rows leave out 0, or, with "
        "one seed, the best."
    )
    text = "\n\n".join([f"# {about['title']}", about["text"], markdown([head, *lines]).strip(), checked, made])
    runs = {group.name: group.metrics for group in groups}
    return text, plot_curves(runs) if len(groups) <= FEW else plot_tradeoff(groups, "lambda_max")


def _about(row: Path) -> dict[str, str]:
    found = next((folder / ABOUT for folder in row.parents if (folder / ABOUT).is_file()), None)
    text = {} if found is None else yaml.safe_load(found.read_text(encoding="utf-8"))
    return {"title": "Ledger", "text": "", **text}
