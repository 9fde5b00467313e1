"""The early end of trials, which depends neither on processes nor on when one of them was killed."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fl_lightning.results import read_run
from fl_lightning.results.metrics import FILE
from fl_lightning.sweeps import trials
from fl_lightning.sweeps.file import Hyperband
from fl_lightning.sweeps.trials import MustWaitError, Trial, newest_run, outcome
from fl_lightning.trainer import Callback, Run, check_interruption, in_use


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
        self.before, self.not_awaited = order[: [of.name for of in order].index(trial.name)], not_awaited
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
            found = (folder / FILE).stat() if folder else None
        except FileNotFoundError:  # somebody has removed the run
            found = None
        if folder is None or found is None:
            return ()
        values = _read(folder, self.metric, (found.st_mtime_ns, found.st_size))
        return [self._loss(value) for value in values]

    def _loss(self, value: float) -> float:
        """Returns a value that is to be small."""
        return self.sign * value if math.isfinite(value) else math.inf


@lru_cache(10_000)
def _read(folder: Path, metric: str, version: tuple[int, int]) -> list[float]:
    """Returns the values of a metric in a run folder; a file is read again only when its version has changed."""
    return [value for _, value in read_run(folder).get(metric, [])]
