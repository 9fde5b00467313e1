"""A sweep in its folder: what it tries, what became of it, and the best of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fl_lightning.core import require
from fl_lightning.results.metrics import write_table
from fl_lightning.sweeps.file import Metric, Sweep
from fl_lightning.sweeps.hyperband import StopEarly
from fl_lightning.sweeps.search import Settings
from fl_lightning.sweeps.trials import Build, Outcome, Trial, name_of, newest_run, rounds_done, run_trials
from fl_lightning.trainer.run_folder import RunFolder

BATCH = 4
"""Settings that bayes proposes at a time; the same for any number of processes, so that a sweep resumes."""
SEED = "trainer.seed"


class Study:
    """A sweep in its folder.

    Args:
        sweep: What its file says.
        folder: The folder.
        seeds: Values of trainer.seed; each setting runs with all of them, and their mean counts. A sweep that varies
            trainer.seed itself takes 0 alone, and its own.
        seed: Seed of the draws.

    Raises:
        UserError: If seeds are given twice.

    Attributes:
        metric: What is optimised.
        trials: The trials proposed so far.
        outcomes: What became of those that have ended, by name.
    """

    def __init__(self, sweep: Sweep, folder: Path, seeds: Sequence[int], seed: int) -> None:
        self.sweep, self.folder, self.seeds = sweep, folder, list(seeds)
        varied = any(parameter.key == SEED for parameter in sweep.parameters)
        require(not varied or self.seeds == [0], "seeds", self.seeds, f"the sweep varies {SEED} itself; leave it out")
        self.metric = sweep.metric or Metric("server/test/acc", maximize=True)
        self.search = sweep.search(seed)
        self.trials: list[Trial] = []
        self.outcomes: dict[str, Outcome] = {}
        self._settings: list[tuple[Settings, list[Trial]]] = []

    def run(self, build: Build, jobs: int = 1, check: Callable[[Trial], object] | None = None) -> Iterator[Outcome]:
        """Trains all trials, yields each when it has ended, and writes ``sweep.csv`` and ``best.yaml`` at the end.

        Args:
            build: Makes the run of a trial.
            jobs: Number of processes.
            check: Called with a trial of each setting before any is trained; it raises if its arguments are wrong.
        """
        early = None
        if self.sweep.early is not None:
            early = StopEarly(self.sweep.early, self.metric.column, self.metric.sign, self.folder)
        while proposed := self.search.propose(BATCH if self.sweep.method == "bayes" else 10**6):
            new = [(settings, [self._trial(settings, seed) for seed in self.seeds]) for settings in proposed]
            if check is not None:
                for _, of_one in new:
                    check(of_one[0])
            self._settings += new
            trials = [trial for _, of_one in new for trial in of_one]
            self.trials += trials
            for found in run_trials(trials, self.folder, build, jobs, early=early):
                self.outcomes[found.trial.name] = found
                yield found
                self.write()
            for settings, of_one in new:
                value = self.value(of_one)
                self.search.observe(settings, None if value is None else self.metric.sign * value)
            if self._target_reached():
                break

    def value(self, trials: Sequence[Trial]) -> float | None:
        """Mean metric of trials that differ in their seeds; None unless all have finished and measured it."""
        ended = [self.outcomes.get(trial.name) for trial in trials]
        values = [None if o is None or o.error else self.metric.value(o.folder) for o in ended]
        known = [value for value in values if value is not None]
        return mean(known) if len(known) == len(values) else None

    def best(self) -> tuple[Settings, list[Trial], float] | None:
        """The settings with the best mean over their seeds, their trials, and that mean."""
        found = [(settings, of_one, self.value(of_one)) for settings, of_one in self._settings]
        valued = [(settings, of_one, value) for settings, of_one, value in found if value is not None]
        return min(valued, key=lambda item: self.metric.sign * item[2], default=None)

    def state(self, trial: Trial) -> tuple[str, int, float | None]:
        """State of a trial, its rounds done, and its metric so far."""
        ended, folder = self.outcomes.get(trial.name), newest_run(trial, self.folder)
        done, value = rounds_done(folder), self.metric.value(folder)
        if ended is None:
            return ("running" if done else "waiting"), done, value
        return ("failed" if ended.error else "finished"), done, value

    def write(self) -> None:
        """Writes ``sweep.csv``, and the config of the best settings as ``best.yaml``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        keys = [*dict.fromkeys(key for trial in self.trials for key in trial.settings)]
        rows = []
        for trial in self.trials:
            state, done, value = self.state(trial)
            ended = self.outcomes.get(trial.name)
            where = ended.folder if ended else newest_run(trial, self.folder)
            error = ended.error if ended and ended.error else ""
            settings = [trial.settings.get(key, "") for key in keys]
            rows.append([trial.name, *settings, state, done, "" if value is None else value, where or "", error])
        head = ["trial", *keys, "state", "rounds", self.metric.name, "folder", "error"]
        write_table(self.folder / "sweep.csv", head, rows)
        best = self.best()
        config = self.outcomes[best[1][0].name].folder if best else None
        if config is not None and (newest := RunFolder(config).newest_config).exists():
            shutil.copyfile(newest, self.folder / "best.yaml")

    def _trial(self, settings: Mapping[str, Any], seed: int) -> Trial:
        shown = {**settings, SEED: settings.get(SEED, seed)}
        args = (*self.sweep.args, *(f"--{key}={value}" for key, value in shown.items()))
        return Trial(name_of(shown), args, self.sweep.command, shown)

    def _target_reached(self) -> bool:
        best = self.best()
        target, sign = self.metric.target, self.metric.sign
        return best is not None and target is not None and sign * best[2] <= sign * target
