"""The tables of docs/experiments.md and of the papers' pages: their numbers, how their cells are run, their figures.

``python benchmarks/paper_tables.py docs/experiments.md docs/experiments/*.md`` renews every block of pages between
``<!-- papers: fedsam 2 -->`` (``files: fedsam``, ``rows: fedsam``, ``figures: fedsam``, ``known: cells``,
``known: figures``) and its end, ``<!-- /papers -->``;
``python benchmarks/paper_tables.py papers fedsam 2`` prints one.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fl_lightning.results.metrics import markdown
from fl_lightning.results.papers import PAPERS, find
from fl_lightning.results.recipes import CODE, columns, figures, rows
from fl_lightning.sweeps.reproduction import why_not

BLOCK = re.compile(r"<!-- (papers|files|rows|figures|known): (\S+)(?: (\S+))? -->\n(.*?)<!-- /\1 -->", re.DOTALL)
"""A generated block: its kind, paper, table and text."""

WIDEST = 8
"""Columns of a table; one with more has its rows and columns exchanged, if that makes it narrower."""


def papers(paper: str, table: str) -> str:
    """Returns a table of a paper: algorithms by data, the numbers of several participations in one cell.

    Raises:
        UserError: If there is no such table.
    """
    cells = find(paper=paper, table=table)

    def values(column: str) -> list[str]:
        return list(dict.fromkeys(getattr(cell, column) for cell in cells))

    data = [c for c in ("dataset", "model", "heterogeneity", "metric") if len(values(c)) > 1]
    epochs = len({(c.dataset, c.epochs) for c in cells if c.epochs}) > len({c.dataset for c in cells if c.epochs})
    shown: dict[str, dict[str, dict[str, str]]] = {}  # by row, column and participation
    cohorts: dict[str, dict[str, None]] = {}  # of each column
    for cell in cells:
        row = f"{cell.algorithm}, E = {cell.epochs}" if epochs else cell.algorithm
        column = ", ".join(filter(None, (getattr(cell, name) for name in data)))
        reason = cell.note.partition(";")[0]
        text = reason if cell.value is None else cell.printed + ("?" if reason == "uncertain" else "")
        shown.setdefault(row, {}).setdefault(column, {})[cell.participation] = text
        cohorts.setdefault(column, {})[cell.participation] = None
    heads = list(filter(None, values("participation")))
    lines = [[", ".join(heads) if len(heads) > 1 else "", *cohorts]]
    for row, of in shown.items():
        lines.append([row, *(" / ".join(of[c].get(p, "-") for p in cohorts[c]) if c in of else "" for c in cohorts)])
    return markdown(zip(*lines, strict=True) if len(cohorts) > max(WIDEST, len(shown)) else lines)


def files(paper: str) -> str:
    """Returns the files of a paper, the tables that they are of, and their data set, network and heterogeneity."""
    tables: dict[str, list[str]] = {}
    for cell in find(paper=paper):
        if cell.table not in CODE:
            tables.setdefault(", ".join((cell.dataset, cell.model, cell.heterogeneity)), []).append(cell.table)
    lines = [["file", "tables", "data set, network, heterogeneity"]]
    for column, file in columns(paper).items():
        numbers = sorted({int(n) for table in tables[column] for n in table.split("/")})
        *most, last = map(str, numbers)
        lines.append([f"`{file}`", f"{', '.join(most)} and {last}" if most else last, column])
    return markdown(lines)


def settings(paper: str) -> str:
    """Returns the rows of a paper, as settings over its files, and where these are from."""
    lines = [["row", "over", "settings", "from"]]
    for row in rows(paper):
        over = ", ".join(f"`{pattern}`" for pattern in row.over)
        lines.append([", ".join(row.names), over, f"`{row.settings}`" if row.settings else "", row.source])
    return markdown(lines)


def drawings(paper: str) -> str:
    """Returns the figures of a paper: what they show and how they are drawn, or why not."""
    lines = [["figure", "shows", "drawing", "tables of its runs", "assumed"]]
    for each in figures(paper):
        tables = ", ".join(dict.fromkeys(runs.table for runs in each.runs))
        lines.append([each.number, each.shows or f"not known: {each.reason}", each.draws, tables, each.taken])
    return markdown(lines)


def known(what: str) -> str:
    """Returns how many cells or figures ``reproduce`` knows, by kind or paper, and why it does not know the others."""
    if what == "cells":
        found = [(cell.metric.partition("@")[0], why_not(cell)) for cell in find()]
        found = [(kind, reason and re.sub(r"^\w+ = [^:]*: ", "", reason)) for kind, reason in found]
    else:
        found = [(paper, each.reason or None) for paper in PAPERS for each in figures(paper)]
        found = [(paper, reason) for paper, reason in found if reason != "it is a schematic"]
    unknown = {kind for kind, reason in found if reason}
    lines = [["", what, "known", "why the others are not known"]]
    for kind in (*sorted(unknown), "all others"):
        of = Counter(reason for name, reason in found if name == kind or (kind not in unknown and name not in unknown))
        reasons = "; ".join(f"{n}: {reason}" for reason, n in of.items() if reason)
        lines.append([kind, f"{of.total():,}", f"{of[None]:,}", reasons])
    return f"It knows {sum(reason is None for _, reason in found):,} of {len(found):,} {what}.\n\n{markdown(lines)}"


KINDS: dict[str, Callable[..., str]] = {
    "papers": papers, "files": files, "rows": settings, "figures": drawings, "known": known,
}  # fmt: skip


def renew(page: str) -> str:
    """Returns a page with all its blocks renewed."""

    def block(match: re.Match[str]) -> str:
        kind, *of, _ = match.groups()
        of = [name for name in of if name]
        return f"<!-- {' '.join([f'{kind}:', *of])} -->\n{KINDS[kind](*of)}<!-- /{kind} -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    if sys.argv[1] in KINDS:
        print(KINDS[sys.argv[1]](*sys.argv[2:]), end="")
    else:
        for path in map(Path, sys.argv[1:]):
            path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
