"""Reproduction of a paper's table or figure: the cells, their runs, and our numbers as text, CSV, LaTeX, Markdown."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import nn

from fl_lightning import algorithms
from fl_lightning.algorithms.parts.ascent import SAM
from fl_lightning.core import UserError, ensure, grouped, json_text, require
from fl_lightning.engine.contract import contract_of
from fl_lightning.results import (
    PaperFigure,
    Recipe,
    filled,
    last_measurements,
    markdown,
    protocol,
    recipe,
    setting_of,
    tex,
    window_of,
    write_table,
)
from fl_lightning.results.papers import COLUMNS, EVALUATED, MEASURED, TARGETS, Cell, Line, beside, beside_fedavg, find
from fl_lightning.sweeps.trials import Outcome, Trial

COUNTS = (
    "trainer.eval_every", "trainer.eval_last", "model.W", "model.warmup", "model.ascent.warmup",
    "model.averaging.start", "model.averaging.cycle", "model.optimizer.schedule.period",
)  # fmt: skip
"""Settings in rounds: intervals, windows, warm-ups, cycles, and the round in which something starts."""
FACTORS = ("model.optimizer.lr_decay", "model.averaging.alpha", "model.ema_alpha")
"""Factors per round of a decay: of the learning rate, and of the memory of a moving average of models."""


def scaled(config: Mapping[str, Any], fraction: float) -> dict[str, int | float]:
    """Returns the settings of a run with a fraction of its rounds, by key; those that stay are left out.

    One rule: the run is the same in less time. A number of rounds is multiplied by the fraction and rounded to at least
    1 (0 stays 0). A factor per round is raised to 1 / fraction, so that it ends at the same value. Fractions of the
    run, such as SWA's start of 0.75, stay, and so do weights of a step, such as a momentum. The fraction used is that
    of the rounded number of rounds.

    Args:
        config: A run's resolved config.
        fraction: Above 0, at most 1.

    Raises:
        UserError: If the fraction is out of range.
    """
    rounds = scaled_rounds(config, fraction)
    share = rounds / config["trainer"]["max_rounds"]
    settings: dict[str, int | float] = {
        "trainer.max_rounds": rounds,
        **{key: max(1, round(n * share)) for key in COUNTS if (n := setting_of(config, key)) is not None and n >= 1},
        **{key: x ** (1 / share) for key in FACTORS if (x := setting_of(config, key)) is not None},
    }
    return {key: number for key, number in settings.items() if number != setting_of(config, key)}


def scaled_rounds(config: Mapping[str, Any], fraction: float) -> int:
    """Returns a fraction of a run's rounds; errors as for `scaled`."""
    require(0 < fraction <= 1, "rounds", fraction, "give a fraction of the paper's rounds, above 0 and at most 1")
    return max(1, round(int(config["trainer"]["max_rounds"]) * fraction))


FILE = "reproduction.json"
"""In a run folder: the cells that the run reproduces, by their columns, the fraction of the rounds, and settings."""


@dataclass(frozen=True)
class Task:
    """The runs, one for each seed, of cells that differ in their metric alone.

    Attributes:
        cells: The cells.
        recipe: How they are run.
        settings: Settings over the recipe.
        measure: Measures besides those of the cells, by comma.
        times: How often all of them are taken in a run.
        setting: Name and value of the setting that this task tries, if any.
    """

    cells: tuple[Cell, ...]
    recipe: Recipe
    settings: tuple[str, ...] = ()
    measure: str = ""
    times: int = 1
    setting: tuple[str, float] | None = None

    @property
    def name(self) -> str:
        """Folder of its runs."""
        parts = (column(self.cells[0]).replace("/", "of"), self.cells[0].algorithm)
        return "/".join(re.sub(r"[^\w.+=-]+", "_", part).strip("_") for part in parts)

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of a run with all of its rounds."""
        return ("--config", self.recipe.config, *self.recipe.row, *self.recipe.column, *self.settings)

    def trials(
        self, config: Mapping[str, Any], fraction: float, seeds: Sequence[int], more: Sequence[str]
    ) -> list[Trial]:
        """Returns the runs.

        Args:
            config: The resolved config of a run with all of its rounds.
            fraction: The fraction of the rounds, see `fl_lightning.sweeps.reproduction`.
            seeds: Seeds of the runs.
            more: Further arguments, which win.
        """
        needed = (MEASURED[name][1] for cell in self.cells if (name := cell.quantity) in MEASURED)
        measures = dict.fromkeys(filter(None, (*needed, self.measure)))
        interval = max(1, scaled_rounds(config, fraction) // self.times)
        settings = f"every_n_rounds: {interval}, metrics: [{', '.join(measures)}]"
        args = [*self.args, *(f"--{key}={number:.17g}" for key, number in scaled(config, fraction).items())]
        if measures:
            args.append(f"--trainer.callbacks+={{class_path: FlatnessMonitor, init_args: {{{settings}}}}}")
        return [
            Trial(f"{self.name}/seed_{seed}", (*args, f"--trainer.seed={seed}", *more), self.recipe.command)
            for seed in seeds
        ]


def select(paper: str, table: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
    """Returns cells of a table.

    Args:
        paper: A key of `fl_lightning.results.papers.PAPERS`; case does not matter, nor in rows and columns.
        table: Its number; "5" also means the table that is "5/10" there.
        rows: Algorithms; none: all.
        columns: Data set, network, heterogeneity, participation, epochs (``E=1``) or metric of the columns; of one kind
            a column has any of them, of several kinds one of each. None: all.

    Raises:
        UserError: If there is no such table, row or column.
    """
    tables = dict.fromkeys(cell.table for cell in find(paper=paper))
    cells = find(paper=paper, table=next((name for name in tables if table in (name, *name.split("/"))), table))
    names = list(dict.fromkeys(cell.algorithm for cell in cells))
    known, requested = {name.casefold() for name in names}, {row.casefold() for row in rows}
    for row in rows:
        ensure(row.casefold() in known, f"rows = {row}: not in table {table}; choose from {', '.join(names)}")
    cells = [cell for cell in cells if not rows or cell.algorithm.casefold() in requested]
    kinds = [{name.casefold(): name for name in kind} for kind in zip(*map(_properties, cells), strict=True)]
    wanted: dict[int, list[str]] = {}
    for term in columns:
        index = next((i for i, kind in enumerate(kinds) if term.casefold() in kind), -1)
        choice = ", ".join(name for kind in kinds if len(kind) > 1 for name in kind.values() if name)
        ensure(index >= 0, f"columns = {term}: no column of these rows in table {table}; choose from {choice}")
        wanted.setdefault(index, []).append(kinds[index][term.casefold()])
    chosen = [c for c in cells if all(_properties(c)[i] in terms for i, terms in wanted.items())]
    ensure(bool(chosen), f"columns = {','.join(columns)}: no cell of table {table} is all of that; name fewer")
    return chosen


def tasks(cells: Sequence[Cell]) -> tuple[list[Task], list[str]]:
    """Returns the runs of cells, and one line for each reason why others cannot be reproduced.

    FedAvg's runs are among them where another row is measured by FedAvg.
    """
    answers = [(cell, why_not(cell)) for cell in cells]
    reasons = grouped((reason, cell.algorithm) for cell, reason in answers if reason)
    runnable = [cell for cell, reason in answers if not reason and declared(cell) is None]
    by_run = grouped(((*_place(cell).values(), cell.algorithm), cell) for cell in runnable)
    for (*place, _), group in [*by_run.items()]:
        if any(beside_fedavg(cell.metric) for cell in group) and (*place, "FedAvg") not in by_run:
            by_run[(*place, "FedAvg")] = find(**_place(group[0]), algorithm="FedAvg", metric="acc")[:1]
    runs = [Task(tuple(group), recipe(group[0])) for group in by_run.values()]
    return runs, [f"{reason} ({', '.join(dict.fromkeys(names))})" for reason, names in reasons.items()]


def figure_tasks(figure: PaperFigure) -> list[Task]:
    """Returns the runs of a figure; those that its tables need as well are the same, unless they measure more."""
    runs = []
    for selection in figure.runs:
        for task in tasks(select(figure.paper, selection.table, names(selection.rows), names(selection.columns)))[0]:
            cells = tuple(replace(cell, algorithm=selection.name or cell.algorithm) for cell in task.cells)
            variant = replace(
                task,
                cells=cells,
                settings=tuple(shlex.split(selection.settings)),
                measure=figure.measure,
                times=figure.times,
            )
            tried = [(name, value) for name, values in selection.vary.items() for value in values]
            runs += [_varied(variant, name, value) for name, value in tried] if tried else [variant]
    return runs


def _varied(task: Task, name: str, value: float) -> Task:
    """Returns a task with another value of a setting of the model, or of ``epochs``."""
    cell = task.cells[0]
    algorithm = f"{cell.algorithm} {name}={value:g}"
    cell = replace(cell, epochs=f"{value:g}") if name == "epochs" else replace(cell, algorithm=algorithm)
    return replace(task, cells=(cell,), recipe=recipe(cell), setting=(name, value))


def names(listed: str | None) -> list[str]:
    """Returns names that are listed by comma."""
    return [name.strip() for name in listed.split(",")] if listed else []


def why_not(cell: Cell) -> str | None:
    """Returns why a cell cannot be reproduced; None if it can."""
    if declared(cell) is not None:
        return None
    if cell.metric.startswith(("seconds", "minutes")):
        return "a time of the paper's machine; time/round_s in a run's metrics.csv is that of yours"
    if cell.quantity not in (*EVALUATED, *TARGETS, *MEASURED):
        return "not among the numbers that a run gives here"
    try:
        recipe(cell)
    except UserError as error:
        return str(error)
    return None


def declared(cell: Cell) -> float | None:
    """Returns the number of a cell that an algorithm declares, as `fl-lightning list` shows it; None if it does not.

    A backward pass costs as much as two forward passes, as in FedGMT's Table 1.
    """
    if cell.dataset:
        return None
    name, _, ascent = cell.algorithm.partition("+")
    objective = getattr(algorithms, name)(nn.Linear(8, 8), **({"ascent": SAM(1.0)} if ascent else {}))
    contract = contract_of(objective)[0]
    down, up = (round(bits / (32 * objective.flat.d)) for bits in contract.bits)  # single numbers are not counted
    forward, backward = contract.passes
    return {
        "models_per_client": down + up,
        "models_per_client_down": down,
        "models_per_client_up": up,
        "communication_per_round": (down + up) / 2,
        "computation_per_step": (forward + 2 * backward) / 3,
    }.get(cell.metric)


def line(cell: Cell, outcomes: Sequence[Outcome], fraction: float = 1.0, settings: str = "") -> Line:
    """Returns the line of a cell from the runs of its task.

    Args:
        cell: The cell.
        outcomes: The outcomes of the runs.
        fraction: The fraction of the rounds that they have.
        settings: Their settings that are not the paper's, as on the command line.
    """
    if (number := declared(cell)) is not None:
        return Line(cell, (number,))
    broken = [outcome.error for outcome in outcomes if outcome.error is not None]
    done = [outcome.folder for outcome in outcomes if outcome.folder is not None and outcome.error is None]
    return beside(cell, done, fraction, broken, settings)


def mark(folder: Path, task: Task, fraction: float, settings: str = "") -> None:
    """Writes the keys of the task's cells, and how its runs differ from the paper's, into a run folder, for reports.

    Runs of a figure with a setting that no cell has are no cell's.
    """
    if task.setting or task.settings:
        return
    cells = [
        {**{name: getattr(cell, name) for name in COLUMNS}, "fraction": fraction, "settings": settings}
        for cell in task.cells
    ]
    (folder / FILE).write_text(json_text(cells, indent=2), encoding="utf-8")


def column(cell: Cell) -> str:
    """Returns the column of a cell: data, cohort and local epochs."""
    epochs = f"E={cell.epochs}" if cell.epochs else ""
    return ", ".join(filter(None, (cell.dataset, cell.model, cell.heterogeneity, cell.participation, epochs)))


def _place(cell: Cell) -> dict[str, str]:
    """Returns what the cells of all rows and metrics of a column have in common."""
    return {name: getattr(cell, name) for name in COLUMNS if name not in ("table", "algorithm", "metric")}


def _properties(cell: Cell) -> tuple[str, ...]:
    kind, _, place = cell.heterogeneity.partition(", ")
    return cell.dataset, cell.model, kind, place, cell.participation, f"E={cell.epochs}", cell.metric


HEADS = ("", "ours", "paper", "difference", "seeds")


def title_of(lines: Sequence[Line]) -> str:
    """Returns the table's title: fraction of the rounds, those of the means, and settings that are not the paper's."""
    first = lines[0]
    rounds = "all rounds" if first.fraction == 1 else f"{100 * first.fraction:.4g} % of the rounds"
    counted = window_of(run for line in lines if line.cell.metric in EVALUATED for run in line.folders)
    title = f"{first.cell.paper}, Table {first.cell.table}: {rounds}" + (f", means of the {counted}" if counted else "")
    return ", with ".join(filter(None, (title, first.settings)))


def protocols(lines: Sequence[Line]) -> list[str]:
    """Returns how each of our numbers on flatness was measured, in one line."""
    measurements = [
        (name, last_measurements(run).get(MEASURED[name][0]))
        for line in lines
        if (name := line.cell.quantity) in MEASURED
        for run in line.folders
    ]
    return list(dict.fromkeys(f"{name}: {protocol(measured)}" for name, measured in measurements if measured))


def line_cells(line: Line) -> list[str]:
    """Returns the cells of a line as text, with as many digits as the paper prints."""
    cell = line.cell
    printed = cell.printed.partition(" ± ")[0]
    digits = max(1, len(printed.partition(".")[2])) if printed else 2
    spread = "" if line.std is None else f" ± {line.std:.{digits}f}"
    ours = "" if line.mean is None else f"{line.mean:.{digits}f}{spread}"
    name = cell.algorithm if cell.metric == "acc" else f"{cell.algorithm}, {cell.metric}"
    difference = "" if line.difference is None else f"{line.difference:+.{digits}f}"
    count = str(len(line.values)) if line.folders or not line.values else "declared"
    seeds = f"{len(line.values)} of {len(line.values) + len(line.errors)}" if line.errors else count
    missing = "not reached" if any(error.endswith("not reached") for error in line.errors) else "broke off"
    return [name, ours or missing, cell.printed or cell.note.partition(";")[0], difference, seeds]


def table_of(lines: Sequence[Line]) -> Table:
    """Returns the table for the terminal, a section for each column of the paper's."""
    table = filled(HEADS, (), title=escape(title_of(lines)))
    for name, group in _sections(lines):
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/]")
        for line in group:
            table.add_row(*map(escape, line_cells(line)))
    return table


def write_lines(lines: Sequence[Line], out: Path) -> None:
    """Writes ``table.csv`` (all digits), ``table.tex`` (needs booktabs) and ``table.md``."""
    numbers = ("seeds", "ours", "ours_std", "value", "std", "difference", "folders", "errors")
    rows = [
        [
            *(getattr(line.cell, name) for name in COLUMNS), line.fraction, line.settings, len(line.values), line.mean,
            line.std, line.cell.value, line.cell.std, line.difference, " ".join(map(str, line.folders)),
            "; ".join(line.errors),
        ]
        for line in lines
    ]  # fmt: skip
    write_table(out / "table.csv", (*COLUMNS, "fraction", "settings", *numbers), rows)
    (out / "table.tex").write_text(latex(lines), encoding="utf-8")
    notes = "".join(f"\n- {text}" for text in protocols(lines))
    body = [[name, *line_cells(line)] for name, group in _sections(lines) for line in group]
    text = markdown([["column", "row", *HEADS[1:]], *body])
    (out / "table.md").write_text(f"**{title_of(lines)}**\n\n{text}{notes}\n", encoding="utf-8")


def latex(lines: Sequence[Line]) -> str:
    """Returns the table for a paper, by booktabs."""

    def across(text: str) -> str:
        return rf"\multicolumn{{{len(HEADS)}}}{{l}}{{{tex(text)}}} \\"

    body = [
        rf"\begin{{tabular}}{{l{'r' * (len(HEADS) - 1)}}}",
        r"\toprule",
        across(title_of(lines)),
        r"\midrule",
        " & ".join(HEADS) + r" \\",
    ]
    for name, group in _sections(lines):
        body += [r"\midrule", across(name), *(" & ".join(map(tex, line_cells(line))) + r" \\" for line in group)]
    footer = [r"\midrule", *map(across, notes)] if (notes := protocols(lines)) else []
    return "\n".join([*body, *footer, r"\bottomrule", r"\end{tabular}", ""])


def _sections(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Returns the lines of each column, in the order of the paper."""

    def place(line: Line) -> str:
        return ", with ".join(filter(None, (column(line.cell), line.settings)))

    return list(grouped((place(line), line) for line in lines).items())
