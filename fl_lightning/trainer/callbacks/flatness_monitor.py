"""Flatness of the global and the local models during training."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

from fl_lightning.core import Figure, PositiveInt, RoundContext, earlier, json_text, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness.plots import plot_density, plot_spectrum
from fl_lightning.results.metrics import MEASUREMENTS
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.measurements import (
    Measure,
    Measurement,
    MeasurementContext,
    PseudoGradient,
    check_measures,
    default_measures,
)
from fl_lightning.trainer.round import Round
from fl_lightning.trainer.run import Callback, Run


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
            measurements = numbered([m for measure in self._measures() for m in measure.compute(context)])
            self._write(run, measurements)
            self._seconds += time.perf_counter() - started
            self._total += self._seconds
            run.log(
                {
                    **scalars(measurements),
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
        for measure, saved in zip(self.metrics, known if len(known) == len(self.metrics) else repeat({}), strict=False):
            measure.load_state_dict(saved)
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
            for round in range(run.rounds_done, t + 1):
                run.should_stop = round == t
                again = Round(run, Cohort.draw(run, round), partial(callback.on_local_end, run))
                callback.on_round_start(run, run.round_context(round), again.cohort.clients)
                again.train(run.engine)
                if round < t:
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


def figures(measurements: Sequence[Measurement], label: str) -> dict[str, Callable[[], Figure]]:
    """Returns functions that draw the measured spectra and densities, by name.

    Args:
        measurements: The measurements.
        label: The model's name.
    """
    plots: dict[str, Callable[[], Figure]] = {}
    for m in measurements:  # the names begin with the matrix, unless it is the Hessian
        if "eigenvalues" in m.details:
            plots[m.name.replace("lambda_1", "spectrum")] = partial(plot_spectrum, {label: m.details["eigenvalues"]})
        if "density" in m.details:
            plots[m.name.replace("density_mean", "density")] = partial(
                plot_density, {label: (m.details["grid"], m.details["density"])}
            )
    return plots
