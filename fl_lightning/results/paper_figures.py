"""The figures of the five papers: ``paper_figures.yaml`` in this folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import ensure
from fl_lightning.results.papers import PAPERS


@dataclass(frozen=True)
class Selection:
    """Runs of a figure: cells of a table.

    Attributes:
        table: The table.
        rows: Its rows, by comma; empty: all.
        columns: Its columns, likewise.
        settings: Settings over all of these runs, as on the command line.
        vary: Values of a setting of the model, or of ``epochs``, that are tried one after another over each cell.
    """

    table: str
    rows: str = ""
    columns: str = ""
    settings: str = ""
    vary: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
        paper: A key of `fl_lightning.results.papers.PAPERS`.
        number: Its number there.
        shows: What it shows, in our words.
        draws: The drawing: surface, plane, perturbation or trajectory of ``fl-lightning landscape``, line of
            ``interpolate``, corruptions; curves, bars, lines, spectrum, clients or cost.
        runs: The runs that it needs.
        measure: Measures that its runs take besides those of the tables, by comma.
        times: How often they take them in a run.
        metrics: Metrics of curves.
        value: The metric of bars, lines and clients, as a `Cell` names it.
        options: Options of a command that draws.
        taken: What our notes on the paper do not say, and is taken here.
        reason: Why it cannot be drawn; empty if it can.
    """

    paper: str
    number: str
    shows: str = ""
    draws: str = ""
    runs: tuple[Selection, ...] = ()
    measure: str = ""
    times: int = 1
    metrics: tuple[str, ...] = ()
    value: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    reason: str = ""

    @property
    def folder(self) -> str:
        """Name of the folder of its runs: that of their table, unless its runs are not those of one table."""
        own = self.measure or any(runs.settings for runs in self.runs) or len({runs.table for runs in self.runs}) > 1
        return f"{self.paper}_{f'figure_{self.number}' if own else self.runs[0].table}"


def figures(paper: str) -> list[PaperFigure]:
    """Returns the figures of a paper, schematics included, in their order.

    Raises:
        UserError: If there is no such paper.
    """
    ensure(paper in PAPERS, f"paper = {paper}: no such paper; choose from {', '.join(PAPERS)}")
    return list(_all()[paper])


def figure(paper: str, number: str) -> PaperFigure:
    """Returns a figure of a paper.

    Raises:
        UserError: If there is no such figure, or it cannot be drawn.
    """
    found = {each.number: each for each in figures(paper)}
    ensure(number in found, f"figure = {number}: no figure of {paper}; choose from {', '.join(found)}")
    asked = found[number]
    ensure(not asked.reason, f"figure = {number} of {paper}: not known: {asked.reason}; see docs/experiments.md")
    return asked


@cache
def _all() -> dict[str, list[PaperFigure]]:
    return {
        paper: [_figure(paper, str(number), dict(entry)) for number, entry in entries.items()]
        for paper, entries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
    }


def _figure(paper: str, number: str, entry: dict[str, Any]) -> PaperFigure:
    reason = "it is a schematic" if entry.pop("schematic", False) else entry.pop("not", "")
    entry["runs"] = tuple(Selection(**{**runs, "table": str(runs["table"])}) for runs in entry.get("runs", ()))
    entry["metrics"] = tuple(entry.get("metrics", ()))
    return PaperFigure(paper, number, reason=reason, **entry)
