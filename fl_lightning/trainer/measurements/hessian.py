"""Measures of the Hessian: eigenvalues, trace and spectral density."""

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any, Literal

import torch

from fl_lightning import flatness
from fl_lightning.core import Count, Positive, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import Interrupted
from fl_lightning.trainer import collectives
from fl_lightning.trainer.measurements.base import (
    Measure,
    Measurement,
    MeasurementContext,
    Split,
    local_loss,
)
from fl_lightning.trainer.run import Run

Method = Literal["lanczos", "power"]


class HessianMeasure(Measure):
    """Base class of measures of the Hessian at the global model.

    Attributes:
        samples: Size of the stratified sample of the training data; None: all.
        split: The data.
    """

    samples: int | None
    split: Split = "train"

    def estimate(self, **arguments: Any) -> Any:
        """Calls the function of `fl_lightning.flatness`."""
        raise NotImplementedError

    def measurements(self, found: Any, **common: Any) -> list[Measurement]:
        """The measurements from the function's result.

        Args:
            found: The result, or a partial one after an interrupt.
            **common: Data and number of samples.
        """
        raise NotImplementedError

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        """Returns the measurements.

        Raises:
            Interrupted: On KeyboardInterrupt; ``partial`` holds the measurements from the partial result.
        """
        batches, n, what = context.train(self.samples, self.split)
        arguments = {**context.loss(batches), "seed": context.run.seed, "progress": context.progress}
        try:
            return self.measurements(self.estimate(**arguments), data=what, samples=n)
        except Interrupted as stop:
            raise Interrupted(self.measurements(stop.partial, data=what, samples=n)) from None


class Spectrum(HessianMeasure):
    """``lambda_1`` to ``lambda_k`` of the Hessian at the global model: the first is logged, and ``lambda_ratio``.

    The ratio is lambda_1 / lambda_5 (ECCV, Table 1), undefined if lambda_5 is zero up to rounding; all eigenvalues go
    to ``flatness.jsonl``.

    Args:
        k: Number of eigenvalues.
        samples: Size of the stratified sample of the training data; null: all.
        method: lanczos, or the papers' power iteration (20 steps each, largest in magnitude).
        iterations: Maximum number of Hessian-vector products; null: as in `flatness.spectrum`.
        tol: Relative residual to stop at (power: relative change); null: as in `flatness.spectrum`.
    """

    def __init__(
        self,
        k: Count = 50,
        samples: Count | None = 1000,
        method: Method = "lanczos",
        iterations: Count | None = None,
        tol: Positive | None = None,
    ) -> None:
        self.k, self.samples, self.method, self.iterations, self.tol = k, samples, method, iterations, tol

    def check(self, run: Run) -> None:
        d = run.net.spec.d
        require(self.k <= d, f"measure: {type(self).__name__}.k", self.k, f"the net has {d} weights; give at most {d}")

    def estimate(self, **arguments: Any) -> flatness.Spectrum:
        """The spectrum."""
        return flatness.spectrum(**arguments, k=self.k, method=self.method, iterations=self.iterations, tol=self.tol)

    def measurements(self, found: flatness.Spectrum, **common: Any) -> list[Measurement]:
        """``lambda_1`` with all eigenvalues, and the ratio if there are five."""
        values = found.values.tolist()
        common |= {
            "residual": float(found.residuals.max()),
            "iterations": found.iterations,
            "settings": {"method": self.method, "k": self.k},
        }
        measured = [Measurement(name="lambda_1", value=values[0], details={"eigenvalues": values}, **common)]
        if len(values) >= 5:
            ratio = found.ratio(5)
            if math.isnan(ratio):
                common |= {"settings": {**common["settings"], "lambda_5": "zero up to rounding"}}
            measured.append(Measurement(name="lambda_ratio", value=None if math.isnan(ratio) else ratio, **common))
        return measured


class LambdaMax(Spectrum):
    """``lambda_max``: the largest eigenvalue of the Hessian at the global model.

    Args:
        samples: Size of the stratified sample of the training data; null: all.
        method: lanczos, or the papers' power iteration (20 steps, largest in magnitude).
        iterations: Maximum number of Hessian-vector products; null: 110, with power 20.
        tol: Relative residual to stop at (power: relative change); null: as in `flatness.lambda_max`.
        split: train, or test for the whole test set, as in the program of FedGloSS.
    """

    def __init__(
        self,
        samples: Count | None = 1000,
        method: Method = "lanczos",
        iterations: Count | None = None,
        tol: Positive | None = None,
        split: Split = "train",
    ) -> None:
        super().__init__(1, samples, method, iterations, tol)
        self.split = split

    def measurements(self, found: flatness.Spectrum, **common: Any) -> list[Measurement]:
        """``lambda_max`` with its residual."""
        value, residual = float(found.values[0]), float(found.residuals[0])
        common |= {"iterations": found.iterations, "settings": {"method": self.method}}
        return [Measurement(name="lambda_max", value=value, residual=residual, **common)]


class ClientLambdaMax(Measure):
    """``client_lambda_max_local`` and ``_global``: of each local model on its own data, and on the data of all clients.

    These are lambda_1,l and lambda_1,g of FedGloSS's Table 1, and the curves of the ECCV paper's Figure 4: the mean
    over the clients is logged, each client's value goes to ``flatness.jsonl``.

    Args:
        data: local, global, or both.
        samples: Size of the stratified sample for "global"; null: all. "local" uses all of the client's data.
        iterations: Maximum number of Hessian-vector products.
        tol: Relative residual to stop at; null: as in `flatness.lambda_max`.
    """

    local = True

    def __init__(
        self,
        data: list[Literal["local", "global"]] | None = None,
        samples: Count | None = 1000,
        iterations: Count = 100,
        tol: Positive | None = None,
    ) -> None:
        self.data: list[Literal["local", "global"]] = ["local"] if data is None else data
        self.samples, self.iterations, self.tol = samples, iterations, tol

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._found: dict[str, dict[int, tuple[float, float, int]]] = {where: {} for where in self.data}

    def update(self, run: Run, result: LocalResult) -> None:
        for where, found in self._found.items():
            own = where == "local"
            chosen = run.data.clients[result.client] if own else run.data.sample_indices(self.samples, run.seed)
            top = flatness.lambda_max(
                **local_loss(run, result, chosen), iterations=self.iterations, tol=self.tol, seed=run.seed
            )
            found[result.client] = (top.value, top.residual, len(chosen))

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        measurements = []
        for where, mine in self._found.items():
            found = dict(sorted(collectives.all_gather_dict(context.run.fabric, mine).items()))
            if not found:  # no client has answered
                continue
            values, residuals, sizes = zip(*found.values(), strict=True)
            own = where == "local"
            measurements.append(
                Measurement(
                    name=f"client_lambda_max_{where}",
                    value=mean(values),
                    model="local models",
                    data=f"own data of {len(found)} clients" if own else "training data",
                    samples=sum(sizes) if own else sizes[0],
                    residual=max(residuals),
                    settings={"mean over": len(found)},
                    details={"clients": dict(zip(map(str, found), values, strict=True))},
                )
            )
        return measurements


class HessianTrace(HessianMeasure):
    """``trace`` of the Hessian at the global model, with its standard error.

    Args:
        method: hutch++ (less variance), or hutchinson as in the papers.
        probes: Number of Hessian-vector products.
        samples: Size of the stratified sample of the training data; null: all.
    """

    def __init__(
        self, method: Literal["hutch++", "hutchinson"] = "hutch++", probes: Count = 60, samples: Count | None = 1000
    ) -> None:
        self.method, self.probes, self.samples = method, probes, samples

    def estimate(self, **arguments: Any) -> flatness.Estimate:
        """The trace."""
        return flatness.trace(**arguments, method=self.method, samples=self.probes)

    def measurements(self, found: flatness.Estimate, **common: Any) -> list[Measurement]:
        """``trace`` with its standard error."""
        common |= {"error": found.error, "iterations": found.samples, "settings": {"method": self.method}}
        return [Measurement(name="trace", value=found.value, **common)]


class SpectralDensity(HessianMeasure):
    """The density of the Hessian's spectrum at the global model; ``density_mean``, tr(H)/d, is logged.

    Args:
        probes: Number of random vectors.
        steps: Number of Hessian-vector products with each.
        samples: Size of the stratified sample of the training data; null: all.
    """

    def __init__(self, probes: Count = 5, steps: Count = 60, samples: Count | None = 1000) -> None:
        self.probes, self.steps, self.samples = probes, steps, samples

    def estimate(self, **arguments: Any) -> flatness.Density:
        """The density."""
        return flatness.spectral_density(**arguments, probes=self.probes, steps=self.steps)

    def measurements(self, found: flatness.Density, **common: Any) -> list[Measurement]:
        """``density_mean``, with the density smoothed by a hundredth of its range on 400 points."""
        low, high = float(found.nodes.min()), float(found.nodes.max())
        sigma = max((high - low) / 100, 1e-12)
        grid = torch.linspace(low - 3 * sigma, high + 3 * sigma, 400, dtype=torch.float64)
        common |= {
            "iterations": self.probes * self.steps,
            "settings": {"probes": self.probes, "steps": self.steps},
            "details": {"grid": grid.tolist(), "density": found(grid, sigma).tolist(), "sigma": [sigma]},
        }
        return [Measurement(name="density_mean", value=found.moment(1), **common)]
