"""The tables of docs/experiments.md and of the papers' pages: their numbers, how their cells are run, their figures.

``python -m tests.paper_tables docs/experiments.md docs/experiments/*.md`` renews every block of pages between
``<!-- papers: fedsam 2 -->`` (``files: fedsam``, ``rows: fedsam``, ``figures: fedsam``, ``known: cells``,
``known: figures``) and its end, ``<!-- /papers -->``;
``python -m tests.paper_tables papers fedsam 2`` prints one.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fl_lightning.results.metrics import markdown
from fl_lightning.results.papers import PAPERS, find
from fl_lightning.results.recipes import columns, figures, rows
from fl_lightning.sweeps.reproduction import why_not

BLOCK = re.compile(r"<!-- (papers|files|rows|figures|known): (\S+)(?: (\S+))? -->\n(.*?)<!-- /\1 -->", re.DOTALL)
"""A generated block: its kind, paper, table and text."""

WIDEST = 8
"""Columns of a table; one with more has its rows and columns exchanged, if that makes it narrower."""


def papers(paper: str, table: str) -> str:
    """Returns the means of a paper's table: algorithms by data, several participations or metrics in one cell.

    Raises:
        UserError: If there is no such table.
    """
    cells = find(paper=paper, table=table)

    def values(column: str) -> list[str]:
        return list(dict.fromkeys(getattr(cell, column) for cell in cells))

    data = [c for c in ("dataset", "model", "heterogeneity") if len(values(c)) > 1]
    epochs = len({(c.dataset, c.epochs) for c in cells if c.epochs}) > len({c.dataset for c in cells if c.epochs})
    shown: dict[str, dict[str, dict[tuple[str, str], str]]] = {}  # by row, column, metric and participation
    parts: dict[str, dict[tuple[str, str], None]] = {}  # of each column
    for cell in cells:
        metric, _, at = cell.metric.partition("@")
        row = f"{cell.algorithm}, E = {cell.epochs}" if epochs else cell.algorithm
        column = ", ".join(filter(None, (*(getattr(cell, name) for name in data), at and f"@{at}")))
        reason = cell.note.partition(";")[0]
        text = reason if cell.value is None else cell.printed.partition(" ")[0] + "?" * (reason == "uncertain")
        shown.setdefault(row, {}).setdefault(column, {})[metric, cell.participation] = text
        parts.setdefault(column, {})[metric, cell.participation] = None
    kinds = {column: list(dict.fromkeys(metric for metric, _ in of)) for column, of in parts.items()}
    metrics = list(dict.fromkeys(metric for of in kinds.values() for metric in of))
    cohorts = list(filter(None, values("participation")))
    same = all(of in (metrics, metrics[:1]) for of in kinds.values())
    heads = [", ".join(metrics)] * (same and metrics != ["acc"]) + [", ".join(cohorts)] * (len(cohorts) > 1)
    named = [", ".join([c] * bool(c) + of * (not same and (not c or of != metrics[:1]))) for c, of in kinds.items()]
    lines = [["; ".join(heads), *named]]
    for row, of in shown.items():
        lines.append([row, *(_together([of[c].get(p, "-") for p in parts[c]]) if c in of else "" for c in parts)])
    return markdown(zip(*lines, strict=True) if len(parts) > max(WIDEST, len(shown)) else lines)


def _together(values: list[str]) -> str:
    """Several numbers in one cell; a word that all of them share, once."""
    return values[0] if len({*values}) == 1 and not values[0][0].isdigit() else ", ".join(values)


def files(paper: str) -> str:
    """Returns the files of a paper by data set and network."""
    found: dict[str, dict[str, None]] = {}
    for column, file in columns(paper).items():
        found.setdefault(", ".join(column.split(", ")[:2]), {})[f"`{file}`"] = None
    return markdown([["data set, network", "files"], *([of, ", ".join(names)] for of, names in found.items())])


def settings(paper: str) -> str:
    """Returns the rows of a paper, as settings over its files, and where these are from."""
    lines = [["row", "over", "settings", "from"]]
    for row in rows(paper):
        over = ", ".join(f"`{pattern}`" for pattern in row.over)
        lines.append([", ".join(row.names), over, f"`{row.settings}`" if row.settings else "", row.source])
    return markdown(lines)


def drawings(paper: str) -> str:
    """Returns the figures of a paper: what they show, what is assumed, and what is missing."""
    lines = [["figure", "shows", "assumed", "missing"]]
    lines += [[e.number, "a schematic" if e.schematic else e.shows, e.taken, e.missing] for e in figures(paper)]
    return markdown(lines)


def known(what: str) -> str:
    """Returns how many cells ``reproduce`` knows, by kind, and why it does not know the others; or how many figures."""
    if what == "figures":
        return states()
    found = [(cell.metric.partition("@")[0], why_not(cell)) for cell in find()]
    found = [(kind, reason and re.sub(r"^\w+ = [^:]*: ", "", reason)) for kind, reason in found]
    unknown = {kind for kind, reason in found if reason}
    lines = [["", what, "known", "why the others are not known"]]
    for kind in (*sorted(unknown), "all others"):
        of = Counter(reason for name, reason in found if name == kind or (kind not in unknown and name not in unknown))
        reasons = "; ".join(f"{n}: {reason}" for reason, n in of.items() if reason)
        lines.append([kind, f"{of.total():,}", f"{of[None]:,}", reasons])
    return f"It knows {sum(reason is None for _, reason in found):,} of {len(found):,} {what}.\n\n{markdown(lines)}"


def states() -> str:
    """Returns how many figures are drawn as the papers describe them, and of which a part is missing."""
    lines = [["", "figures", "as the paper describes them", "a part"]]
    totals = Counter[str]()
    for paper in PAPERS:
        drawn = {each.whole: "" for each in figures(paper) if not each.schematic}
        drawn |= {each.whole: each.missing for each in figures(paper) if each.missing}
        parts = [f"{number}, without {missing}" for number, missing in drawn.items() if missing]
        lines.append([paper, str(len(drawn)), str(len(drawn) - len(parts)), "; ".join(parts)])
        totals += Counter(figures=len(drawn), whole=len(drawn) - len(parts))
    head = f"It draws {totals['figures']} figures, {totals['whole']} of them as the papers' texts describe them."
    return f"{head}\n\n{markdown(lines)}"


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
