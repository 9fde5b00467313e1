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
        made: Trainer, model and data of the first of them.
    """

    task: Task
    trials: list[Trial]
    made: Namespace

    @property
    def cohort(self) -> int:
        """Clients of a round; each, without rounds."""
        trainer, m = self.made.trainer, self.made.data.num_clients
        return m if self.task.recipe.command == "centralized" else len(trainer.sampler(0, m, trainer.seed))

    def seconds(self, data: FederatedDataModule, step: prediction.Step) -> float:
        """Estimates the seconds of a run.

        Args:
            data: The data of a task with the same data set and network, set up; here they are divided otherwise.
            step: A step on these data.
        """
        made = self.made
        return step.run(made.trainer, made.model, data, self.cohort * data.num_clients / made.data.num_clients)

    @property
    def rows(self) -> int:
        """Bytes of the clients' state in memory, at most."""
        model, room = self.made.model, self.made.trainer.client_memory * 2**30
        return int(min(room, _row_bytes(model) * self.made.data.num_clients))

    @property
    def samples(self) -> int:
        """Bytes of a published data set's samples, if a run keeps them in memory and they are not loaded here."""
        data = self.made.data
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
    how, paper = _How(settings, seeds_of(seeds), rounds, jobs, dry_run), paper.casefold()
    share = "" if rounds == 1 else f"_{rounds:g}"
    if number := re.fullmatch(r"fig(?:ure)?[. _]*(\d+[a-z]?)", table.lower()):
        ensure(not rows and not columns, f"table = {table}: a figure has rows and columns of its own; leave them out")
        for drawn in figure(paper, number[1]):
            _figure(drawn, Path(out or f"runs/reproduce/{drawn.folder}{share}"), how, points)
        return
    cells = select(paper, table, names(rows), names(columns))
    asked, reasons = tasks(cells)
    answers = [why_not(cell) or "known" for cell in cells]
    for cell, answer in zip(cells, answers, strict=True) if dry_run else ():
        said = f"{cell.metric}: {answer}; in the paper {', '.join(filter(None, (cell.printed, cell.note)))}"
        say(", ".join(filter(None, (column(cell), cell.algorithm, said))))
    for reason in () if dry_run else reasons:
        say(f"not reproduced: {reason}")
    say(f"known: {answers.count('known')} of {len(cells)} cells")
    ensure("known" in answers, f"table = {table}: none of these cells can be reproduced; see docs/experiments.md")
    folder = Path(out or f"runs/reproduce/{paper}_{table.replace('/', '_')}{share}")
    made = _make(asked, folder, how)
    if dry_run:
        return
    lines = [
        *(line(cell, []) for cell in cells if declared(cell) is not None),
        *(line(cell, outcomes, rounds, shlex.join(settings)) for task, outcomes in made.items() for cell in task.cells),
    ]
    write_lines(lines, make_folder(folder))
    show_table(table_of(lines))
    how_measured = " (table.md says how flatness was measured)" if protocols(lines) else ""
    say(f"results: {folder}{how_measured}")


def _figure(drawn: PaperFigure, folder: Path, how: _How, points: int | None) -> None:
    """Makes the runs of a figure, and draws it."""
    for text in drawn.says:
        say(text)
    asked, place = figure_tasks(drawn), folder / f"figure_{drawn.number}"
    if drawn.draws == "partition":
        divided, runs = _partitions(asked, how), {}
    else:
        made = _make(asked, folder, how)
        complain([outcome for outcomes in made.values() for outcome in outcomes])
        runs = {task: [ended.folder for ended in own if ended.folder is not None] for task, own in made.items()}
    if how.dry_run:
        return
    less = [f"{100 * how.fraction:.4g} % of the rounds"] * (how.fraction < 1)
    with noted("; ".join([*drawn.says, *less, *filter(None, [shlex.join(how.settings)])])):
        paths = (
            paper_figures.draw(drawn, runs, place, points)
            if runs
            else save_figure(heat_maps(divided), place / "partition")[1:]
        )
    for path in paths:
        say(f"drawn: {path}")


def _partitions(asked: Sequence[Task], how: _How) -> dict[str, Histogram]:
    """Divides the data of tasks, by name; a dry run shows the commands that would print them."""
    found = dict[str, Histogram]()
    for each in _plan(asked, how):
        cell, data = each.task.cells[0], each.made.data
        if how.dry_run:
            print(command("fl-lightning", "data", *each.trials[0].args), flush=True)
        else:
            data.prepare_data()
            data.setup()
            found[cell.algorithm if each.task.settings else column(cell)] = histogram(data)
    return found


def _make(asked: Sequence[Task], folder: Path, how: _How) -> dict[Task, list[Outcome]]:
    """Makes the runs of tasks that are missing, after an estimate; a dry run shows them and makes none."""
    if not how.dry_run:
        check_folder(folder)
    planned = []
    for each in _plan(asked, how) if asked else ():
        planned.append(each)
        for trial in each.trials if how.dry_run else ():
            print(command("fl-lightning", trial.command, *trial.args), flush=True)
    trials = [trial for each in planned for trial in each.trials]
    unfinished = {each: [trial for trial in each.trials if outcome(trial, folder) is None] for each in planned}
    if todo := {each: [newest_run(trial, folder) for trial in found] for each, found in unfinished.items() if found}:
        _show_estimate(todo, how)
    if how.dry_run:
        return {}
    make_folder(folder)
    outcomes, given = dict[str, Outcome](), shlex.join(how.settings)
    task_of = {trial.name: plan.task for plan in planned for trial in plan.trials}
    for ended in run_trials(trials, folder, build_trial, how.jobs, check=check_trial):
        outcomes[ended.trial.name] = ended
        if ended.folder is not None:
            mark(ended.folder, task_of[ended.trial.name], how.fraction, given)
        say(f"{len(outcomes)} of {len(trials)}: {ended.trial.name}: {ended.error or 'finished'}")
    return {each.task: [outcomes[trial.name] for trial in each.trials] for each in planned}


def _show_estimate(planned: Mapping[Planned, Sequence[Path | None]], how: _How) -> None:
    """Prints what the runs take on this machine; a dry run does not need the data.

    Args:
        planned: For each task, the folders of its runs that have not ended; None for those that have not begun.
        how: How they are made.
    """
    measured: dict[tuple[str, str], tuple[FederatedDataModule, prediction.Step] | None] = {}
    seconds, rows, memory = list[float](), [], 0
    for each, folders in planned.items():
        cell = each.task.cells[0]
        if (kind := (cell.dataset, cell.model)) not in measured:
            measured[kind] = _measured(each, how)
        if (found := measured[kind]) is None:
            continue
        data, step = found
        one, whole = each.seconds(data, step), each.made.trainer.max_rounds
        left = [one * (1 - rounds_done(read_run(folder)) / whole) for folder in folders]
        seconds += left
        memory = max(memory, step.memory + each.rows + each.samples)
        rows.append(
            [
                cell.algorithm,
                column(cell),
                str(len(left)),
                f"{whole:,}",
                prediction.as_time(one),
                prediction.as_time(sum(left)),
            ]
        )
    if not rows:
        return
    heads = ["row", "column", "runs", "rounds", "each", "together"]
    show_table(filled(heads, rows, left=2, title="estimate for this machine"), 2)
    together, at_once = max(max(seconds), sum(seconds) / how.jobs), min(how.jobs, len(seconds))
    say(
        f"{len(seconds)} run{'s'[: len(seconds) - 1]}, about {prediction.as_time(together)} with --jobs {how.jobs}; "
        f"about {prediction.as_bytes(memory * at_once)} of memory"
    )


def _measured(planned: Planned, how: _How) -> tuple[FederatedDataModule, prediction.Step] | None:
    """Measures a step; a dry run does without files, and returns None if it knows no shape."""
    cell, made = planned.task.cells[0], planned.made
    data = made.data
    if how.dry_run:
        try:
            data = prediction.data_like(data)
        except UserError as error:
            say(f"no estimate for {cell.dataset}: {error}")
            return None
    else:
        data.prepare_data()
        data.setup()
    say(f"measuring a step: {cell.dataset}, {cell.model}", flush=True)
    return data, prediction.Step.measure(made.trainer, made.model, data)


def _plan(found: Sequence[Task], how: _How) -> Iterator[Planned]:
    """Builds a run of each task, so that no setting is wrong when they start; a dry run downloads nothing.

    To parse arguments and to make a net takes longer than all else, so each is done once of what several tasks share.
    """
    cli, nets = FederatedCLI("fit", *found[0].whole), dict[str, Module]()
    configs, parts = dict[str, dict[str, Any]](), dict[tuple[str, str], Any]()
    for task in found:
        # parsed, and not built, which may need what the user's settings replace; no column has a number of rounds
        args = prepare([arg for arg in task.whole if arg not in task.recipe.column])
        if (key := said_of(args, "trainer", "model")) not in configs:
            cli.parse_arguments(cli.parser, args)
            configs[key] = cli.resolved()
        config = configs[key]
        downloads = how.dry_run and setting_of(config, "model.net.pretrained") == "torchvision"
        given = ("--model.net.pretrained=null", *how.settings) if downloads else how.settings
        trials, (built, *_) = (task.trials(config, how.fraction, how.seeds, more) for more in (how.settings, given))
        keys = {part: (part, said_of(prepare(built.args), part)) for part in PARTS}
        if not all(key in parts for key in keys.values()):
            made = cli.make(*built.args, nets=nets)
            parts.update((key, made[part]) for part, key in keys.items())
        made = Namespace({part: parts[key] for part, key in keys.items()})  # type: ignore[no-untyped-call]
        fixed = {"max_rounds": scaled_rounds(config, how.fraction), "seed": how.seeds[0]}
        for (key, expected), option in zip(fixed.items(), ("--rounds", "--seeds"), strict=True):
            set_to = getattr(made.trainer, key)
            ensure(set_to == expected, f"trainer.{key} = {set_to}: the table sets it; give {option}")
        yield Planned(task, trials, made)
