"""The tables of docs/experiments.md and of the papers' pages: the papers' tables, and how their cells are run.

``python -m tests.paper_tables docs/experiments.md docs/experiments/*.md`` renews every block of pages between
``<!-- tables: fedsam -->`` (``rows: fedsam``, ``known: cells``,
``known: figures``) and its end, ``<!-- /tables -->``;
``python -m tests.paper_tables tables fedsam`` prints one.
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from fl_lightning.results.metrics import markdown
from fl_lightning.results.papers import PAPERS, find
from fl_lightning.results.recipes import figures, rows
from fl_lightning.sweeps.reproduction import why_not

BLOCK = re.compile(r"<!-- (tables|rows|known): (\S+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
"""A generated block: its kind, what it is of, and its text."""


def tables(paper: str) -> str:
    """Returns the tables of a paper: their data and metrics."""
    lines = [["table", "data", "numbers"]]
    for table in dict.fromkeys(cell.table for cell in find(paper=paper)):
        cells = find(paper=paper, table=table)
        data, metrics = (
            ", ".join(dict.fromkeys(filter(None, named)))
            for named in ((cell.dataset for cell in cells), (cell.metric.partition("@")[0] for cell in cells))
        )
        lines.append([table, data, metrics])
    return markdown(lines)


def settings(paper: str) -> str:
    """Returns the rows of a paper, as settings over its files, and where these are from; what all rows have, once."""
    words = [shlex.split(row.settings) for row in rows(paper)]
    pairs = [[*zip(arguments[::2], arguments[1::2], strict=True)] for arguments in words]
    common = [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*pairs, strict=False))]
    lines = [["row", "over", "settings", "from"]]
    for row, row_pairs in zip(rows(paper), pairs, strict=True):
        over = ", ".join(f"`{pattern}`" for pattern in row.over)
        lines.append([", ".join(row.names), over, short(row_pairs[len(common) :], row.names), row.source])
    head = f"All rows have `{' '.join(word for pair in common for word in pair)}`, and:\n\n" if common else ""
    return head + markdown(lines)


def short(pairs: Sequence[tuple[str, ...]], names: Sequence[str]) -> str:
    """Returns a row's settings without ``--model.``, and without the class that the row is named after."""
    text = " ".join(
        " ".join(pair) if pair[0].startswith("--") else "=".join(pair)
        for pair in ((flag.removeprefix("--model."), value) for flag, value in pairs)
        if pair[0] != "--model" or not any(name.startswith(pair[1]) for name in names)
    )
    return text and f"`{text}`"


def known(unit: str) -> str:
    """Returns how many cells, or figures, ``reproduce`` knows, and why it does not know the others."""
    if unit == "figures":
        return states()
    counts = Counter(re.sub(r"^\w+ = [^:]*: ", "", why_not(cell) or "") for cell in find())
    reasons = "; ".join(f"{n}: {reason}" for reason, n in counts.most_common() if reason)
    return f"It knows {counts['']:,} of {counts.total():,} {unit}. The others: {reasons}.\n"


def states() -> str:
    """Returns the figures that are drawn, by paper, and what they lack of the papers' ones."""
    drawn = {paper: [figure for figure in figures(paper) if not figure.schematic] for paper in PAPERS}
    lines = [["", "figures", "what is missing"]]
    for paper, paper_figures in drawn.items():
        missing = "; ".join(f"{figure.number}: {figure.missing}" for figure in paper_figures if figure.missing)
        lines.append([paper, ", ".join(dict.fromkeys(figure.figure for figure in paper_figures)), missing])
    return markdown(lines)


KINDS: dict[str, Callable[[str], str]] = {
    "tables": tables, "rows": settings, "known": known,
}  # fmt: skip


def renew(page: str) -> str:
    """Returns a page with all its blocks renewed."""

    def block(match: re.Match[str]) -> str:
        kind, subject, _ = match.groups()
        return f"<!-- {kind}: {subject} -->\n{KINDS[kind](subject)}<!-- /{kind} -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    if sys.argv[1] in KINDS:
        print(KINDS[sys.argv[1]](sys.argv[2]), end="")
    else:
        for path in map(Path, sys.argv[1:]):
            path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
