"""What a run keeps of its rounds: checkpoints, measures of flatness, and in memory the vectors of small problems."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

from fl_lightning.core import PositiveInt, RoundContext, State, earlier, ensure, json_text, require
from fl_lightning.engine import LocalResult
from fl_lightning.results.metrics import MEASUREMENTS, Mode, mode_of
from fl_lightning.trainer import resume
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.measurements import (
    Measure,
    Measurement,
    MeasurementContext,
    PseudoGradient,
    check_measures,
    default_measures,
    figures,
)
from fl_lightning.trainer.round import Round
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
        before, self.best = self.best, {r: scores[r] for r in kept}
        if self.save_top_k > 1:
            resume.save(run, self._path(run, run.rounds_done), stays=self.keep_all)
        if kept[0] == run.rounds_done:
            resume.save(run, run.folder.best, stays=False)
        if run.fabric.is_global_zero and not self.keep_all and self.save_top_k > 1:
            for dropped in before.keys() - self.best.keys():
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
    every = [run.settings.eval_every, *(getattr(c, "every_n_rounds", None) or 1 for c in run.callbacks)]
    answered = not name.startswith("client/") or "client/train/loss" in run.metrics
    ensure(
        name in run.metrics or not answered or run.rounds_done < min(max(every), run.max_rounds),
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


class FlatnessMonitor(Callback):
    """Logs measures of flatness as ``flatness/<name>``: by default lambda_max of the Hessian and FedGF's discrepancy.

    The relative residual of an eigenvalue is logged with the ending ``_residual``, the standard error of a random
    estimate with ``_error``, and the second number of one name, as of LambdaMax on other data, with ``_2``. Each is in
    ``flatness.jsonl`` with its protocol. The loss has no weight decay, the net is in eval mode, and no sample is
    augmented; the seeded samples are the same in every round, and the processes share them evenly.

    Args:
        every_n_rounds: Rounds between two measurements; the last round is always measured.
        metrics: The measures. null: LambdaMax on 1,000 training images, and Discrepancy on 10,000; ``+=`` adds measures
            to these two.

    Attributes:
        NULL: The values that null stands for, as a config gives them.
    """

    NULL: ClassVar[dict[str, list[str]]] = {"metrics": [type(measure).__name__ for measure in default_measures()]}

    def __init__(self, every_n_rounds: PositiveInt = 10, metrics: list[Measure] | None = None) -> None:
        require(metrics != [], "callbacks: FlatnessMonitor.metrics", metrics, "name some, or null for the default")
        self.every_n_rounds, self._default = every_n_rounds, metrics is None
        self.metrics = default_measures() if metrics is None else metrics
        self._tracks = any(metric.tracks for metric in self.metrics)
        self._previous: Tensor | None = None
        self._rounds = self._due = self._seen = 0  # rounds of the run; the round that is measured, the last one seen
        self.load_state_dict({})

    def needs_round(self, t: int) -> bool:
        return self._is_due(t + 1) or (self._tracks and self._is_due(t + 2))

    def _is_due(self, round: int) -> bool:
        return round % self.every_n_rounds == 0 or round == self._rounds

    def check(self, run: Run) -> None:
        if self._default:
            self.metrics = default_measures(run.objective)
        check_measures(self.metrics, run)

    def on_fit_start(self, run: Run) -> None:
        self._rounds = run.max_rounds
        if not run.rounds_done:
            self.load_state_dict({})  # the monitor may have seen a run of another trainer
        self._previous = None if self._previous is None else self._previous.to(run.server.w)
        if run.fabric.is_global_zero:
            for metric in self.metrics:
                metric.resume(run)
            run.folder.drop_later_rounds(MEASUREMENTS, run.rounds_done)

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
        started = time.perf_counter()
        self._due = (self._is_due(ctx.t + 1) or run.should_stop) * (ctx.t + 1)
        if self._seen < ctx.t:  # the round before was in a program
            self._previous = None
        self._before, self._cohort = run.server, cohort
        self._mean = PseudoGradient(run) if self._tracks else None
        for measure in self._measures():
            measure.begin(run, cohort)
        self._seconds = time.perf_counter() - started

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        # only the local models of the last phase enter the server's step
        if result.finite and result.ctx.phase == run.objective.phases - 1:
            started = time.perf_counter()
            if self._mean is not None:
                self._mean.add(result)
            for measure in self._measures():
                measure.update(run, result)
            self._seconds += time.perf_counter() - started

    def on_round_end(self, run: Run) -> None:
        started = time.perf_counter()
        mean = None if self._mean is None else self._mean.value()
        if self._due == run.rounds_done:  # and not an earlier one, before a program
            context = MeasurementContext(
                run, run.global_model, self._before, run.server, self._cohort, mean, self._previous
            )
            found = numbered([m for measure in self._measures() for m in measure.compute(context)])
            self._write(run, found)
            self._seconds += time.perf_counter() - started
            self._total += self._seconds
            run.log(
                {
                    **scalars(found),
                    "time/flatness_s": self._seconds,
                    "time/flatness_share": self._total / (time.perf_counter() - self._started),
                }
            )
        self._previous, self._seen = mean, run.rounds_done

    def on_last_round(self, run: Run) -> None:
        if self._due != run.rounds_done:
            replay(run, self)

    def _measures(self) -> list[Measure]:
        """Returns the measures that are due; without a cohort (centralized training) those that need none."""
        return [measure for measure in self.metrics if self._due and (self._cohort or not measure.local)]

    @rank_zero_only
    def _write(self, run: Run, measurements: Sequence[Measurement]) -> None:
        for measure in self._measures():
            measure.keep(run)
        with (run.folder.path / MEASUREMENTS).open("a") as file:
            for measurement in measurements:
                file.write(json_text({"round": run.rounds_done, "seed": run.seed, **vars(measurement)}))
        for logger in run.own_loggers:
            show(logger, measurements, run.rounds_done, f"{run.folder.label}, round {run.rounds_done}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "pseudo_gradient": self._previous,
            "seen": self._seen,
            "measures": [measure.state_dict() for measure in self.metrics],
            "total": self._total,
            "elapsed": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._previous, self._seen = state.get("pseudo_gradient"), state.get("seen", 0)
        self._total = state.get("total", 0.0)
        known = state.get("measures", [])
        for measure, of in zip(self.metrics, known if len(known) == len(self.metrics) else repeat({}), strict=False):
            measure.load_state_dict(of)
        self._started = time.perf_counter() - state.get("elapsed", 0.0)


def replay(run: Run, callback: Callback) -> None:
    """Shows a callback the last round again, for one that has not measured it; every process calls.

    The callback returns to its state before the round, and gets the hooks of the round. The cohort trains once more, to
    the same models; the run stays as it is. If a program has ended with the round, its other rounds are shown before.
    """
    t, (before, states) = run.rounds_done - 1, run.before
    if state := states[run.callbacks.index(callback)]:
        callback.load_state_dict(state)
    state_after, rows = run.state, run.clients.rollback()
    run.state = before
    try:
        if run.kind == "centralized":
            callback.on_round_start(run, run.round_context(t), [])
        else:
            for now in range(run.rounds_done, t + 1):
                run.should_stop = now == t
                again = Round(run, Cohort.draw(run, now), partial(callback.on_local_end, run))
                callback.on_round_start(run, run.round_context(now), again.cohort.clients)
                again.train(run.engine)
                if now < t:
                    again.apply()
                    callback.on_round_end(run)
    finally:
        run.apply(state_after, rows)
    callback.on_round_end(run)


def numbered(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns the measurements; the second one of a name, as of LambdaMax on other data, has the ending ``_2``."""
    before = earlier([m.name for m in measurements])
    return [replace(m, name=f"{m.name}_{n + 1}") if n else m for m, n in zip(measurements, before, strict=True)]


def scalars(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Returns the logged metrics, by name."""
    return {
        f"{m.metric}{end}": x
        for m in measurements
        for end, x in (("", m.value), ("_residual", m.residual), ("_error", m.error))
        if x is not None
    }


def show(logger: RunLogger, measurements: Sequence[Measurement], round: int, label: str) -> None:
    """Gives a logger the details of measurements: distributions over clients, and pictures of spectra."""
    for measurement in measurements:
        if clients := measurement.details.get("clients"):
            logger.log_clients(measurement.metric, list(clients.values()), round)
    for name, draw in figures(measurements, label).items():
        logger.log_figure(f"flatness/{name}", draw, round)
