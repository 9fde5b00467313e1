"""``fl-lightning reproduce``: a paper's table as runs, with our numbers beside the paper's; or a figure, drawn."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from jsonargparse import Namespace
from torch.nn import Module

from fl_lightning import FederatedDataModule, LocalObjective
from fl_lightning.commands.shared import (
    PARTS,
    FederatedCLI,
    build_trial,
    check_trial,
    paper_figures,
    prediction,
    prepare,
    said_of,
    seeds_of,
)
from fl_lightning.core import (
    Interval,
    PositiveInt,
    UserError,
    check_folder,
    checked,
    ensure,
    make_folder,
    noted,
    save_figure,
)
from fl_lightning.data.histogram import Histogram, heat_maps, histogram
from fl_lightning.results import (
    PaperFigure,
    command,
    figure,
    filled,
    read_run,
    rounds_done,
    say,
    setting_of,
    show_table,
)
from fl_lightning.sweeps.reproduction import (
    Task,
    column,
    declared,
    figure_tasks,
    line,
    mark,
    names,
    protocols,
    scaled_rounds,
    select,
    table_of,
    tasks,
    why_not,
    write_lines,
)
from fl_lightning.sweeps.trials import Outcome, Trial, complain, newest_run, outcome, run_trials


@dataclass(frozen=True)
class _How:
    """How the runs are made, as the arguments of `run` say; ``fraction`` is that of the rounds."""

    settings: Sequence[str]
    seeds: Sequence[int]
    fraction: float
    jobs: int
    dry_run: bool


@dataclass(frozen=True, eq=False)
class Planned:
    """A task with its runs.

    Attributes:
        task: The cells.
        trials: The runs, one for each seed.
        objects: Trainer, model and data of the first of them.
    """

    task: Task
    trials: list[Trial]
    objects: Namespace

    def seconds(self, data: FederatedDataModule, step: prediction.Step) -> float:
        """Estimates the seconds of a run.

        Args:
            data: The data of a task with the same data set and network, set up; here they are divided otherwise.
            step: A step on these data.
        """
        trainer, m = self.objects.trainer, self.objects.data.num_clients
        has_rounds = self.task.recipe.command == "fit"
        cohort = len(trainer.sampler(0, m, trainer.seed)) if has_rounds else m
        return step.run(trainer, self.objects.model, data, cohort * data.num_clients / m)

    @property
    def rows(self) -> int:
        """Bytes of the clients' state in memory, at most."""
        model, limit = self.objects.model, self.objects.trainer.client_memory * 2**30
        return int(min(limit, _row_bytes(model) * self.objects.data.num_clients))

    @property
    def samples(self) -> int:
        """Bytes of a published data set's samples, if a run keeps them in memory and they are not loaded here."""
        data = self.objects.data
        return data.published.nbytes if data.published and not data.stream and not hasattr(data, "clients") else 0


@cache
def _row_bytes(model: LocalObjective) -> int:
    """Returns the bytes that a client keeps; several tasks have one model."""
    return prediction.row_bytes(model, model.flat.vector(model.net))


@checked
def run(
    paper: str,
    table: str,
    /,
    *settings: str,
    rows: str | None = None,
    columns: str | None = None,
    seeds: str = "0",
    rounds: float = 1.0,
    jobs: PositiveInt = 1,
    dry_run: bool = False,
    out: str | None = None,
    points: Annotated[int, Interval("[3, 1e4]")] | None = None,
) -> None:
    """Makes the runs of a table's cells, and a table of their numbers beside the paper's; or a figure and its runs.

    Started again, it makes the runs that are missing, and continues those that were interrupted.

    Args:
        paper: The paper: fedsam, fedsmoo, fedgf, fedgloss or fedgmt.
        table: The number of its table, or its figure, such as fig7, or fig3c for some of its panels.
        *settings: Settings of a run, such as --data.data_dir DIR or --config FILE: they go to all runs, and win.
        rows: Algorithms as the table names them, such as FedAvg,FedGloSS+SAM; null: all.
        columns: Data set, network, heterogeneity, participation, epochs or metric, such as CIFAR10,alpha=0,alpha=0.05;
            null: all.
        seeds: Seeds of the runs, such as 0,1,2.
        rounds: Fraction of the paper's rounds.
        jobs: Runs at the same time.
        dry_run: Show the runs and what they take, and make none.
        out: Folder of the runs and of table.csv, table.tex and table.md, or of the figure; null: one in runs/reproduce.
        points: Points along each axis of a figure's loss landscape; null: the paper's, or those of ``landscape``.
    """
    options, paper = _How(settings, seeds_of(seeds), rounds, jobs, dry_run), paper.casefold()
    suffix = "" if rounds == 1 else f"_{rounds:g}"
    if match := re.fullmatch(r"fig(?:ure)?[. _]*(\d+[a-z]?)", table.lower()):
        ensure(not rows and not columns, f"table = {table}: a figure has rows and columns of its own; leave them out")
        for paper_figure in figure(paper, match[1]):
            _figure(paper_figure, Path(out or f"runs/reproduce/{paper_figure.folder}{suffix}"), options, points)
        return
    cells = select(paper, table, names(rows), names(columns))
    cell_tasks, reasons = tasks(cells)
    answers = [why_not(cell) or "known" for cell in cells]
    for cell, answer in zip(cells, answers, strict=True) if dry_run else ():
        text = f"{cell.metric}: {answer}; in the paper {', '.join(filter(None, (cell.printed, cell.note)))}"
        say(", ".join(filter(None, (column(cell), cell.algorithm, text))))
    for reason in () if dry_run else reasons:
        say(f"not reproduced: {reason}")
    say(f"known: {answers.count('known')} of {len(cells)} cells")
    ensure("known" in answers, f"table = {table}: none of these cells can be reproduced; see docs/experiments.md")
    folder = Path(out or f"runs/reproduce/{paper}_{table.replace('/', '_')}{suffix}")
    outcomes_by_task = _make(cell_tasks, folder, options)
    if dry_run:
        return
    lines = [
        *(line(cell, []) for cell in cells if declared(cell) is not None),
        *(
            line(cell, outcomes, rounds, shlex.join(settings))
            for task, outcomes in outcomes_by_task.items()
            for cell in task.cells
        ),
    ]
    write_lines(lines, make_folder(folder))
    show_table(table_of(lines))
    how_measured = " (table.md says how flatness was measured)" if protocols(lines) else ""
    say(f"results: {folder}{how_measured}")


def _figure(paper_figure: PaperFigure, folder: Path, options: _How, points: int | None) -> None:
    """Makes the runs of a figure, and draws it."""
    for text in paper_figure.says:
        say(text)
    tasks, place = figure_tasks(paper_figure), folder / f"figure_{paper_figure.number}"
    if paper_figure.draws == "partition":
        histograms, runs = _partitions(tasks, options), {}
    else:
        outcomes_by_task = _make(tasks, folder, options)
        complain([outcome for outcomes in outcomes_by_task.values() for outcome in outcomes])
        runs = {
            task: [outcome.folder for outcome in outcomes if outcome.folder is not None]
            for task, outcomes in outcomes_by_task.items()
        }
    if options.dry_run:
        return
    remarks = [f"{100 * options.fraction:.4g} % of the rounds"] * (options.fraction < 1)
    with noted("; ".join([*paper_figure.says, *remarks, *filter(None, [shlex.join(options.settings)])])):
        paths = (
            paper_figures.draw(paper_figure, runs, place, points)
            if runs
            else save_figure(heat_maps(histograms), place / "partition")[1:]
        )
    for path in paths:
        say(f"drawn: {path}")


def _partitions(tasks: Sequence[Task], options: _How) -> dict[str, Histogram]:
    """Divides the data of tasks, by name; a dry run shows the commands that would print them."""
    histograms = dict[str, Histogram]()
    for plan in _plan(tasks, options):
        cell, data = plan.task.cells[0], plan.objects.data
        if options.dry_run:
            print(command("fl-lightning", "data", *plan.trials[0].args), flush=True)
        else:
            data.prepare_data()
            data.setup()
            histograms[cell.algorithm if plan.task.settings else column(cell)] = histogram(data)
    return histograms


def _make(tasks: Sequence[Task], folder: Path, options: _How) -> dict[Task, list[Outcome]]:
    """Makes the runs of tasks that are missing, after an estimate; a dry run shows them and makes none."""
    if not options.dry_run:
        check_folder(folder)
    planned = []
    for plan in _plan(tasks, options) if tasks else ():
        planned.append(plan)
        for trial in plan.trials if options.dry_run else ():
            print(command("fl-lightning", trial.command, *trial.args), flush=True)
    trials = [trial for plan in planned for trial in plan.trials]
    unfinished = {plan: [trial for trial in plan.trials if outcome(trial, folder) is None] for plan in planned}
    if todo := {plan: [newest_run(trial, folder) for trial in left] for plan, left in unfinished.items() if left}:
        _show_estimate(todo, options)
    if options.dry_run:
        return {}
    make_folder(folder)
    outcomes, settings = dict[str, Outcome](), shlex.join(options.settings)
    task_of = {trial.name: plan.task for plan in planned for trial in plan.trials}
    for ended in run_trials(trials, folder, build_trial, options.jobs, check=check_trial):
        outcomes[ended.trial.name] = ended
        if ended.folder is not None:
            mark(ended.folder, task_of[ended.trial.name], options.fraction, settings)
        say(f"{len(outcomes)} of {len(trials)}: {ended.trial.name}: {ended.error or 'finished'}")
    return {plan.task: [outcomes[trial.name] for trial in plan.trials] for plan in planned}


def _show_estimate(planned: Mapping[Planned, Sequence[Path | None]], options: _How) -> None:
    """Prints what the runs take on this machine; a dry run does not need the data.

    Args:
        planned: For each task, the folders of its runs that have not ended; None for those that have not begun.
        options: How the runs are made.
    """
    measured: dict[tuple[str, str], tuple[FederatedDataModule, prediction.Step] | None] = {}
    seconds, rows, memory = list[float](), [], 0
    for plan, folders in planned.items():
        cell = plan.task.cells[0]
        if (kind := (cell.dataset, cell.model)) not in measured:
            measured[kind] = _measured(plan, options)
        if (measurement := measured[kind]) is None:
            continue
        data, step = measurement
        duration, rounds = plan.seconds(data, step), plan.objects.trainer.max_rounds
        remaining = [duration * (1 - rounds_done(read_run(folder)) / rounds) for folder in folders]
        seconds += remaining
        memory = max(memory, step.memory + plan.rows + plan.samples)
        rows.append(
            [
                cell.algorithm,
                column(cell),
                str(len(remaining)),
                f"{rounds:,}",
                prediction.as_time(duration),
                prediction.as_time(sum(remaining)),
            ]
        )
    if not rows:
        return
    heads = ["row", "column", "runs", "rounds", "each", "together"]
    show_table(filled(heads, rows, left=2, title="estimate for this machine"), 2)
    total, at_once = max(max(seconds), sum(seconds) / options.jobs), min(options.jobs, len(seconds))
    say(
        f"{len(seconds)} run{'s'[: len(seconds) - 1]}, about {prediction.as_time(total)} with --jobs {options.jobs}; "
        f"about {prediction.as_bytes(memory * at_once)} of memory"
    )


def _measured(plan: Planned, options: _How) -> tuple[FederatedDataModule, prediction.Step] | None:
    """Measures a step; a dry run does without files, and returns None if it knows no shape."""
    cell, objects = plan.task.cells[0], plan.objects
    data = objects.data
    if options.dry_run:
        try:
            data = prediction.data_like(data)
        except UserError as error:
            say(f"no estimate for {cell.dataset}: {error}")
            return None
    else:
        data.prepare_data()
        data.setup()
    say(f"measuring a step: {cell.dataset}, {cell.model}", flush=True)
    return data, prediction.Step.measure(objects.trainer, objects.model, data)


def _plan(tasks: Sequence[Task], options: _How) -> Iterator[Planned]:
    """Builds a run of each task, so that no setting is wrong when they start; a dry run downloads nothing.

    To parse arguments and to make a net takes longer than all else, so each is done once for what several tasks share.
    """
    cli, nets = FederatedCLI("fit", *tasks[0].args), dict[str, Module]()
    configs, parts = dict[str, dict[str, Any]](), dict[tuple[str, str], Any]()
    for task in tasks:
        # it is only parsed: to build it may need what the user's settings replace; no column has a number of rounds
        args = prepare([arg for arg in task.args if arg not in task.recipe.column])
        if (key := said_of(args, "trainer", "model")) not in configs:
            cli.parse_arguments(cli.parser, args)
            configs[key] = cli.resolved()
        config = configs[key]
        downloads = options.dry_run and setting_of(config, "model.net.pretrained") == "torchvision"
        build_settings = ("--model.net.pretrained=null", *options.settings) if downloads else options.settings
        trials, (built, *_) = (
            task.trials(config, options.fraction, options.seeds, settings)
            for settings in (options.settings, build_settings)
        )
        keys = {part: (part, said_of(prepare(built.args), part)) for part in PARTS}
        if not all(key in parts for key in keys.values()):
            objects = cli.make(*built.args, nets=nets)
            parts.update((key, objects[part]) for part, key in keys.items())
        objects = Namespace({part: parts[key] for part, key in keys.items()})  # type: ignore[no-untyped-call]
        fixed = {"max_rounds": scaled_rounds(config, options.fraction), "seed": options.seeds[0]}
        for (name, expected), option in zip(fixed.items(), ("--rounds", "--seeds"), strict=True):
            value = getattr(objects.trainer, name)
            ensure(value == expected, f"trainer.{name} = {value}: the table sets it; give {option}")
        yield Planned(task, trials, objects)
