"""The largest eigenvalue of the curvature at each client's model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, Literal

from torch import Tensor

from fl_lightning import flatness
from fl_lightning.core import Positive, PositiveInt, require
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.measurements.base import (
    Clients,
    Measurement,
    MeasurementContext,
    local_loss,
    local_models,
    own_models,
)
from fl_lightning.trainer.measurements.curvature import CurvatureMeasure
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives


class ClientLambdaMax(CurvatureMeasure):
    """``client_lambda_max_local`` and ``_global`` of the local models, on their own data and on that of all clients.

    They are lambda_1,l and lambda_1,g of FedGloSS's Table 1, and the curves of the ECCV paper's Figure 4. The mean over
    the clients is logged; each client's value goes to ``flatness.jsonl``.

    Args:
        data: local, global, or both.
        samples: Size of the stratified sample for "global"; null: all. "local" uses all of the client's data.
        iterations: Maximum number of products.
        tol: Relative residual to stop at; null: as in `flatness.lambda_max`.
        clients: cohort: the local models of the round. all: those of all clients, each trained from w^t for this
            measure; the names then end in ``_all``. own: the clients' own models after the round (`Personal`,
            `Ditto`), of those that have trained; the names then end in ``_own``, and those of the largest in
            ``_own_max``.
        **kwargs: The matrix, as for `CurvatureMeasure`.
    """

    local = True
    of_global_model = False

    def __init__(
        self,
        data: list[Literal["local", "global"]] | None = None,
        samples: PositiveInt | None = 1000,
        iterations: PositiveInt = 100,
        tol: Positive | None = None,
        clients: Clients | Literal["own"] = "cohort",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(data != [], "measure: ClientLambdaMax.data", data, "name local, global or both")
        self.data: list[Literal["local", "global"]] = ["local"] if data is None else data
        self.samples, self.iterations, self.tol, self.clients = samples, iterations, tol, clients

    @property
    def needs_statistics(self) -> bool:  # type: ignore[override]
        return self.clients == "own"  # local models have those of the round

    @property
    def of_round(self) -> bool:
        return self.clients != "own"

    def check(self, run: Run) -> None:
        super().check(run)
        none = "no part gives clients models of their own; choose cohort or all"
        require(self.clients != "own" or run.objective.personal, "measure: ClientLambdaMax.clients", "own", none)

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._found: dict[str, dict[int, tuple[float, float, int]]] = {where: {} for where in self.data}
        if self.clients == "all" and cohort:
            local_models(run, range(run.data.num_clients), partial(self._add, run), len(cohort))

    def update(self, run: Run, result: LocalResult) -> None:
        if self.clients == "cohort":
            self._add(run, result)

    def _add(self, run: Run, result: LocalResult) -> None:
        if result.finite:
            self._at(run, result.client, result.w)

    def _at(self, run: Run, client: int, w: Tensor) -> None:
        for where, found in self._found.items():
            chosen = run.data.clients[client] if where == "local" else run.data.sample_indices(self.samples, run.seed)
            matrix = self.matrix(local_loss(run, client, w, chosen))
            top = flatness.lambda_max(matrix, iterations=self.iterations, tol=self.tol, seed=run.seed)
            found[client] = (top.value, top.residual, len(chosen))

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        measurements, end = [], "" if self.clients == "cohort" else f"_{self.clients}"
        if self.clients == "own":
            self.begin(context.run, ())
            context.run.load_statistics(context.model)
            models = own_models(context.run)
            for client in filter(context.run.clients.owns, models):
                self._at(context.run, client, models[client])
        for where, mine in self._found.items():
            found = collectives.all_gather_dict(context.run.fabric, mine)
            if not found:  # no client has answered
                continue
            values, residuals, sizes = zip(*found.values(), strict=True)
            own = where == "local"
            mean_of = Measurement(
                name=f"{self.prefix}client_lambda_max_{where}{end}",
                value=mean(values),
                model="own models" if self.clients == "own" else "local models",
                data=f"own data of {len(found)} clients" if own else "training data",
                samples=sum(sizes) if own else sizes[0],
                residual=max(residuals),
                settings={"mean over": len(found), **self.protocol},
                details={"clients": dict(zip(map(str, found), values, strict=True))},
            )
            measurements.append(mean_of)
            if self.clients == "own":
                name, settings = f"{mean_of.name}_max", self.protocol
                measurements.append(replace(mean_of, name=name, value=max(values), settings=settings, details={}))
        return measurements
