"""Trials: runs with settings of their own. Finished ones are kept, interrupted ones go on where they were."""

import hashlib
import re
import shutil
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import DivergenceError, UnwrittenError, UserError, ensure, folded, grouped, make_folder
from fl_lightning.data import FederatedDataModule
from fl_lightning.results import SUMMARY, config_of, differences, read_run, rounds_done
from fl_lightning.sweeps.workers import train_here, train_in_processes
from fl_lightning.trainer import Callback, FederatedTrainer, InUse, RunFolder, check_unused, locked, loop, parallel_runs

WIDTH = 32
"""Largest number of trials that are trained as one program."""
FAILED = "failed.txt"
"""In a run folder: why its trial failed."""
LOG = "processes.log"
"""In the folder of all trials: what several processes print."""
LOCK = ".lock"
"""In the folder of a trial, hidden from `*` in a shell: held by the process that trains the trial."""
STARTS = 3
"""A trial whose process is killed so many times after the same round is not started again."""
POLL_S = 1.0
"""Seconds between two looks at trials that another process trains."""
PLACE = ("trainer.name", "trainer.default_root_dir")
"""Settings that do not vary between trials."""
NAMED = "each trial has a folder of its own, named after what varies; leave it out"
LONGEST = 150
"""Letters of a trial's name."""
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
        kept: Whether an earlier call has trained it.
    """

    trial: Trial
    folder: Path | None = None
    error: str | None = None
    kept: bool = False


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
Check = Callable[[Trial], Mapping[str, Any]]
"""Returns the resolved config of a trial; raises UserError if its arguments are wrong."""
Early = Callable[[Trial, Collection[str]], Callback]
"""Makes the callback that may end a trial early; it waits for no trial whose name is among the given ones."""


class MustWaitError(Exception):
    """A trial waits for another one, which nobody trains: it breaks off, and goes on after the other one."""


@dataclass(frozen=True)
class Group:
    """Trials that may be one program.

    Attributes:
        trials: The trials.
        ended: Names of the trials that have ended; all groups share this set.
    """

    trials: Sequence[Trial]
    ended: set[str]


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    build: Build,
    jobs: int = 1,
    resume: bool = True,
    early: Early | None = None,
    check: Check | None = None,
) -> Generator[Outcome, None, None]:
    """Trains trials, and yields each when it has ended.

    Those that differ in numbers alone are trained as one program where a measured round of it is faster than their
    rounds one after another. A trial that another process trains, on this machine or on one with the same file system,
    is left to it, and its outcome is awaited. A trial whose process is killed is started again.

    Args:
        trials: The trials, with different names.
        folder: The folder of all; what it holds of earlier calls counts.
        build: Makes the run of a trial; importable by name, if there are several processes.
        jobs: Number of processes.
        resume: Whether finished trials are kept and interrupted ones go on; else each gets a new run folder.
        early: Ends trials early; trials that it waits for must come before, in the order of `in_order`.
        check: Returns the resolved config of a trial, by which a run in its folder is known to be the same trial; None:
            names suffice.

    Raises:
        UserError: If a run in the folder has other settings than its trial, or two trials have one name.
    """
    duplicates = [name for name, times in Counter(trial.name for trial in trials).items() if times > 1]
    ensure(not duplicates, f"{', '.join(duplicates)}: two trials have this name; give them different ones")
    todo, done = [], set[str]()
    for trial in trials:
        if resume and check is not None:
            _check_same(trial, folder, check)
        earlier = outcome(trial, folder) if resume else None
        if earlier is None:
            todo.append(trial)
        else:
            done.add(trial.name)
            yield replace(earlier, kept=True)
    place_of = {trial.name: k for k, trial in enumerate(in_order(trials))}
    todo.sort(key=lambda trial: place_of[trial.name])
    groups = deque(Group(members, done) for members in _groups(todo, -(-len(todo) // jobs) if jobs > 1 else WIDTH))

    def put_back(left: Sequence[Trial]) -> None:
        """Puts trials, each on its own, at their places in the order."""
        ordered = sorted([*groups, *(Group([trial], done) for trial in left)], key=lambda g: place_of[g.trials[0].name])
        groups.clear()
        groups.extend(ordered)

    train = partial(_train, folder, build, resume, early)
    starts: Counter[tuple[str, int]] = Counter()
    training = (
        train_in_processes(train, groups, jobs, make_folder(folder, "folder") / LOG)
        if (jobs > 1 and len(groups) > 1)
        else train_here(train, groups)
    )
    with closing(training):
        for group, outcomes in training:
            done.update(ended.trial.name for ended in outcomes or ())
            yield from outcomes or ()
            left = [trial for trial in group.trials if trial.name not in done]
            if outcomes is not None:
                if len(group.trials) > 1:  # they are no program
                    put_back(left)
                else:  # another process trains it, or one that it waits for
                    groups.extend(Group([trial], done) for trial in left)
                continue
            for trial in left:  # the process was killed, perhaps for the memory that they took together
                start = (trial.name, rounds_done(read_run(newest_run(trial, folder))))
                starts[start] += 1
                if starts[start] < STARTS:
                    put_back([trial])
                else:
                    done.add(trial.name)
                    error = f"its process was killed {STARTS} times after round {start[1]}; has it memory enough?"
                    yield Outcome(trial, newest_run(trial, folder), error)


def outcome(trial: Trial, folder: Path) -> Outcome | None:
    """Returns the outcome of a trial, as its folder shows it; None if it has not ended."""
    newest = newest_run(trial, folder)
    if newest is not None and (newest / FAILED).exists():
        return Outcome(trial, newest, (newest / FAILED).read_text(encoding="utf-8").strip())
    return Outcome(trial, newest) if newest is not None and (newest / SUMMARY).exists() else None


def newest_run(trial: Trial, folder: Path) -> Path | None:
    """Returns the newest run folder of a trial."""
    runs = {path.name.removeprefix("version_"): path for path in (folder / trial.name).glob("version_*")}
    return max((path for k, path in runs.items() if k.isdecimal()), key=lambda path: int(path.name[8:]), default=None)


def name_of(settings: Mapping[str, Any]) -> str:
    """Returns a name for a trial that tries settings, such as ``rho_0.1_seed_0``; no two settings have the same.

    Settings that the name does not spell out, such as a path or a drawn number, give it eight digits of their hash.
    """
    spelled = {key: _spelled(value) for key, value in settings.items()}
    joined = "_".join(f"{key.rpartition('.')[2]}_{value}" for key, value in spelled.items())
    name = "".join(c if c.isalnum() or c in "._-+=" else "-" for c in joined)[:LONGEST]
    in_full = all(
        str(settings[key]) == text and re.fullmatch(r"[A-Za-z0-9.+-]+", text) for key, text in spelled.items()
    )
    if in_full and name == joined:
        return name
    return f"{name}_{hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]}"


def short(value: Any, digits: int = 6) -> str:
    """Returns a setting in a few letters; a class as its name and options."""
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = value.get("init_args") or {}
        options = (
            [f"{key}_{short(arguments[key], digits)}" for key in arguments]
            if isinstance(arguments, Mapping)
            else [str(arguments)]
        )
        return "_".join([str(value["class_path"]).rpartition(".")[2], *options])
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _spelled(value: Any) -> str:
    """Returns a setting as `short` does; a number in full if six digits are enough for it."""
    text = short(value)
    return str(value) if isinstance(value, float) and float(text) == value else text


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Returns trials in the order in which they are trained: those that may be one program come together."""
    return [trial for group in _groups(trials, WIDTH) for trial in group]


def _groups(trials: Sequence[Trial], width: int) -> list[list[Trial]]:
    """Returns the trials in groups that may be one program each."""
    width = min(width, WIDTH)
    by_arguments = grouped(
        (
            tuple(arg for arg in trial.args if not ONE_PROGRAM.fullmatch(arg))
            + (trial.name,) * (trial.command != "fit"),
            trial,
        )
        for trial in trials
    )
    return [group[i : i + width] for group in by_arguments.values() for i in range(0, len(group), width)]


def _check_same(trial: Trial, folder: Path, check: Check) -> None:
    """Checks that the newest run of a trial, if it has one, has the settings of the trial."""
    newest = newest_run(trial, folder)
    if newest is not None and (config := config_of(newest)):
        others = differences(config, check(trial))
        ensure(not others, f"{newest} was trained with {', '.join(others)}; put that back, or take another folder")


def _train(folder: Path, build: Build, resume: bool, early: Early | None, group: Group) -> list[Outcome]:
    """Trains a trial, or a group as one program; returns the outcomes of those that have ended.

    Those are missing that another process trains, the others of a group that is no faster as one program, and those
    that wait for a trial that nobody trains.
    """
    with ExitStack() as locks:
        ended, free = [], []
        for trial in group.trials:
            try:
                locks.enter_context(locked(make_folder(folder / trial.name, "folder"), LOCK))
            except InUse:
                continue
            if resume and (finished := outcome(trial, folder)) is not None:  # another process has finished it
                ended.append(finished)
            else:
                free.append(trial)
        if len(group.trials) == 1 and not ended and not free:
            time.sleep(POLL_S)
        if not free:
            return ended
        not_awaited = {*group.ended, *(trial.name for trial in free)}
        make = partial(_build, folder, build, early, not_awaited)
        return ended + (_together if len(free) > 1 else _alone)(folder, make, resume, free)


def _together(folder: Path, make: Callable[[Trial], Built], resume: bool, trials: Sequence[Trial]) -> list[Outcome]:
    """Trains trials as one program; returns nothing if that is not faster or not possible."""
    try:
        built = [make(trial) for trial in trials]
        first = built[0]
        with first.trainer.environment():
            paths = [_checkpoint(folder, trial, resume) for trial in trials]
            runs = parallel_runs.start([b.trainer for b in built], [b.model for b in built], first.data, paths)
            if not parallel_runs.pays(runs):
                return []
            broken = loop.train(runs, lambda run, error: _remember(run.folder.path, error))
    except (UserError, MustWaitError):
        return []  # they cannot be one program; a mistake in a trial is its own
    except Exception:  # such as one for lack of memory
        traceback.print_exc()
        return []
    return [
        Outcome(trial, _remember(run.folder.path, broken[run]), str(broken[run]))
        if run in broken
        else Outcome(trial, run.folder.path)
        for trial, run in zip(trials, runs, strict=True)
    ]


def _alone(folder: Path, make: Callable[[Trial], Built], resume: bool, trials: Sequence[Trial]) -> list[Outcome]:
    (trial,) = trials
    before = newest_run(trial, folder)
    try:
        built = make(trial)
        train = built.trainer.fit if trial.command == "fit" else built.trainer.centralized
        run = train(built.model, built.data, _checkpoint(folder, trial, resume))
    except MustWaitError:
        return []
    except UserError as error:
        after = newest_run(trial, folder)
        began = after != before or isinstance(error, DivergenceError)
        return [Outcome(trial, _remember(after, error) if began else None, str(error))]
    except Exception as error:  # not remembered: it may lie in the machine, or in code that will be mended
        traceback.print_exc()
        return [Outcome(trial, newest_run(trial, folder), folded(f"{type(error).__name__}: {error}"))]
    return [Outcome(trial, run.folder.path)]


def complain(outcomes: Sequence[Outcome]) -> None:
    """Raises the error of the first trial that failed.

    Raises:
        UserError: If one did.
    """
    if failed := [o for o in outcomes if o.error]:
        where = failed[0].folder or failed[0].trial.name
        raise UserError(f"{len(failed)} of {len(outcomes)} runs broke off; {where}: {failed[0].error}")


def last_metrics(folder: Path | None) -> dict[str, float]:
    """Returns the last value of each metric of a run; none without a run folder."""
    return {name: pairs[-1][1] for name, pairs in read_run(folder).items()}


def check_alone(n: int) -> None:
    """Checks the number of processes of a trial: others would wait for the trials that the first one trains.

    Raises:
        UserError: If there are several.
    """
    ensure(
        n == 1,
        f"trainer.devices: {n} processes; each of several runs is trained by one; set devices and num_nodes to 1",
    )


def _build(folder: Path, build: Build, early: Early | None, not_awaited: Collection[str], trial: Trial) -> Built:
    built = build(trial, folder)
    check_alone(built.trainer.fabric.world_size)
    if early is not None:
        built.trainer.callbacks.append(early(trial, not_awaited))
    return built


def _checkpoint(folder: Path, trial: Trial, resume: bool) -> str | None:
    """Returns the checkpoint from which a trial goes on; a run folder without a checkpoint is removed.

    Raises:
        UserError: If a run that is no trial uses the folder.
    """
    newest = newest_run(trial, folder) if resume else None
    if newest is None:
        return None
    if (last := RunFolder(newest).last).exists():
        return str(last)
    check_unused(newest)
    shutil.rmtree(newest)
    return None


def _remember(folder: Path | None, error: UserError) -> Path | None:
    """Notes in the run folder of a trial, if there is one, why the trial failed; returns that folder."""
    if folder is None or not folder.is_dir():  # a mistake in round 1 leaves none
        return None
    if not isinstance(error, UnwrittenError):  # a disk may have room at the next call
        (folder / FAILED).write_text(f"{error}\n", encoding="utf-8")
    return folder
