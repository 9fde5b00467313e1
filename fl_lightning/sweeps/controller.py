"""The controller of a sweep: its trials, their outcomes, their early end, and the best settings."""

import math
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import PositiveInt, json_text, make_folder, read_json, require, write_atomically
from fl_lightning.results import SUFFIX, average, config_of, read_run, rounds_done, window_of, write_table
from fl_lightning.results.metrics import FILE
from fl_lightning.sweeps import trials
from fl_lightning.sweeps.file import Hyperband, Objective, Sweep
from fl_lightning.sweeps.parameters import Settings
from fl_lightning.sweeps.trials import (
    NAMED,
    PLACE,
    Build,
    Check,
    Early,
    MustWaitError,
    Outcome,
    Trial,
    in_order,
    name_of,
    newest_run,
    outcome,
    run_trials,
)
from fl_lightning.trainer import PARTITION, Callback, InUse, Run, check_interruption, in_use, locked

BATCH = 4
"""Fewest settings that bayes proposes at a time."""
BATCHES = "batches.json"
"""In the sweep's folder: how many settings bayes has proposed at each time, so that a sweep resumes with other jobs."""
ABOVE_CHANCE = 1.05
"""An accuracy below this many times 1 / classes is called chance: classes of a test set are not all of one size."""
SEED = "trainer.seed"
WRITES = ".writes.lock"
OF_TRIAL = ("name", "default_root_dir", "enable_progress_bar")
"""Settings of a trial that its config would pass on to other runs."""


class Controller:
    """Runs a sweep in its folder.

    Args:
        sweep: The sweep's file.
        folder: The folder.
        seeds: Values of trainer.seed; each setting runs with all of them, and their mean counts. A sweep that varies
            trainer.seed itself takes 0 alone, and its own.
        seed: Seed of the draws.

    Raises:
        UserError: If seeds are given twice, or names or folders of runs are to vary.

    Attributes:
        objective: The metric that is optimised; by default the headline of the test accuracy.
        trials: The trials proposed so far.
        outcomes: The outcomes of those that have ended, by name.
    """

    def __init__(self, sweep: Sweep, folder: Path, seeds: Sequence[int], seed: int) -> None:
        self.sweep, self.folder, self.seeds = sweep, folder, list(seeds)
        varied = any(parameter.key == SEED for parameter in sweep.parameters)
        require(not varied or self.seeds == [0], "seeds", self.seeds, f"the sweep varies {SEED} itself; leave it out")
        for place in PLACE:
            several = any(p.key == place and p.distribution != "constant" for p in sweep.parameters)
            require(not several, "parameters", place, NAMED)
        self.objective = sweep.objective or Objective("server/test/acc_headline", "maximize")
        self.search = sweep.search(seed)
        self.trials: list[Trial] = []
        self.outcomes: dict[str, Outcome] = {}
        self._settings: dict[str, tuple[Settings, list[Trial]]] = {}

    def run(self, build: Build, jobs: int = 1, check: Check | None = None) -> Iterator[Outcome]:
        """Trains all trials, yields each when it has ended, and writes ``sweep.csv`` and ``best.yaml`` after each.

        Settings that are drawn again are one trial. A trial whose metric is not finite has failed. The sweep ends when
        the metric has reached its target, and after the first trial if that has not measured it.

        Args:
            build: Makes the run of a trial.
            jobs: Number of processes.
            check: Returns the config of a trial; see `run_trials`. It is called with a trial of each setting before any
                is trained.

        Raises:
            UserError: If another process runs this sweep by bayes, or a run in the folder has other settings.
        """
        with ExitStack() as stack:
            if self.sweep.method == "bayes":  # what it proposes depends on all that it has seen
                stack.enter_context(locked(make_folder(self.folder)))
            for proposed in self._proposals(jobs):
                candidates = [(settings, [self._trial(settings, seed) for seed in self.seeds]) for settings in proposed]
                known = len(self.trials)
                for settings, repeats in candidates:
                    if check is not None:
                        check(repeats[0])
                    if repeats[0].name not in self._settings:
                        self._settings[repeats[0].name] = settings, repeats
                        self.trials += repeats
                ended = run_trials(self.trials[known:], self.folder, build, jobs, early=self._early(known), check=check)
                stack.enter_context(closing(ended))
                for outcome in ended:
                    value = self.objective.value(outcome.folder)
                    if outcome.error is None and value is not None and not math.isfinite(value):
                        outcome = replace(outcome, error=f"{self.objective.name} = {value}: not finite")
                    self.outcomes[outcome.trial.name] = outcome
                    yield outcome
                    self.write()
                    if self._target_reached() or self._is_unknown():
                        return
                for settings, repeats in candidates:
                    value = self.value(repeats)
                    self.search.observe(settings, None if value is None else self.objective.sign * value)

    def _proposals(self, jobs: int) -> Iterator[list[Settings]]:
        """Yields the settings to try; those of bayes in batches of the sizes that the sweep's folder remembers."""
        if self.sweep.method != "bayes":
            yield self.search.propose(sys.maxsize)
            return
        file = self.folder / BATCHES
        sizes: list[int] = read_json(file, list[PositiveInt], [])
        for k in count():
            proposed = self.search.propose((*sizes[k:], max(BATCH, -(-jobs // len(self.seeds))))[0])
            if not proposed:
                return
            if k == len(sizes):
                sizes.append(len(proposed))
                write_atomically(file, json_text(sizes))
            yield proposed

    def _early(self, known: int) -> Early | None:
        """Returns the rule for the trials after the first ``known`` ones, which have ended."""
        rule, order = self.sweep.early, [*self.trials[:known], *in_order(self.trials[known:])]
        if rule is None:
            return None
        return partial(StopEarly, rule, self.objective.column, self.objective.sign, self.folder, order)

    def value(self, trials: Sequence[Trial]) -> float | None:
        """Returns the mean metric of trials that differ in their seeds; None unless it is finite in all of them."""
        ended = [self.outcomes.get(trial.name) for trial in trials]
        values = [None if o is None or o.error else self.objective.value(o.folder) for o in ended]
        mean = average([math.nan if value is None else value for value in values])
        return mean if math.isfinite(mean) else None

    @property
    def label(self) -> str:
        """The objective's name; that of a headline with the rounds that it covers, as ``server/test/acc, last 20``."""
        column, folders = self.objective.column, (outcome.folder for outcome in self.outcomes.values())
        covered = window_of(filter(None, folders)) if self.objective.name == column + SUFFIX else ""
        return f"{column}, {covered}" if covered else self.objective.name

    def best(self) -> tuple[Settings, list[Trial], float] | None:
        """Returns the settings with the best mean over their seeds, their trials, and that mean."""
        return min(self._valued(), key=lambda candidate: self.objective.sign * candidate[2], default=None)

    def _valued(self) -> list[tuple[Settings, list[Trial], float]]:
        return [
            (settings, repeats, value)
            for settings, repeats in self._settings.values()
            if (value := self.value(repeats)) is not None
        ]

    def doubts(self) -> list[str]:
        """Returns what speaks against the best settings: that others are as good, or that a guess is."""
        if (best := self.best()) is None:
            return []
        (_, repeats, value), valued = best, self._valued()
        lines = []
        if (tied := sum(math.isclose(mean, value) for *_, mean in valued)) > 1:
            lines.append(
                f"a tie: {tied} of {len(valued)} settings reach it, and the first is named; a loss may tell more"
            )
        run = self.outcomes[repeats[0].name].folder
        data = read_json(run / PARTITION, dict[str, Any], {}) if run else {}
        classes = 1 if "unit" in data else data.get("classes", 1)  # a unit: of data without classes
        if re.search(r"/acc(_|$)", self.objective.column) and classes > 1 and value < ABOVE_CHANCE / classes:
            lines.append(f"at chance: a guess among {classes} classes is right in {1 / classes:.4g} of all cases")
        return lines

    def state(self, trial: Trial) -> tuple[str, int, float | None]:
        """Returns the state of a trial, its rounds done, and its metric so far."""
        ended, folder = self.outcomes.get(trial.name), newest_run(trial, self.folder)
        done, value = rounds_done(read_run(folder)), self.objective.value(folder)
        state = ("running" if done else "waiting") if ended is None else "failed" if ended.error else "finished"
        return state, done, value

    def write(self) -> None:
        """Writes ``sweep.csv``, and the config of the best settings as ``best.yaml``."""
        keys = [*dict.fromkeys(key for trial in self.trials for key in trial.settings)]
        rows = []
        for trial in self.trials:
            state, done, value = self.state(trial)
            so_far = self.outcomes.get(trial.name) or Outcome(trial, newest_run(trial, self.folder))
            settings = [trial.settings.get(key, "") for key in keys]
            rows.append([trial.name, *settings, state, done, value, so_far.folder, so_far.error])
        head = ["trial", *keys, "state", "rounds", self.objective.name, "folder", "error"]
        best = self.best()
        run = self.outcomes[best[1][0].name].folder if best else None
        config = config_of(run) if run else {}
        while True:
            with suppress(InUse), locked(self.folder, WRITES):  # other calls on this folder write them, too
                write_table(self.folder / "sweep.csv", head, rows)
                if config:
                    trainer = {key: value for key, value in config["trainer"].items() if key not in OF_TRIAL}
                    text = yaml.safe_dump({**config, "trainer": trainer}, sort_keys=False)
                    write_atomically(self.folder / "best.yaml", text)
                return
            time.sleep(0.02)

    def _trial(self, settings: Mapping[str, Any], seed: int) -> Trial:
        shown = {**settings, SEED: settings.get(SEED, seed)}
        args = (*self.sweep.args, *(f"--{key}={value}" for key, value in shown.items()))
        fixed = {parameter.key for parameter in self.sweep.parameters if parameter.distribution == "constant"}
        varied = {key: value for key, value in shown.items() if key not in fixed - {SEED}}
        return Trial(name_of(varied), args, self.sweep.command, shown)

    def _is_unknown(self) -> bool:
        """Returns whether trials have finished, and none of them has measured the metric."""
        finished = [outcome.folder for outcome in self.outcomes.values() if outcome.error is None]
        return bool(finished) and all(self.objective.value(folder) is None for folder in finished)

    def _target_reached(self) -> bool:
        best = self.best()
        target, sign = self.objective.target, self.objective.sign
        return best is not None and target is not None and sign * best[2] <= sign * target


class StopEarly(Callback):
    """Ends a trial by Hyperband's rule.

    At a bracket a trial is compared with those before it that have reached this bracket. So the decisions are those of
    trials that run one after another, also where several run at once: a trial waits at a bracket for those before it.

    Args:
        rule: The rule.
        metric: The metric, a column of ``metrics.csv``.
        sign: 1 if smaller is better, -1 if larger is. A value that is not finite counts as the worst.
        folder: The folder of all trials.
        order: All trials in their order, which is the same in each call on the folder.
        trial: The trial.
        not_awaited: Names of trials of which what they have reached counts: they have ended, or reach no bracket after
            this one, as they are trained in the same program.
    """

    def __init__(
        self,
        rule: Hyperband,
        metric: str,
        sign: int,
        folder: Path,
        order: Sequence[Trial],
        trial: Trial,
        not_awaited: Collection[str],
    ) -> None:
        self.rule, self.metric, self.sign, self.folder = rule, metric, sign, folder
        self.before, self.not_awaited = order[: [earlier.name for earlier in order].index(trial.name)], not_awaited
        self.own: list[float] = []
        self.stopped = 0
        """The round after which the trial ended; 0: none."""

    def on_fit_start(self, run: Run) -> None:
        self.own = [*self._values(run.folder.path)]
        run.should_stop |= 0 < self.stopped == run.rounds_done

    def on_round_end(self, run: Run) -> None:
        if self.metric not in run.round_metrics:
            return
        self.own.append(self._loss(run.round_metrics[self.metric]))
        reached = len(self.own)
        if reached in self.rule.brackets(reached) and self.rule.stops(
            self.own, [*(self._reached(trial, reached) for trial in self.before), self.own]
        ):
            run.should_stop, self.stopped = True, run.rounds_done

    def state_dict(self) -> dict[str, Any]:
        return {"stopped": self.stopped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stopped = state["stopped"]

    def _reached(self, trial: Trial, evaluations: int) -> Sequence[float]:
        """Returns the values of a trial when it has been evaluated so often, or has ended.

        Raises:
            MustWaitError: If nobody trains it.
        """
        while True:
            ended = trial.name in self.not_awaited or outcome(trial, self.folder) is not None
            values = self._values(newest_run(trial, self.folder))
            if ended or len(values) >= evaluations:
                return values
            if not in_use(self.folder / trial.name, trials.LOCK):
                raise MustWaitError(f"{trial.name} comes first")
            check_interruption()
            time.sleep(trials.POLL_S)

    def _values(self, folder: Path | None) -> Sequence[float]:
        try:
            stat = (folder / FILE).stat() if folder else None
        except FileNotFoundError:  # somebody has removed the run
            stat = None
        if folder is None or stat is None:
            return ()
        return [self._loss(value) for value in _read(folder, self.metric, (stat.st_mtime_ns, stat.st_size))]

    def _loss(self, value: float) -> float:
        """Returns a value that is to be small."""
        return self.sign * value if math.isfinite(value) else math.inf


@lru_cache(10_000)
def _read(folder: Path, metric: str, version: tuple[int, int]) -> list[float]:
    """Returns the values of a metric in a run folder; a file is read again only when its version has changed."""
    return [value for _, value in read_run(folder).get(metric, [])]
