"""Critical sharpness along the gradient, the server's update and the clients' updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

from torch import Tensor

from fl_lightning.core import Interval, NonNegativeInt, PositiveInt, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import Crossing, critical_rate, gradient
from fl_lightning.trainer.measurements.base import Measure, Measurement, MeasurementContext, local_loss
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives

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

    By forward passes alone (arXiv:2601.16979); see `fl_lightning.flatness.critical_rate`. The loss is that of a fixed
    sample. The directions D, all in units of a gradient:

    - gradient: that of the sample, at the global model. For a quadratic at most λ_max.
    - server: ``(w^t - w^{t+1}) / (η K)``, at w^t; the name ends in ``_server``.
    - clients: ``(w^t - w_i) / (η K)`` of some clients, at w^t. The name ends in ``_clients`` for the loss of all
      clients, and in ``_own`` for the client's own: they differ as global and local flatness do.

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

    def _rate(self, of: str, at: Mapping[str, Any], direction: Tensor, k_lr: float, slope: float) -> Crossing:
        first, most = self._first.get(of, k_lr or 1.0), MOST_MOVES * k_lr if k_lr else None
        return critical_rate(**at, direction=direction, first=first, highest=most, slope=slope, tol=self.tol)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        batches, n, what = context.train(self.samples)
        fabric, data = context.run.fabric, context.run.data
        common: dict[str, Any] = {"samples": n, "data": what, "settings": {"tol": self.tol}}
        k_lr = collectives.all_gather_dict(fabric, self._k_lr)
        moved = collectives.all_gather_dict(fabric, self._moved)
        self._moved, self._k_lr = {}, {}
        found: list[Measurement] = []
        if "gradient" in self.along:
            at = context.loss(batches)
            g = gradient(**at)
            crossing = self._rate("gradient", at, g, 0.0, float(g @ g))
            found += self._measured("gradient", {0: (crossing, 0.0)}, {**common, "model": "global model"})
        common["model"] = "model before the round"
        directions = {k: (each.direction.to(context.model), each.k_lr) for k, each in moved.items()}
        server = sum(k_lr.values()) / max(len(k_lr), 1) if "server" in self.along else 0.0
        if server or moved:
            at = context.loss(batches, context.old)
            g = gradient(**at)
            if server:
                D = (context.before - context.after) / server
                crossing = self._rate("server", at, D, server, float(g @ D))
                found += self._measured("server", {0: (crossing, server)}, common)
        if moved:
            of_all = {k: (self._rate("clients", at, D, lr, float(g @ D)), lr) for k, (D, lr) in directions.items()}
            own = {k: (each.own, each.k_lr) for k, each in moved.items()}
            samples = sum(int(data.client_sizes[k]) for k in own)
            found += self._measured("clients", of_all, common)
            found += self._measured("own", own, {**common, "samples": samples, "data": "each client's own data"})
        return found

    def _measured(
        self, of: str, crossings: Mapping[int, tuple[Crossing, float]], common: Mapping[str, Any]
    ) -> list[Measurement]:
        """Returns the measurements along some directions; the next search begins at their median rate."""
        rates = {k: each.rate for k, (each, _) in crossings.items()}
        if positive := [rate for rate in rates.values() if rate]:
            self._first[of] = median(positive)
        common = {**common, "iterations": sum(each.evaluations for each, _ in crossings.values())}
        end, middle = "" if of == "gradient" else f"_{of}", median(rates.values())
        sharpness, details = 2 / middle if middle else None, {"rates": rates} if of in ("clients", "own") else {}
        found = [Measurement(name=f"critical_sharpness{end}", value=sharpness, details=details, **common)]
        if of != "gradient":
            moves = median(each.rate / k_lr for each, k_lr in crossings.values())
            found.append(Measurement(name=f"critical_moves{end}", value=moves, **common))
        if of in ("clients", "own"):
            share = 1 - len(positive) / len(rates)
            found.append(Measurement(name=f"critical_ascending{end}", value=share, **common))
        return found
