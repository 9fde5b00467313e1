"""Trials: runs with settings of their own. Finished ones are kept, interrupted ones go on where they were."""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import UserError
from fl_lightning.data import FederatedDataModule
from fl_lightning.results.headline import SUMMARY
from fl_lightning.sweeps.hyperband import StopEarly
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.storage.run_folder import RunFolder
from fl_lightning.trainer.trainer import FederatedTrainer

WIDTH = 32
"""Largest number of trials that are trained as one program."""
FAILED = "failed.txt"
"""In a run folder: why its trial failed."""
ONE_PROGRAM = re.compile(r"--(trainer\.seed|model\.(?!net\.)[\w.]+)=-?[\d.]+(e[+-]?\d+)?")
"""Arguments in which trials of one program may differ."""


@dataclass(frozen=True)
class Trial:
    """One run to make.

    Attributes:
        name: Its name; its run folder is ``name/version_<k>`` in the folder of all.
        args: Arguments of the subcommand.
        command: The subcommand, fit or centralized.
        settings: What it tries, by key, for tables.
    """

    name: str
    args: tuple[str, ...]
    command: str = "fit"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        trial: The trial.
        folder: Its run folder, if it has one.
        error: Why it failed; None if it has finished.
    """

    trial: Trial
    folder: Path | None = None
    error: str | None = None


@dataclass
class Built:
    """A run before its start.

    Attributes:
        trainer: Its trainer.
        model: Its local objective.
        data: Its data.
    """

    trainer: FederatedTrainer
    model: LocalObjective
    data: FederatedDataModule


Build = Callable[[Trial, Path], Built]
"""Makes the run of a trial, in a folder."""


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    build: Build,
    jobs: int = 1,
    resume: bool = True,
    early: StopEarly | None = None,
) -> Iterator[Outcome]:
    """Trains trials, and yields each when it has ended.

    Those that differ in numbers alone are trained as one program where a measured round of it is faster than their
    rounds one after another.

    Args:
        trials: The trials, with different names.
        folder: The folder of all; what it holds of earlier calls counts.
        build: Makes the run of a trial; importable by name, if there are several processes.
        jobs: Number of processes.
        resume: Whether finished trials are kept and interrupted ones go on; else each gets a new run folder.
        early: Ends trials early.
    """
    todo = []
    for trial in trials:
        found = outcome(trial, folder) if resume else None
        if found is None:
            todo.append(trial)
        else:
            yield found
    groups = _groups(todo, -(-len(todo) // jobs) if jobs > 1 else WIDTH)
    train = partial(_train, folder, build, resume, early)
    if jobs == 1 or len(groups) <= 1:
        for group in groups:
            yield from train(group)
        return
    context = multiprocessing.get_context("spawn")
    log = folder / "processes.log"
    folder.mkdir(parents=True, exist_ok=True)
    with context.Pool(min(jobs, len(groups)), _start_process, (str(log),), maxtasksperchild=None) as pool:
        # leaving the block terminates the processes, which save what is done
        for found_all in pool.imap_unordered(train, groups):
            yield from found_all


def outcome(trial: Trial, folder: Path) -> Outcome | None:
    """Returns the outcome of a trial, as its folder shows it; None if it has not ended."""
    newest = newest_run(trial, folder)
    if newest is not None and (newest / FAILED).exists():
        return Outcome(trial, newest, (newest / FAILED).read_text(encoding="utf-8").strip())
    return Outcome(trial, newest) if newest is not None and (newest / SUMMARY).exists() else None


def newest_run(trial: Trial, folder: Path) -> Path | None:
    """Returns the newest run folder of a trial."""
    found = [path for path in (folder / trial.name).glob("version_*") if path.is_dir()]
    return max(found, key=lambda path: int(path.name.removeprefix("version_")), default=None)


def name_of(settings: Mapping[str, Any]) -> str:
    """Returns a name for a trial that tries settings, such as ``rho_0.1_seed_0``."""
    named = "_".join(f"{key.rpartition('.')[2]}_{short(value, 12)}" for key, value in settings.items())
    return "".join(c if c.isalnum() or c in "._-+=" else "-" for c in named)


def short(value: Any, digits: int = 6) -> str:
    """Returns a setting in a few letters; a class as its name and options."""
    if isinstance(value, Mapping) and "class_path" in value:
        options = [f"{key}_{short(option, digits)}" for key, option in (value.get("init_args") or {}).items()]
        return "_".join([str(value["class_path"]).rpartition(".")[2], *options])
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _groups(trials: Sequence[Trial], width: int) -> list[list[Trial]]:
    """Returns the trials in groups that may be one program each."""
    alike: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        alone = (trial.name,) if trial.command != "fit" else ()
        alike.setdefault((*(a for a in trial.args if not ONE_PROGRAM.fullmatch(a)), *alone), []).append(trial)
    width = min(width, WIDTH)
    return [group[i : i + width] for group in alike.values() for i in range(0, len(group), width)]


def _train(folder: Path, build: Build, resume: bool, early: StopEarly | None, trials: Sequence[Trial]) -> list[Outcome]:
    """Trains a group, as one program if that is faster."""
    if len(trials) > 1:
        try:
            together = _together(folder, build, resume, early, trials)
        except UserError:
            together = None  # they cannot be one program; a mistake in a trial is its own
        if together is not None:
            return together
    return [_alone(folder, build, resume, early, trial) for trial in trials]


def _together(
    folder: Path, build: Build, resume: bool, early: StopEarly | None, trials: Sequence[Trial]
) -> list[Outcome] | None:
    made = [_build(folder, build, early, trial) for trial in trials]
    first = made[0]
    with first.trainer.environment():
        paths = [_checkpoint(folder, trial, resume) for trial in trials]
        runs = parallel_runs.start([m.trainer for m in made], [m.model for m in made], first.data, paths)
        if not parallel_runs.pays(runs):
            return None
        broken = parallel_runs.train(runs)
    found = []
    for trial, run in zip(trials, runs, strict=True):
        error = broken.get(run)
        found.append(_failed(trial, run.folder.path, error) if error else Outcome(trial, run.folder.path))
    return found


def _alone(folder: Path, build: Build, resume: bool, early: StopEarly | None, trial: Trial) -> Outcome:
    before = newest_run(trial, folder)
    try:
        made = _build(folder, build, early, trial)
        train = made.trainer.fit if trial.command == "fit" else made.trainer.centralized
        run = train(made.model, made.data, _checkpoint(folder, trial, resume))
    except UserError as error:
        after = newest_run(trial, folder)
        return _failed(trial, after if after != before else None, error)
    return Outcome(trial, run.folder.path)


def _build(folder: Path, build: Build, early: StopEarly | None, trial: Trial) -> Built:
    made = build(trial, folder)
    if early is not None:
        made.trainer.callbacks.append(early)
    return made


def _checkpoint(folder: Path, trial: Trial, resume: bool) -> str | None:
    """Returns the checkpoint from which a trial goes on; a run folder without a checkpoint is removed."""
    newest = newest_run(trial, folder) if resume else None
    if newest is None:
        return None
    last = RunFolder(newest).last
    if last.exists():
        return str(last)
    shutil.rmtree(newest)
    return None


def _failed(trial: Trial, folder: Path | None, error: UserError) -> Outcome:
    if folder is not None:
        (folder / FAILED).write_text(f"{error}\n", encoding="utf-8")
    return Outcome(trial, folder, str(error))


def _start_process(log: str) -> None:
    """Prepares a worker: it gets no signals of the terminal, ends with its parent, and prints to a file."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout = sys.stderr = Path(log).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115  for good
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=follow, daemon=True).start()
