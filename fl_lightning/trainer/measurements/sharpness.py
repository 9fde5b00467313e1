"""Loss near a model: sharpness, critical sharpness, discrepancy, and losses of local models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Interval, NonNegative, NonNegativeInt, Positive, PositiveInt, accumulator_dtype, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import Crossing, critical_rate, gradient, lpf, mean_loss, sharpness
from fl_lightning.trainer.measurements.base import (
    Clients,
    Measure,
    Measurement,
    MeasurementContext,
    dry_round,
    local_loss,
)
from fl_lightning.trainer.measurements.spectra import LambdaMax
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives


class LocalMean(Measure):
    """Base class of measures with a mean over local models, weighted by their samples."""

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)

    def add(self, value: float, result: LocalResult) -> None:
        """Adds a local model's value."""
        self._sums += torch.tensor([result.ctx.n_k * value, result.ctx.n_k], dtype=torch.float64)

    def mean(self, context: MeasurementContext) -> tuple[float, int]:
        """Returns the mean over all processes' clients, and their number of samples; NaN and 0 without clients."""
        device = context.model.device
        sums = self._sums.to(device, accumulator_dtype(device))
        weighted, m = collectives.all_reduce_sum(context.run.fabric, sums).tolist()
        return weighted / m if m else float("nan"), int(m)


class Discrepancy(LocalMean):
    """``discrepancy``: FedGF's Definition 1, |S(w^{t+1}) - Σ_i (m_i/m) S_i(w_i)|; both terms are logged, too.

    S is the sharpness of the aggregated model on the training data of all clients, S_i that of a local model on all of
    its client's data. Definition 1 sums over all clients: that is ``clients: all`` with ``samples: null``. The default
    costs no training: the S_i are measured on the round's cohort only, and S on the data of all clients. With a small
    cohort this is another number, mostly several times smaller.

    Args:
        rho: Radius of the sharpness.
        steps: Number of ascent steps; one is a lower bound, see `fl_lightning.flatness.sharpness`.
        samples: Size of the stratified sample for S; null: all training data.
        clients: cohort: the local models of the round. all: the local models of all clients, each trained from w^t for
            this measure; the global model is then their average, and the names end in ``_all``.
    """

    def __init__(
        self,
        rho: Positive = 0.05,
        steps: PositiveInt = 1,
        samples: PositiveInt | None = 10_000,
        clients: Clients = "cohort",
    ) -> None:
        self.rho, self.steps, self.samples, self.clients = rho, steps, samples, clients

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        super().begin(run, cohort)
        everyone, all_train = range(run.data.num_clients), self.clients == "all" and len(cohort) > 0
        self._after = dry_round(run, everyone, partial(self._add, run)) if all_train else None

    def update(self, run: Run, result: LocalResult) -> None:
        if self.clients == "cohort":
            self._add(run, result)

    def _add(self, run: Run, result: LocalResult) -> None:
        self.add(sharpness(**local_loss(run, result.client, result.w), rho=self.rho, steps=self.steps), result)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        batches, n, description = context.train(self.samples)
        after = context.new if self._after is None else self._after
        rise = sharpness(**context.loss(batches, after), rho=self.rho, steps=self.steps)
        end = "" if self.clients == "cohort" else "_all"
        common: dict[str, Any] = {"iterations": self.steps, "settings": {"rho": self.rho, "steps": self.steps}}
        measurements = [
            Measurement(
                name=f"sharpness_global{end}",
                value=rise,
                model="aggregated model",
                data=description,
                samples=n,
                **common,
            )
        ]
        local, m = self.mean(context)
        if m:
            part = f"the cohort, {len(context.cohort)} of {context.run.data.num_clients}"
            own_data = f"own data of {'all clients' if self.clients == 'all' else part}"
            measurements += [
                Measurement(
                    name=f"sharpness_local{end}", value=local, model="local models", data=own_data, samples=m, **common
                ),
                Measurement(
                    name=f"discrepancy{end}",
                    value=abs(rise - local),
                    model="aggregated and local models",
                    data=f"S_i on {own_data} ({m:,}), S on {description}",
                    samples=n,
                    **common,
                ),
            ]
        return measurements


class Sharpness(Measure):
    """``sharpness_all`` and ``sharpness_cohort`` of the global model, on all data and on the cohort's (FedGMT, Eq. 4).

    With ``eta`` it measures ASAM's adaptive sharpness, and the names begin with ``adaptive_``.

    Args:
        data: all, cohort, or both; null: both.
        rho: Radius.
        steps: Number of ascent steps; one is a lower bound, see `fl_lightning.flatness.sharpness`.
        samples: Size of the stratified sample of all clients' data; null: all. The cohort's data are used whole.
        eta: Added to the absolute weights in the adaptive sharpness; null: the plain one.
    """

    def __init__(
        self,
        data: list[Clients] | None = None,
        rho: Positive = 0.05,
        steps: PositiveInt = 1,
        samples: PositiveInt | None = 10_000,
        eta: NonNegative | None = None,
    ) -> None:
        require(data != [], "measure: Sharpness.data", data, "name all, cohort or both")
        self.data: list[Clients] = ["all", "cohort"] if data is None else data
        self.rho, self.steps, self.samples, self.eta = rho, steps, samples, eta

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        measurements = []
        prefix = "sharpness" if self.eta is None else "adaptive_sharpness"
        settings = {"rho": self.rho, "steps": self.steps} | ({} if self.eta is None else {"eta": self.eta})
        for clients in self.data if context.cohort else ["all"]:
            batches, n, description = context.train(self.samples) if clients == "all" else context.union(context.cohort)
            rise = sharpness(**context.loss(batches), rho=self.rho, steps=self.steps, eta=self.eta)
            measurements.append(
                Measurement(
                    name=f"{prefix}_{clients}",
                    value=rise,
                    data=description,
                    samples=n,
                    iterations=self.steps,
                    settings=settings,
                )
            )
        return measurements


class AdaptiveSharpness(Sharpness):
    """``adaptive_sharpness_all`` and ``_cohort``: ASAM's, as `Sharpness`.

    Args:
        rho: Radius, a multiple of |w| + eta.
        eta: Added to the absolute weights.
        **kwargs: As for `Sharpness`.
    """

    def __init__(self, rho: Positive = 0.5, eta: NonNegative = 0.2, **kwargs: Any) -> None:
        super().__init__(rho=rho, eta=eta, **kwargs)


class LPF(Measure):
    """``lpf``: the loss under Gaussian noise on the weights (Bisla et al.; FedGF, Table 2).

    Args:
        sigma: Standard deviation.
        draws: Number of Monte Carlo draws, one pass each.
        scale: none: noise of the same size everywhere; filter: relative to each filter, as in the authors' program.
        samples: Size of the stratified sample of the training data; null: all.
    """

    def __init__(
        self,
        sigma: Positive = 0.01,
        draws: Annotated[int, Interval("[2, inf)")] = 100,
        scale: Literal["none", "filter"] = "none",
        samples: PositiveInt | None = 10_000,
    ) -> None:
        self.sigma, self.draws, self.scale, self.samples = sigma, draws, scale, samples

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        batches, n, description = context.train(self.samples)
        estimate = lpf(
            **context.loss(batches), sigma=self.sigma, draws=self.draws, scale=self.scale, seed=context.run.seed
        )
        return [
            Measurement(
                name="lpf" if self.scale == "none" else "lpf_filter",
                value=estimate.value,
                data=description,
                samples=n,
                error=estimate.error,
                iterations=self.draws,
                settings={"sigma": self.sigma, "scale": self.scale},
            )
        ]


class CohortLoss(LocalMean):
    """``loss_drop_cohort`` and ``loss_gap``: what a round does to the loss on the data of its own clients.

    The drop is F_S(w^t) - F_S(w^{t+1}) on the union of the cohort's data (FedGMT's Figure 2, as far as its program
    computes it). The gap is |Σ_k n_k (F_k(w^{t+1}) - F_k(w_k))| / n. Clients without a finite local model are left out
    of both, as long as others have one.
    """

    local = True

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        super().begin(run, cohort)
        self._finite: dict[int, bool] = {}

    def update(self, run: Run, result: LocalResult) -> None:
        self._finite[result.client] = True
        self.add(mean_loss(**local_loss(run, result.client, result.w)), result)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        finite = collectives.all_gather_dict(context.run.fabric, self._finite)
        batches, n, description = context.union([k for k in context.cohort if k in finite] or context.cohort)
        before, after = (mean_loss(**context.loss(batches, state)) for state in (context.old, context.new))
        local, m = self.mean(context)
        rows = (
            ("loss_drop_cohort", before - after, "models before and after the round"),
            *([("loss_gap", abs(after - local), "aggregated and local models")] if m else []),
        )
        return [
            Measurement(name=name, value=value, model=model, data=description, samples=n) for name, value, model in rows
        ]


def default_measures(objective: LocalObjective | None = None) -> list[Measure]:
    """Returns the measures that are taken if none are given, of those that an objective has."""
    measures: list[Measure] = [LambdaMax(), Discrepancy()]
    if objective is None or objective.has_global_model:
        return measures
    return [m for m in measures if objective.shared != [] and not m.of_global_model]


MOST_MOVES = 1000
"""A search ends where the whole update is made so many times."""
Along = Literal["gradient", "server", "clients"]


@dataclass
class _Moved:
    """What a client's local training has moved.

    Attributes:
        k_lr: Sum of its learning rates.
        direction: Its update over that sum, ``(d,)``.
        own: The crossing of its own loss along it.
    """

    k_lr: float
    direction: Tensor
    own: Crossing


class CriticalSharpness(Measure):
    """``critical_sharpness``: 2 / η_c, where the loss is back at its value after a step η_c along a direction.

    A search takes forward passes only (arXiv:2601.16979); see `fl_lightning.flatness.critical_rate`. The loss is that
    of a fixed sample. The directions D, all in units of a gradient:

    - gradient: that of the sample, at the global model. For a quadratic at most λ_max.
    - server: ``(w^t - w^{t+1}) / (η K)``, at w^t; the name ends in ``_server``.
    - clients: ``(w - w_i) / (η K)`` of some clients, at w^t; w is what the client received, beside w^t in a method that
      sends another point, such as FedGloSS. The name ends in ``_clients`` for the loss of all clients, and in ``_own``
      for the client's own: they differ as global and local flatness do.

    Over clients it is 2 over the median of η_c, which is 0 where the loss rises at once; the share of these clients is
    ``critical_ascending_clients``, and with half of them or more there is no value. ``critical_moves_...`` is the
    median of η_c / (η K): how many times the whole update can be made before the loss is back at its value, at most
    about 1,000. Below 1 the update itself raises it.

    Args:
        along: The directions; null: all.
        samples: Size of the stratified sample of the training data; null: all.
        clients: Number of clients, the first of the cohort.
        tol: Relative width of the result.
    """

    def __init__(
        self,
        along: list[Along] | None = None,
        samples: PositiveInt | None = 1_000,
        clients: NonNegativeInt = 3,
        tol: Annotated[float, Interval("(0, 0.5]")] = 1 / 16,
    ) -> None:
        require(along != [], "measure: CriticalSharpness.along", along, "name gradient, server or clients")
        self.along: list[Along] = ["gradient", "server", "clients"] if along is None else along
        self.samples, self.clients, self.tol = samples, clients, tol
        self._first: dict[str, float] = {}
        self._moved: dict[int, _Moved] = {}
        self._chosen: list[int] = []
        self._k_lr: dict[int, float] = {}

    def state_dict(self) -> dict[str, float]:
        return dict(self._first)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._first = dict(state)

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._moved, self._k_lr = {}, {}
        self._chosen = [*cohort[: self.clients]] if "clients" in self.along else []

    def update(self, run: Run, result: LocalResult) -> None:
        self._k_lr[result.client] = k_lr = result.ctx.k_lr
        if result.client in self._chosen and k_lr:
            direction = (result.received.w - result.w) / k_lr
            at = local_loss(run, result.client, run.server.w)
            slope = float(gradient(**at) @ direction)
            self._moved[result.client] = _Moved(k_lr, direction.cpu(), self._rate("own", at, direction, k_lr, slope))

    def _rate(self, kind: str, at: Mapping[str, Any], direction: Tensor, k_lr: float, slope: float) -> Crossing:
        first, most = self._first.get(kind, k_lr or 1.0), MOST_MOVES * k_lr if k_lr else None
        return critical_rate(**at, direction=direction, first=first, highest=most, slope=slope, tol=self.tol)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        batches, n, description = context.train(self.samples)
        fabric, data = context.run.fabric, context.run.data
        common: dict[str, Any] = {"samples": n, "data": description, "settings": {"tol": self.tol}}
        k_lr = collectives.all_gather_dict(fabric, self._k_lr)
        moved = collectives.all_gather_dict(fabric, self._moved)
        self._moved, self._k_lr = {}, {}
        measurements: list[Measurement] = []
        if "gradient" in self.along:
            at = context.loss(batches)
            g = gradient(**at)
            crossing = self._rate("gradient", at, g, 0.0, float(g @ g))
            measurements += self._measured("gradient", {0: (crossing, 0.0)}, {**common, "model": "global model"})
        common["model"] = "model before the round"
        directions = {k: (move.direction.to(context.model), move.k_lr) for k, move in moved.items()}
        mean_k_lr = sum(k_lr.values()) / max(len(k_lr), 1) if "server" in self.along else 0.0
        if mean_k_lr or moved:
            at = context.loss(batches, context.old)
            g = gradient(**at)
            if mean_k_lr:
                D = (context.old.w - context.new.w) / mean_k_lr
                crossing = self._rate("server", at, D, mean_k_lr, float(g @ D))
                measurements += self._measured("server", {0: (crossing, mean_k_lr)}, common)
        if moved:
            crossings = {k: (self._rate("clients", at, D, lr, float(g @ D)), lr) for k, (D, lr) in directions.items()}
            own_crossings = {k: (move.own, move.k_lr) for k, move in moved.items()}
            samples = sum(int(data.client_sizes[k]) for k in own_crossings)
            measurements += self._measured("clients", crossings, common)
            measurements += self._measured(
                "own", own_crossings, {**common, "samples": samples, "data": "each client's own data"}
            )
        return measurements

    def _measured(
        self, kind: str, crossings: Mapping[int, tuple[Crossing, float]], common: Mapping[str, Any]
    ) -> list[Measurement]:
        """Returns the measurements along some directions; the next search begins at their median rate."""
        rates = {k: crossing.rate for k, (crossing, _) in crossings.items()}
        if positive := [rate for rate in rates.values() if rate]:
            self._first[kind] = median(positive)
        common = {**common, "iterations": sum(crossing.evaluations for crossing, _ in crossings.values())}
        end, middle = "" if kind == "gradient" else f"_{kind}", median(rates.values())
        sharpness, details = 2 / middle if middle else None, {"rates": rates} if kind in ("clients", "own") else {}
        measurements = [Measurement(name=f"critical_sharpness{end}", value=sharpness, details=details, **common)]
        if kind != "gradient":
            moves = median(crossing.rate / k_lr for crossing, k_lr in crossings.values())
            measurements.append(Measurement(name=f"critical_moves{end}", value=moves, **common))
        if kind in ("clients", "own"):
            measurements.append(
                Measurement(name=f"critical_ascending{end}", value=1 - len(positive) / len(rates), **common)
            )
        return measurements
