"""``fl-lightning reproduce``: the cells of a paper's table as runs, and our numbers beside the paper's."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.commands.shared.arguments import seeds_of
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.commands.shared.estimate import Planned, show
from fl_lightning.commands.shared.new_files import make_folder
from fl_lightning.commands.shared.output import show_table
from fl_lightning.commands.shared.trials import build
from fl_lightning.core import ensure
from fl_lightning.sweeps import reproduction_table
from fl_lightning.sweeps.fraction import scaled_rounds
from fl_lightning.sweeps.reproduction import Task, line, mark, select, tasks
from fl_lightning.sweeps.trials import outcome, run_trials

SUMMARY = "Reproduce cells of a paper's table: make their runs, and print our numbers beside the paper's."

FILE = "settings.json"
"""In the folder of the runs: the settings that all of them share."""


def run(
    paper: str,
    table: str,
    /,
    *settings: str,
    rows: str | None = None,
    columns: str | None = None,
    seeds: str = "0",
    rounds: float = 1.0,
    jobs: int = 1,
    dry_run: bool = False,
    out: str | None = None,
) -> None:
    """Makes the runs of a table's cells, and a table of their numbers beside the paper's.

    Started again, it makes the runs that are missing, and continues those that were interrupted.

    Args:
        paper: The paper: fedsam, fedsmoo, fedgf, fedgloss or fedgmt.
        table: The number of its table.
        *settings: Settings of a run, such as --data.data_dir DIR or --config FILE: they go to all runs, and win.
        rows: Algorithms as the table names them, such as FedAvg,FedGloSS+SAM; null: all.
        columns: Data set, network, heterogeneity, participation, epochs or metric, such as CIFAR10,alpha=0,alpha=0.05;
            null: all.
        seeds: Seeds of the runs, such as 0,1,2.
        rounds: Fraction of the paper's rounds.
        jobs: Runs at the same time.
        dry_run: Show the runs and what they take, and make none.
        out: Folder of the runs and of table.csv, table.tex and table.md; null: one in runs/reproduce.
    """
    asked, reasons = tasks(select(paper, table, _names(rows), _names(columns)))
    for reason in reasons:
        print(f"not reproduced: {reason}")
    ensure(bool(asked), f"table = {table}: none of these cells can be reproduced; see docs/experiments.md")
    share = "" if rounds == 1 else f"_{rounds:g}"
    folder = Path(out or f"runs/reproduce/{paper}_{table.replace('/', '_')}{share}")
    _check(folder, rounds, settings)
    planned = _plan(asked, rounds, seeds_of(seeds), settings)
    trials = [trial for each in planned for trial in each.trials]
    if dry_run:
        for trial in trials:
            print(shlex.join(["fl-lightning", trial.command, *trial.args]))
    if todo := [each for each in planned if None in [outcome(trial, folder) for trial in each.trials]]:
        show(todo, jobs)
    if dry_run:
        return
    make_folder(folder)
    (folder / FILE).write_text(json.dumps({"rounds": rounds, "settings": settings}) + "\n", encoding="utf-8")
    outcomes = {}
    of = {trial.name: each.task for each in planned for trial in each.trials}
    for found in run_trials(trials, folder, build, jobs):
        outcomes[found.trial.name] = found
        if found.folder is not None:
            mark(found.folder, of[found.trial.name], rounds)
        print(f"{len(outcomes)} of {len(trials)}: {found.trial.name}: {found.error or 'finished'}")
    lines = [
        line(cell, [outcomes[trial.name] for trial in each.trials], rounds)
        for each in planned
        for cell in each.task.cells
    ]
    reproduction_table.write(lines, rounds, folder)
    show_table(reproduction_table.table(lines, rounds))
    print(f"results: {folder}")


def _plan(found: Sequence[Task], fraction: float, seeds: Sequence[int], more: Sequence[str]) -> list[Planned]:
    """Builds a run of each task, so that nothing starts with a setting that does not fit."""
    cli = FederatedCLI("fit", *found[0].whole)
    planned = []
    for task in found:
        config = cli.make(*task.whole).trainer.config
        trials = task.trials(config, fraction, seeds, more)
        made = cli.make(*trials[0].args)
        fixed = {"max_rounds": scaled_rounds(config, fraction), "seed": seeds[0]}
        for (key, expected), option in zip(fixed.items(), ("--rounds", "--seeds"), strict=True):
            value = getattr(made.trainer, key)
            ensure(value == expected, f"trainer.{key} = {value}: the table sets it; give {option}")
        planned.append(Planned(task, trials, made))
    return planned


def _check(folder: Path, rounds: float, settings: Sequence[str]) -> None:
    """Checks that the runs of a folder have the same settings."""
    if (file := folder / FILE).is_file():
        there = json.loads(file.read_text(encoding="utf-8"))
        ensure(
            there == {"rounds": rounds, "settings": list(settings)},
            f"out = {folder}: its runs have --rounds {there['rounds']:g} {shlex.join(there['settings'])}; give another",
        )


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in listed.split(",")] if listed else []
