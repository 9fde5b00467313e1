"""Measures of curvature: eigenvalues, trace and spectral density of the Hessian, Gauss-Newton or Fisher matrix."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning import flatness
from fl_lightning.core import Positive, PositiveInt, matching, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import Matrix
from fl_lightning.trainer.measurements.base import (
    Clients,
    Measurement,
    MeasurementContext,
    local_loss,
    local_models,
)
from fl_lightning.trainer.measurements.curvature import CurvatureMeasure, GlobalCurvature, own_models
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives

Method = Literal["lanczos", "power"]


class Spectrum(GlobalCurvature):
    """``lambda_1`` to ``lambda_k`` of the Hessian, or another matrix, at the global model.

    The first is logged, and ``lambda_ratio``: lambda_1 / lambda_5 (ECCV, Table 1), undefined if lambda_5 is zero up to
    rounding. All eigenvalues go to ``flatness.jsonl``.

    Args:
        k: Number of eigenvalues.
        samples: Size of the stratified sample of the training data; null: all.
        method: lanczos, or the papers' power iteration (20 steps each, largest in magnitude).
        iterations: Maximum number of products; null: as in `flatness.spectrum`.
        tol: Relative residual to stop at (power: relative change); null: as in `flatness.spectrum`.
        **kwargs: Data and matrix, as for `GlobalCurvature`.
    """

    def __init__(
        self,
        k: PositiveInt = 50,
        samples: PositiveInt | None = 1000,
        method: Method = "lanczos",
        iterations: PositiveInt | None = None,
        tol: Positive | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(samples, **kwargs)
        self.k, self.method, self.iterations, self.tol = k, method, iterations, tol

    def check(self, run: Run) -> None:
        super().check(run)
        spec, shared = self.spec(run), run.objective.shared
        sizes = dict(zip(spec.names, spec.numels, strict=True))
        groups = [block.parameters for block in self.blocks(run)]
        d = min(sum(sizes[name] for name in matching(spec.names, group or shared or ["*"])) for group in groups)
        all_weights = "the net" if shared is None else "the shared part"
        scope = "a layer" if self.by_layer else all_weights if self.parameters is None else "the group"
        require(self.k <= d, f"measure: {type(self).__name__}.k", self.k, f"{scope} has {d} weights; give at most {d}")

    def estimate(self, matrix: Matrix, **options: Any) -> flatness.Spectrum:
        """Returns the spectrum."""
        return flatness.spectrum(
            matrix, k=self.k, method=self.method, iterations=self.iterations, tol=self.tol, **options
        )

    def measurements(self, result: flatness.Spectrum, **common: Any) -> list[Measurement]:
        """Returns ``lambda_1`` with all eigenvalues, and the ratio if there are five."""
        values, residuals = result.values.tolist(), result.residuals.tolist()
        common |= {
            "iterations": result.iterations,
            "settings": {"method": self.method, "k": self.k, **self.protocol},
        }
        measured = [
            Measurement(
                name=f"{self.prefix}lambda_1",
                value=values[0],
                residual=residuals[0],
                details={"eigenvalues": values, "residuals": residuals},
                **common,
            )
        ]
        if len(values) >= 5:
            ratio = result.ratio(5)
            if math.isnan(ratio):
                common |= {"settings": {**common["settings"], "lambda_5": "zero up to rounding"}}
            finite = None if math.isnan(ratio) else ratio
            measured.append(Measurement(name=f"{self.prefix}lambda_ratio", value=finite, **common))
        return measured


class LambdaMax(Spectrum):
    """``lambda_max``: the largest eigenvalue of the Hessian, or another matrix, at the global model.

    Args:
        samples: Size of the stratified sample of the training data; null: all.
        method: lanczos, or the papers' power iteration (20 steps, largest in magnitude).
        iterations: Maximum number of products; null: 110, with power 20.
        tol: Relative residual to stop at (power: relative change); null: as in `flatness.lambda_max`.
        **kwargs: Data and matrix, as for `GlobalCurvature`.
    """

    def __init__(
        self,
        samples: PositiveInt | None = 1000,
        method: Method = "lanczos",
        iterations: PositiveInt | None = None,
        tol: Positive | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(1, samples, method, iterations, tol, **kwargs)

    def measurements(self, result: flatness.Spectrum, **common: Any) -> list[Measurement]:
        """Returns ``lambda_max`` with its residual."""
        value, residual = float(result.values[0]), float(result.residuals[0])
        common |= {"iterations": result.iterations, "settings": {"method": self.method, **self.protocol}}
        return [Measurement(name=f"{self.prefix}lambda_max", value=value, residual=residual, **common)]


class HessianTrace(GlobalCurvature):
    """``trace`` of the Hessian, or another matrix, at the global model, with its standard error.

    Args:
        method: hutch++ (less variance), or hutchinson as in the papers.
        probes: Number of products.
        samples: Size of the stratified sample of the training data; null: all.
        **kwargs: Data and matrix, as for `GlobalCurvature`.
    """

    def __init__(
        self,
        method: Literal["hutch++", "hutchinson"] = "hutch++",
        probes: PositiveInt = 60,
        samples: PositiveInt | None = 1000,
        **kwargs: Any,
    ) -> None:
        super().__init__(samples, **kwargs)
        least = 4 if method == "hutch++" else 2
        require(probes >= least, "measure: HessianTrace.probes", probes, f"{method} needs at least {least}")
        self.method, self.probes = method, probes

    def estimate(self, matrix: Matrix, **options: Any) -> flatness.Estimate:
        """Returns the trace."""
        return flatness.trace(matrix, method=self.method, samples=self.probes, **options)

    def measurements(self, result: flatness.Estimate, **common: Any) -> list[Measurement]:
        """Returns ``trace`` with its standard error."""
        settings = {"method": self.method, **self.protocol}
        common |= {"error": result.error, "iterations": result.samples, "settings": settings}
        return [Measurement(name=f"{self.prefix}trace", value=result.value, **common)]


class SpectralDensity(GlobalCurvature):
    """The density of the spectrum of the Hessian, or another matrix, at the global model.

    It logs ``density_mean``, tr(H)/d, with its standard error. ``flatness.jsonl`` also holds the density, and the first
    three moments, tr(H^p)/d, with their standard errors.

    Args:
        probes: Number of random vectors; the standard error needs two or more.
        steps: Number of products with each, and before them to find the eigenvalues that stand apart.
        samples: Size of the stratified sample of the training data; null: all.
        **kwargs: Data and matrix, as for `GlobalCurvature`.
    """

    def __init__(
        self, probes: PositiveInt = 5, steps: PositiveInt = 50, samples: PositiveInt | None = 1000, **kwargs: Any
    ) -> None:
        super().__init__(samples, **kwargs)
        self.probes, self.steps = probes, steps

    def estimate(self, matrix: Matrix, **options: Any) -> flatness.Density:
        """Returns the density."""
        return flatness.density(matrix, probes=self.probes, steps=self.steps, **options)

    def measurements(self, result: flatness.Density, **common: Any) -> list[Measurement]:
        """Returns ``density_mean``, with the density smoothed by a hundredth of its range on 400 points."""
        nodes = torch.cat([result.eigenvalues, result.nodes.flatten()])
        low, high = float(nodes.min()), float(nodes.max())
        sigma = max((high - low) / 100, 1e-12)
        grid = torch.linspace(low - 3 * sigma, high + 3 * sigma, 400, dtype=torch.float64)
        moments = {p: result.moment(p) for p in (1, 2, 3)}
        common |= {
            "error": moments[1].error if self.probes > 1 else None,
            "iterations": result.products,
            "settings": {"probes": self.probes, "steps": self.steps, **self.protocol},
            "details": {
                "grid": grid.tolist(),
                "density": result(grid, sigma).tolist(),
                "sigma": [sigma],
                "moments": {p: m.value for p, m in moments.items()},
                **({"moment_errors": {p: m.error for p, m in moments.items()}} if self.probes > 1 else {}),
            },
        }
        return [Measurement(name=f"{self.prefix}density_mean", value=moments[1].value, **common)]


class ClientLambdaMax(CurvatureMeasure):
    """``client_lambda_max_local`` and ``_global`` of the local models, on their own data and on that of all clients.

    They are lambda_1,l and lambda_1,g of FedGloSS's Table 1, and the curves of the ECCV paper's Figure 4. The mean over
    the clients is logged; each client's value goes to ``flatness.jsonl``.

    Args:
        data: local, global, or both; null: local.
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
        require(
            self.clients != "own" or run.objective.personal,
            "measure: ClientLambdaMax.clients",
            "own",
            "no part gives clients models of their own; choose cohort or all",
        )

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._found: dict[str, dict[int, tuple[float, float, int]]] = {where: {} for where in self.data}
        if self.clients == "all" and cohort:
            local_models(run, range(run.data.num_clients), partial(self._add, run), len(cohort))

    def update(self, run: Run, result: LocalResult) -> None:
        if self.clients == "cohort":
            self._add(run, result)

    def _add(self, run: Run, result: LocalResult) -> None:
        self._at(run, result.client, result.w)

    def _at(self, run: Run, client: int, w: Tensor) -> None:
        for where, rows in self._found.items():
            chosen = run.data.clients[client] if where == "local" else run.data.sample_indices(self.samples, run.seed)
            matrix = self.matrix(local_loss(run, client, w, chosen))
            top = flatness.lambda_max(matrix, iterations=self.iterations, tol=self.tol, seed=run.seed)
            rows[client] = (top.value, top.residual, len(chosen))

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        measurements, end = [], "" if self.clients == "cohort" else f"_{self.clients}"
        if self.clients == "own":
            self.begin(context.run, ())
            context.run.load_statistics(context.model)
            models = own_models(context.run)
            for client in filter(context.run.clients.owns, models):
                self._at(context.run, client, models[client])
        for where, mine in self._found.items():
            rows = collectives.all_gather_dict(context.run.fabric, mine)
            if not rows:  # no client has answered
                continue
            values, residuals, sizes = zip(*rows.values(), strict=True)
            is_local = where == "local"
            mean_of = Measurement(
                name=f"{self.prefix}client_lambda_max_{where}{end}",
                value=mean(values),
                model="own models" if self.clients == "own" else "local models",
                data=f"own data of {len(rows)} clients" if is_local else "training data",
                samples=sum(sizes) if is_local else sizes[0],
                residual=max(residuals),
                settings={"mean over": len(rows), **self.protocol},
                details={"clients": dict(zip(map(str, rows), values, strict=True))},
            )
            measurements.append(mean_of)
            if self.clients == "own":
                name = f"{mean_of.name}_max"
                measurements.append(replace(mean_of, name=name, value=max(values), settings=self.protocol, details={}))
        return measurements
