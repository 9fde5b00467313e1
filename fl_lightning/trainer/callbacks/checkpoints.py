"""What a run keeps of its rounds: checkpoints, and in memory the vectors of small problems."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fl_lightning.core import PositiveInt, State, ensure
from fl_lightning.engine import LocalResult
from fl_lightning.results.metrics import Mode, mode_of
from fl_lightning.trainer import resume
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.runtime import collectives

PAUSE, SHARE = 30.0, 0.05
"""Seconds between two checkpoints by time; the largest share of a run's time that these take."""


class Checkpoints(Callback):
    """Keeps ``checkpoints/last.ckpt`` in the run folder, and saves the last whole round when a run is interrupted.

    Args:
        every_n_rounds: Rounds between two checkpoints; the last round is always saved. null: about every 30 seconds,
            less often if writing them would take more than a twentieth of the time; with ``keep_all`` every 10 rounds.
        keep_all: Also keep each one as ``checkpoints/round_<n>.ckpt``.
        monitor: Metric whose best round is kept as ``checkpoints/best.ckpt``, such as ``server/test/acc``; null: none.
        mode: Whether the largest (max) or the smallest (min) value is the best; null: the metric or its name decides,
            as an accuracy should be large and a loss small.
        save_top_k: Number of best rounds that are kept. From 2 on, each is also kept as ``checkpoints/round_<n>.ckpt``.

    Attributes:
        best: Value of the monitored metric in each kept round, by round; the best round comes first.

    Raises:
        UserError: If a setting is out of range, or nothing ranks the rounds; or, in a run, if neither the metric nor
            its name says which value is the best.
    """

    def __init__(
        self,
        every_n_rounds: PositiveInt | None = None,
        keep_all: bool = False,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        save_top_k: PositiveInt = 1,
    ) -> None:
        ensure(
            monitor is not None or (mode, save_top_k) == (None, 1),
            "callbacks: Checkpoints.monitor: missing; save_top_k and mode need the metric that ranks rounds",
        )
        self.every_n_rounds = 10 if keep_all and every_n_rounds is None else every_n_rounds
        self.keep_all = keep_all
        self.monitor, self.mode, self.save_top_k = monitor, mode, save_top_k
        self.best: dict[int, float] = {}
        self._saved, self._due = -1, math.inf

    def needs_round(self, t: int) -> bool:
        return self.monitor is not None or (self.every_n_rounds is not None and (t + 1) % self.every_n_rounds == 0)

    def check(self, run: Run) -> None:
        if self.monitor is not None:
            mode_of(self.monitor, self.mode, run.directions)

    def on_fit_start(self, run: Run) -> None:
        self._saved, self._due = run.rounds_done, time.monotonic() + pause(0)

    def save(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Saves the run if it is due, when a round is over and all callbacks have seen it; every process calls.

        Args:
            run: The run.
            metrics: Metrics of the round.

        Raises:
            UserError: If a checkpoint cannot be written.
        """
        if self.monitor is not None:
            value = monitored(run, "Checkpoints", self.monitor, metrics)
            value = run.fabric.broadcast(value) if run.clients.shared else value  # all save, or none
            if value is not None:
                self._keep_best(run, value, mode_of(self.monitor, self.mode, run.directions))
        if run.finished or self._is_due(run):
            self._save(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if run.rounds_done != self._saved and (
            not run.clients.shared or collectives.regroup(run.fabric, run.rounds_done)
        ):
            self._save(run)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = dict(state["best"])

    def _is_due(self, run: Run) -> bool:
        if self.every_n_rounds is not None:
            return run.rounds_done % self.every_n_rounds == 0
        due = time.monotonic() >= self._due
        return run.fabric.broadcast(due) if run.clients.shared else due  # all save, or none

    def _save(self, run: Run) -> None:
        if run.rounds_done == self._saved:
            return
        started = time.monotonic()
        if self.keep_all:  # before last.ckpt: a run that continues from that one does not save this round again
            resume.save(run, self._path(run, run.rounds_done))
        resume.save(run, run.folder.last)
        self._saved, ended = run.rounds_done, time.monotonic()
        self._due = ended + pause(ended - started)

    def _keep_best(self, run: Run, value: float, mode: Mode) -> None:
        """Saves this round if it is among the best, and removes the round that no longer is."""
        sign, scores = -1 if mode == "max" else 1, {**self.best, run.rounds_done: value}
        ranked = sorted((r for r in scores if not math.isnan(scores[r])), key=lambda r: (sign * scores[r], r))
        kept = ranked[: self.save_top_k]
        if run.rounds_done not in kept:
            return
        previous, self.best = self.best, {r: scores[r] for r in kept}
        if self.save_top_k > 1:
            resume.save(run, self._path(run, run.rounds_done), stays=self.keep_all)
        if kept[0] == run.rounds_done:
            resume.save(run, run.folder.best, stays=False)
        if run.fabric.is_global_zero and not self.keep_all and self.save_top_k > 1:
            for dropped in previous.keys() - self.best.keys():
                self._path(run, dropped).unlink(missing_ok=True)

    def _path(self, run: Run, rounds: int) -> Path:
        return run.folder.checkpoints / f"round_{rounds}.ckpt"


def pause(seconds: float) -> float:
    """Returns the seconds until the next checkpoint by time, if writing one takes so many."""
    return max(PAUSE, seconds / SHARE)


def monitored(run: Run, callback: str, name: str, metrics: Mapping[str, float]) -> float | None:
    """Returns this round's value of a metric that a callback monitors; None if it was not measured.

    Args:
        run: The run.
        callback: The callback, for the message.
        name: The metric.
        metrics: All metrics of the round.

    Raises:
        UserError: If every metric has been measured once, and this one is not among them.
    """
    intervals = [run.settings.eval_every, *(getattr(c, "every_n_rounds", None) or 1 for c in run.callbacks)]
    answered = not name.startswith("client/") or "client/train/loss" in run.metrics
    ensure(
        name in run.metrics or not answered or run.rounds_done < min(max(intervals), run.max_rounds),
        f"trainer.callbacks: {callback}.monitor = {name}: no such metric; choose from {', '.join(sorted(run.metrics))}",
    )
    return metrics.get(name)


class Trajectory(Callback):
    """Keeps every round's vectors in memory: for small problems and tests.

    Attributes:
        server: The server's state, at first and after each round; ``server[t].w`` is the global model, ``(d,)``.
        evaluated: The model that is evaluated (with SWA the average), at first and after each round, ``(d,)`` each.
        local: After each round, the local results by client, in cohort order; ``local[t][k].w`` is ``(d,)``.
        client: After each round, all clients' stored states by id.
    """

    def __init__(self) -> None:
        self.server: list[State] = []
        self.evaluated: list[Tensor] = []
        self.local: list[dict[int, LocalResult]] = []
        self.client: list[dict[int, State]] = []
        self._now: dict[int, LocalResult] = {}
        self._first = 0

    def on_fit_start(self, run: Run) -> None:
        for kept in (self.server, self.evaluated, self.local, self.client):
            kept.clear()
        self._now, self._first = {}, run.rounds_done
        self._append(run)

    def _append(self, run: Run) -> None:
        self.server.append(run.server)
        self.evaluated.append(run.global_model)

    def on_exception(self, run: Run, error: BaseException) -> None:
        rounds = run.rounds_done - self._first
        del self.server[rounds + 1 :], self.evaluated[rounds + 1 :], self.local[rounds:], self.client[rounds:]

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        self._now[result.client] = result

    def on_round_end(self, run: Run) -> None:
        self._append(run)
        self.local.append(self._now)
        self.client.append(run.clients.rows())
        self._now = {}
