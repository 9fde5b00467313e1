"""Flatness of the global and the local models while they train."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fl_lightning.core.errors import require
from fl_lightning.trainer.callbacks.base import Callback
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.measurements import Measure, PseudoGradient, Reading, Scene, check_statistics, default

if TYPE_CHECKING:
    from pathlib import Path

    from fl_lightning.core.state import RoundContext
    from fl_lightning.engine import LocalResult
    from fl_lightning.trainer.trainer import FederatedTrainer

FILE = "flatness.jsonl"
"""Every reading of a run with its protocol, a line each, in the run folder."""


class FlatnessMonitor(Callback):
    """Logs measures of flatness as ``flatness/<name>``: by default lambda_max of the Hessian and FedGF's discrepancy.

    An eigenvalue's relative residual stands beside it as ``_residual``, a random estimate's standard error as
    ``_error``. Each number goes to ``flatness.jsonl`` with the protocol it was measured by. Loss without weight decay,
    eval mode, no augmentation; the seeded samples stay the same. Processes share the samples evenly.

    Args:
        every_n_rounds: Rounds between two measurements; the last round is always measured.
        metrics: What is measured; null: LambdaMax and Discrepancy, on 1,000 and 10,000 training images.
    """

    def __init__(self, every_n_rounds: int = 10, metrics: list[Measure] | None = None) -> None:
        require(every_n_rounds >= 1, "callbacks: FlatnessMonitor.every_n_rounds", every_n_rounds, "at least 1")
        require(metrics != [], "callbacks: FlatnessMonitor.metrics", metrics, "name some, or null for the default")
        self.every_n_rounds = every_n_rounds
        self.metrics = default() if metrics is None else metrics
        self._tracks = any(metric.tracks for metric in self.metrics)
        self.protocol: list[str] = []
        """How the last round's numbers were measured, a line each; when the run has ended."""
        self._previous: Tensor | None = None
        self._total, self._elapsed, self._started = 0.0, 0.0, time.perf_counter()
        self._rest()

    def _rest(self) -> None:
        """Between the rounds."""
        self._due = False
        self._before: Tensor | None = None
        self._cohort: Sequence[int] = ()
        self._mean: PseudoGradient | None = None
        self._seconds = 0.0

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        check_statistics(trainer.objective)
        self._started = time.perf_counter() - self._elapsed
        if self._previous is not None:
            self._previous = self._previous.to(trainer.fabric.device)
        path = trainer.run_dir / FILE
        if trainer.fabric.is_global_zero and path.exists():
            _rewrite(path, [line for line in read_readings(path) if line["round"] <= trainer.round])

    def on_round_start(self, trainer: FederatedTrainer, ctx: RoundContext, cohort: list[int]) -> None:
        started = time.perf_counter()
        self._rest()
        self._due = (ctx.t + 1) % self.every_n_rounds == 0 or ctx.t + 1 == ctx.rounds
        self._before, self._cohort = trainer.server.w, cohort
        self._mean = PseudoGradient(trainer) if self._tracks else None
        for metric in self._asked():
            metric.begin(trainer, cohort)
        self._seconds += time.perf_counter() - started

    def on_local_end(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        # the local models that the server's step is of
        if result.finite and result.ctx.phase == trainer.objective.phases - 1:
            started = time.perf_counter()
            if self._mean is not None:
                self._mean.add(result)
            for metric in self._asked():
                metric.heard(trainer, result)
            self._seconds += time.perf_counter() - started

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        started = time.perf_counter()
        mean = None if self._mean is None else self._mean.value()
        if self._due:
            before = trainer.server.w if self._before is None else self._before
            scene = Scene(trainer, trainer.global_model, before, trainer.server.w, self._cohort, mean, self._previous)
            readings = [reading for metric in self._asked() for reading in metric.end(scene)]
            self._write(trainer, readings)
            self._seconds += time.perf_counter() - started
            self._total += self._seconds
            share = self._total / (time.perf_counter() - self._started)
            log = scalars(readings) | {"time/flatness_s": self._seconds, "time/flatness_share": share}
            trainer.log(log)
        if self._tracks:
            self._previous = mean

    def _asked(self) -> list[Measure]:
        """What this round is measured by; centralized training has no cohort."""
        return [metric for metric in self.metrics if self._due and (self._cohort or not metric.local)]

    def _write(self, trainer: FederatedTrainer, readings: Sequence[Reading]) -> None:
        if not trainer.fabric.is_global_zero:
            return
        with (trainer.run_dir / FILE).open("a") as file:
            for reading in readings:
                file.write(json.dumps({"round": trainer.round, "seed": trainer.seed, **asdict(reading)}) + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                for reading in readings:
                    for name, rows in tables(reading).items():
                        logger.log_table(f"flatness/{name}", rows, trainer.round)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        path = trainer.run_dir / FILE
        if trainer.fabric.is_global_zero and path.exists():
            last = [line for line in read_readings(path) if line["round"] == trainer.round]
            measured = [Reading(**{k: v for k, v in line.items() if k not in ("round", "seed")}) for line in last]
            self.protocol = [f"{r.name}: {r.protocol()}" for r in measured]

    def state_dict(self) -> dict[str, Any]:
        previous = None if self._previous is None else self._previous.cpu()
        return {"pseudo_gradient": previous, "total": self._total, "elapsed": time.perf_counter() - self._started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._previous, self._total = state.get("pseudo_gradient"), state.get("total", 0.0)
        self._elapsed = state.get("elapsed", 0.0)


def scalars(readings: Sequence[Reading]) -> dict[str, float]:
    """What goes to the loggers, by name."""
    logged: dict[str, float] = {}
    for r in readings:
        logged[f"flatness/{r.name}"] = r.value
        if r.residual is not None:
            logged[f"flatness/{r.name}_residual"] = r.residual
        if r.error is not None:
            logged[f"flatness/{r.name}_error"] = r.error
    return logged


def tables(reading: Reading) -> dict[str, list[dict[str, float]]]:
    """What a reading has beside its value, as rows by name."""
    found = {}
    for name, values in reading.details.items():
        if isinstance(values, Mapping):
            found[f"{reading.name}_{name}"] = [{"key": int(k), "value": v} for k, v in values.items()]
        else:
            found[f"{reading.name}_{name}"] = [{"key": i, "value": v} for i, v in enumerate(values)]
    return found


def read_readings(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``flatness.jsonl``; one that a crash has cut short is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(temporary, path)
