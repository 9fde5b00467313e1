"""Every measure of the flatness laboratory as a part that `FlatnessMonitor` and ``fl-lightning flatness`` take by name.

The functions are in `fl_lightning.flatness`; here stands on which model and which data they are taken. Every number is
a `Reading`, which carries the protocol it was measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning import flatness
from fl_lightning.core.errors import UserError, require
from fl_lightning.flatness import Batches, Interrupted, cosine, delta_epsilon, lambda_max, lpf, mean_loss, sharpness
from fl_lightning.trainer import collectives

if TYPE_CHECKING:
    from fl_lightning.algorithms.base import LocalObjective
    from fl_lightning.engine import LocalResult
    from fl_lightning.trainer.trainer import FederatedTrainer

T = TypeVar("T")
Who = Literal["cohort", "all"]
PROTOCOL = "loss without weight decay, eval mode, no augmentation, in the precision of the weights"


@dataclass(frozen=True)
class Reading:
    """One number, and how it was measured.

    Attributes:
        name: What was measured.
        value: The number.
        model: Whose weights.
        data: On what data.
        samples: How many of them; 0 if it needs none.
        residual: Of an eigenvalue: ‖Hv - θv‖ / |θ|.
        error: Of a random estimate: its standard error.
        iterations: Hessian-vector products, ascent steps, or draws.
        settings: Radius and the like.
        details: More than one number: eigenvalues, or values of each client.
    """

    name: str
    value: float
    model: str = "global model"
    data: str = ""
    samples: int = 0
    residual: float | None = None
    error: float | None = None
    iterations: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def protocol(self) -> str:
        """How it was measured, for people."""
        on = f"{self.data} ({self.samples:,})" if self.samples else self.data
        made = [f"{name} {value}" for name, value in self.settings.items()]
        return ", ".join(part for part in (self.model, on, *made) if part)


@dataclass(frozen=True)
class Scene:
    """What the measures look at: a round, or the rehearsal of one.

    Attributes:
        trainer: Whose model, loss and data they are.
        model: The global model that is evaluated, ``(d,)``.
        before: The server's model w^t before the round, ``(d,)``.
        after: The server's model w^{t+1} after it, which the local models were averaged into, ``(d,)``.
        cohort: Clients of the round.
        pseudo_gradient: Δ̃ of the round, ``(d,)``; None if no measure `tracks` it.
        previous: That of the round before; None in the first.
        progress: Told of each Hessian-vector product how many are done, and of how many at most.
    """

    trainer: FederatedTrainer
    model: Tensor
    before: Tensor
    after: Tensor
    cohort: Sequence[int]
    pseudo_gradient: Tensor | None = None
    previous: Tensor | None = None
    progress: Callable[[int, int], None] | None = None

    def train(self, samples: int | None, split: Literal["train", "test"] = "train") -> tuple[Batches, int, str]:
        """This process's share of a split: batches, the number of all samples, and what they are."""
        data, fabric, dtype = self.trainer.data, self.trainer.fabric, self.trainer.dtype
        share = (fabric.global_rank, fabric.world_size)
        if split == "test":
            return partial(data.eval_batches, "test", dtype, share), len(data.y_test), "test set"
        chosen = data.sample_indices(samples, self.trainer.seed)
        which = "training data" if len(chosen) == int(data.client_sizes.sum()) else "training data, stratified sample"
        return partial(data.eval_batches, chosen, dtype, share), len(chosen), which

    def union(self, clients: Sequence[int]) -> tuple[Batches, int, str]:
        """This process's share of some clients' data."""
        data, fabric = self.trainer.data, self.trainer.fabric
        chosen = torch.cat([data.clients[k] for k in clients])
        share = (fabric.global_rank, fabric.world_size)
        what = f"training data of {len(clients)} clients"
        return partial(data.eval_batches, chosen, self.trainer.dtype, share), len(chosen), what

    def reduce(self, mine: Tensor) -> Tensor:
        """Sum over the processes."""
        return collectives.all_reduce_sum(self.trainer.fabric, mine)

    @property
    def at(self) -> dict[str, Any]:
        """Arguments of all functions of `fl_lightning.flatness`; the net gets the evaluated model's statistics."""
        objective = self.trainer.objective
        self.trainer.load_statistics(self.model)
        return {"model": objective.net, "loss": objective.evaluation_loss, "reduce": self.reduce}


def check_statistics(objective: LocalObjective) -> None:
    """Refuse a net whose global model has no running statistics.

    Raises:
        UserError: If every client keeps its own.
    """
    if objective.net_buffers is not None and objective.net_buffers.policy == "local":
        raise UserError(
            "model.buffers = local: the global model has no running statistics to measure its flatness with; use "
            "average or reset, or do not measure it"
        )


class Measure:
    """Base of the measures: told of each local model where it was trained, then asked once on every process.

    Attributes:
        local: Whether it is nothing without local models: in centralized training it is left out.
        tracks: Whether it needs the pseudo-gradient of every round, not only of those that are measured.
    """

    local = False
    tracks = False

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        """A round begins in which it will measure; the trainer's state is that before."""

    def heard(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        """A client has trained on this process."""

    def end(self, scene: Scene) -> list[Reading]:
        """What it reads; the same on every process."""
        raise NotImplementedError


class LambdaMax(Measure):
    """``lambda_max``: the largest eigenvalue of the Hessian at the global model.

    Args:
        samples: Training images, stratified; null: all.
        method: lanczos, or the papers' power iteration (20 steps, largest in magnitude).
        iterations: Most Hessian-vector products; null: 100, of power 20.
        tol: Relative residual to stop at (of power: relative change); null: as `flatness.lambda_max`.
        split: On training data, or on the whole test set as the program of FedGloSS has it.
    """

    def __init__(
        self,
        samples: int | None = 1000,
        method: Literal["lanczos", "power"] = "lanczos",
        iterations: int | None = None,
        tol: float | None = None,
        split: Literal["train", "test"] = "train",
    ) -> None:
        _check(self, samples=samples, iterations=iterations)
        _check_positive(self, tol=tol)
        self.samples, self.method, self.iterations, self.tol, self.split = samples, method, iterations, tol, split

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples, self.split)
        top = lambda_max(
            **scene.at,
            batches=batches,
            at=scene.model,
            method=self.method,
            iterations=self.iterations,
            tol=self.tol,
            seed=scene.trainer.seed,
            progress=scene.progress,
        )
        settings = {"method": self.method}
        return [Reading("lambda_max", top.value, "global model", what, n, top.residual, None, top.iterations, settings)]


class ClientLambdaMax(Measure):
    """``client_lambda_max_local`` and ``_global``: of each local model on its own data, and on those of all.

    These are lambda_1,l and lambda_1,g of FedGloSS's Table 1, and the curves of the ECCV paper's Figure 4: the mean
    over the clients is logged, each client's value goes to ``flatness.jsonl``.

    Args:
        data: Whose data.
        samples: Training images for "global", stratified; null: all. "local" takes all of the client's.
        iterations: Most Hessian-vector products.
        tol: Relative residual to stop at; null: as `flatness.lambda_max`.
    """

    local = True

    def __init__(
        self,
        data: list[Literal["local", "global"]] | None = None,
        samples: int | None = 1000,
        iterations: int = 100,
        tol: float | None = None,
    ) -> None:
        _check(self, samples=samples, iterations=iterations)
        _check_positive(self, tol=tol)
        self.data: list[Literal["local", "global"]] = ["local"] if data is None else data
        self.samples, self.iterations, self.tol = samples, iterations, tol
        self._found: dict[str, dict[int, tuple[float, float, int]]] = {}

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        self._found = {where: {} for where in self.data}

    def heard(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        data, k = trainer.data, result.client
        for where, found in self._found.items():
            chosen = data.clients[k] if where == "local" else data.sample_indices(self.samples, trainer.seed)
            top = lambda_max(
                trainer.objective.net,
                trainer.objective.evaluation_loss,
                partial(data.eval_batches, chosen, trainer.dtype),
                at=result.w,
                iterations=self.iterations,
                tol=self.tol,
                seed=trainer.seed,
            )
            found[k] = (top.value, top.residual, len(chosen))

    def end(self, scene: Scene) -> list[Reading]:
        readings = []
        for where, mine in self._found.items():
            found = dict(sorted(collectives.all_gather_dict(scene.trainer.fabric, mine).items()))
            values, residuals, sizes = zip(*found.values(), strict=True)
            what = f"own data of {len(found)} clients" if where == "local" else "training data"
            readings.append(
                Reading(
                    f"client_lambda_max_{where}",
                    mean(values),
                    "local models",
                    what,
                    sum(sizes) if where == "local" else sizes[0],
                    max(residuals),
                    settings={"mean over": len(found)},
                    details={"clients": dict(zip(map(str, found), values, strict=True))},
                )
            )
        return readings


class Spectrum(Measure):
    """``lambda_1`` to ``lambda_k`` of the Hessian at the global model: the first is logged, and ``lambda_ratio``.

    The ratio is lambda_1 / lambda_5 (ECCV, Table 1); all eigenvalues go to ``flatness.jsonl``.

    Args:
        k: Number of eigenvalues.
        samples: Training images, stratified; null: all.
        method: As for `LambdaMax`.
        iterations: Most Hessian-vector products; null: as `flatness.spectrum`.
        tol: As for `LambdaMax`.
    """

    def __init__(
        self,
        k: int = 50,
        samples: int | None = 1000,
        method: Literal["lanczos", "power"] = "lanczos",
        iterations: int | None = None,
        tol: float | None = None,
    ) -> None:
        _check(self, k=k, samples=samples, iterations=iterations)
        _check_positive(self, tol=tol)
        self.k, self.samples, self.method, self.iterations, self.tol = k, samples, method, iterations, tol

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples)

        def read(found: flatness.Spectrum) -> list[Reading]:
            values = found.values.tolist()
            reading = partial(
                Reading,
                model="global model",
                data=what,
                samples=n,
                residual=float(found.residuals.max()),
                iterations=found.iterations,
                settings={"method": self.method, "k": self.k},
            )
            ratio = [reading("lambda_ratio", found.ratio(5))] if len(values) >= 5 else []
            return [reading("lambda_1", values[0], details={"eigenvalues": values}), *ratio]

        return _kept(read, lambda: flatness.spectrum(
            **scene.at, batches=batches, at=scene.model, k=self.k, method=self.method, iterations=self.iterations,
            tol=self.tol, seed=scene.trainer.seed, progress=scene.progress,
        ))  # fmt: skip


class HessianTrace(Measure):
    """``trace`` of the Hessian at the global model, with its standard error.

    Args:
        method: hutch++ (less variance), or hutchinson as the papers have it.
        probes: Hessian-vector products.
        samples: Training images, stratified; null: all.
    """

    def __init__(
        self, method: Literal["hutch++", "hutchinson"] = "hutch++", probes: int = 60, samples: int | None = 1000
    ) -> None:
        _check(self, probes=probes, samples=samples)
        self.method, self.probes, self.samples = method, probes, samples

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples)

        def read(made: flatness.Estimate) -> list[Reading]:
            settings = {"method": self.method}
            return [Reading("trace", made.value, "global model", what, n, None, made.error, made.samples, settings)]

        return _kept(read, lambda: flatness.trace(
            **scene.at, batches=batches, at=scene.model, method=self.method, samples=self.probes,
            seed=scene.trainer.seed, progress=scene.progress,
        ))  # fmt: skip


class SpectralDensity(Measure):
    """The density of the Hessian's spectrum at the global model; ``density_mean``, tr(H)/d, is logged.

    Args:
        probes: Random vectors.
        steps: Hessian-vector products with each.
        samples: Training images, stratified; null: all.
    """

    def __init__(self, probes: int = 5, steps: int = 60, samples: int | None = 1000) -> None:
        _check(self, probes=probes, steps=steps, samples=samples)
        self.probes, self.steps, self.samples = probes, steps, samples

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples)

        def read(made: flatness.Density) -> list[Reading]:
            nodes, settings = made.nodes, {"probes": self.probes, "steps": self.steps}
            low, high = float(nodes.min()), float(nodes.max())
            sigma = max((high - low) / 100, 1e-12)
            grid = torch.linspace(low - 3 * sigma, high + 3 * sigma, 400, dtype=torch.float64)
            details = {"grid": grid.tolist(), "density": made(grid, sigma).tolist(), "sigma": [sigma]}
            products = self.probes * self.steps
            mean = made.moment(1)
            return [Reading("density_mean", mean, "global model", what, n, None, None, products, settings, details)]

        return _kept(read, lambda: flatness.spectral_density(
            **scene.at, batches=batches, at=scene.model, probes=self.probes, steps=self.steps,
            seed=scene.trainer.seed, progress=scene.progress,
        ))  # fmt: skip


class Discrepancy(Measure):
    """``discrepancy``: FedGF's Definition 1, |S(w^{t+1}) - Σ_i (m_i/m) S_i(w_i)|, with S and ΣS_i beside it.

    S is the sharpness of the aggregated model on training data of all clients, S_i that of a local model on all of its
    client's.

    Args:
        rho: Radius of the sharpness.
        steps: Ascent steps.
        samples: Training images for S, stratified; null: all.
        clients: Local models of the round's cohort, or of all clients, each trained from w^t for this (the global model
            is then their average; the names end in ``_all``).
    """

    def __init__(
        self, rho: float = 0.05, steps: int = 1, samples: int | None = 10_000, clients: Who = "cohort"
    ) -> None:
        _check(self, samples=samples, steps=steps)
        _check_positive(self, rho=rho)
        require(clients in ("cohort", "all"), "measure: Discrepancy.clients", clients, "cohort or all")
        self.rho, self.steps, self.samples, self.clients = rho, steps, samples, clients
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._after: Tensor | None = None

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        self._sums, self._after = torch.zeros(2, dtype=torch.float64), None
        if self.clients == "all" and cohort:
            everyone = list(range(trainer.data.num_clients))
            self._after = trainer.rehearse(everyone, partial(self._add, trainer)).w

    def heard(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        if self.clients == "cohort":
            self._add(trainer, result)

    def _add(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        if result.finite:
            batches = partial(trainer.data.client_eval_batches, result.client, trainer.dtype)
            net, loss = trainer.objective.net, trainer.objective.evaluation_loss
            rise = sharpness(net, loss, batches, self.rho, self.steps, at=result.w)
            self._sums += torch.tensor([result.ctx.n_k * rise, result.ctx.n_k], dtype=torch.float64)

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples)
        w = scene.after if self._after is None else self._after
        rise = sharpness(**scene.at, batches=batches, rho=self.rho, steps=self.steps, at=w)
        end = "" if self.clients == "cohort" else "_all"
        reading = partial(Reading, iterations=self.steps, settings={"rho": self.rho})
        readings = [reading(f"sharpness_global{end}", rise, "aggregated model", what, n)]
        weighted, m = scene.reduce(self._sums.to(scene.model.device)).tolist()
        if m:
            local = weighted / m
            own = f"own data of {'all clients' if self.clients == 'all' else 'the cohort'}"
            readings += [
                reading(f"sharpness_local{end}", local, "local models", own, int(m)),
                reading(f"discrepancy{end}", abs(rise - local), "aggregated and local models", f"{what}; {own}", n),
            ]
        return readings


class Sharpness(Measure):
    """``sharpness_all`` and ``sharpness_cohort``: of the global model on all data and on the cohort's (FedGMT, Eq. 4).

    With ``eta`` ASAM's adaptive sharpness, ``adaptive_sharpness_...``.

    Args:
        data: On whose data.
        rho: Radius.
        steps: Ascent steps.
        samples: Training images of all clients, stratified; null: all. Of the cohort all are taken.
        eta: Added to the absolute weights in the adaptive sharpness; null: the plain one.
    """

    def __init__(
        self,
        data: list[Who] | None = None,
        rho: float = 0.05,
        steps: int = 1,
        samples: int | None = 10_000,
        eta: float | None = None,
    ) -> None:
        _check(self, samples=samples, steps=steps)
        _check_positive(self, rho=rho)
        require(eta is None or eta >= 0, "measure: Sharpness.eta", eta, "0 or more, or null for the plain sharpness")
        self.data: list[Who] = ["all", "cohort"] if data is None else data
        self.rho, self.steps, self.samples, self.eta = rho, steps, samples, eta

    def end(self, scene: Scene) -> list[Reading]:
        readings = []
        prefix = "sharpness" if self.eta is None else "adaptive_sharpness"
        settings = {"rho": self.rho} | ({} if self.eta is None else {"eta": self.eta})
        for who in self.data if scene.cohort else ["all"]:
            batches, n, what = scene.train(self.samples) if who == "all" else scene.union(scene.cohort)
            rise = sharpness(**scene.at, batches=batches, rho=self.rho, steps=self.steps, at=scene.model, eta=self.eta)
            readings.append(Reading(f"{prefix}_{who}", rise, "global model", what, n, None, None, self.steps, settings))
        return readings


class AdaptiveSharpness(Sharpness):
    """``adaptive_sharpness_all`` and ``_cohort``: ASAM's, as `Sharpness`.

    Args:
        rho: Radius, a multiple of |w| + eta.
        eta: Added to the absolute weights.
        **kwargs: As for `Sharpness`.
    """

    def __init__(self, rho: float = 0.5, eta: float = 0.2, **kwargs: Any) -> None:
        super().__init__(rho=rho, eta=eta, **kwargs)


class LPF(Measure):
    """``lpf``: the loss under Gaussian noise on the weights (Bisla et al.; FedGF, Table 2).

    Args:
        sigma: Standard deviation.
        draws: Monte Carlo draws, one pass each.
        scale: Noise of the same size everywhere, or relative to each filter as the authors' program has it.
        samples: Training images, stratified; null: all.
    """

    def __init__(
        self,
        sigma: float = 0.01,
        draws: int = 100,
        scale: Literal["none", "filter"] = "none",
        samples: int | None = 10_000,
    ) -> None:
        _check(self, samples=samples)
        require(draws >= 2, "measure: LPF.draws", draws, "2 or more")
        _check_positive(self, sigma=sigma)
        self.sigma, self.draws, self.scale, self.samples = sigma, draws, scale, samples

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.train(self.samples)
        made = lpf(
            **scene.at,
            batches=batches,
            sigma=self.sigma,
            draws=self.draws,
            at=scene.model,
            scale=self.scale,
            seed=scene.trainer.seed,
        )
        settings = {"sigma": self.sigma, "scale": self.scale}
        name = "lpf" if self.scale == "none" else "lpf_filter"
        return [Reading(name, made.value, "global model", what, n, None, made.error, self.draws, settings)]


class CohortLoss(Measure):
    """``loss_drop_cohort`` and ``loss_gap``: what a round does to the loss on the data of its own clients.

    The drop is F_S(w^t) - F_S(w^{t+1}) on the union of the cohort's data (what is left of FedGMT's Figure 2 in its
    program). The gap is |Σ_k n_k (F_k(w^{t+1}) - F_k(w_k))| / n.
    """

    local = True

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)

    def heard(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        batches = partial(trainer.data.client_eval_batches, result.client, trainer.dtype)
        loss = mean_loss(trainer.objective.net, trainer.objective.evaluation_loss, batches, at=result.w)
        self._sums += torch.tensor([result.ctx.n_k * loss, result.ctx.n_k], dtype=torch.float64)

    def end(self, scene: Scene) -> list[Reading]:
        batches, n, what = scene.union(scene.cohort)
        before, after = (mean_loss(**scene.at, batches=batches, at=w) for w in (scene.before, scene.after))
        weighted, m = scene.reduce(self._sums.to(scene.model.device)).tolist()
        gap = [Reading("loss_gap", abs(after - weighted / m), "aggregated and local models", what, n)] if m else []
        return [Reading("loss_drop_cohort", before - after, "models before and after the round", what, n), *gap]


class Updates(Measure):
    """What a round's models say without data.

    - ``norm_w``: ‖w^{t+1}‖.
    - ``pseudo_gradient_norm``: ‖Δ̃^t‖, Δ̃^t = w̃^t - Σ_k p_k w_k, with w̃^t the model that was sent; and
      ``pseudo_gradient_cosine`` with the last round's.
    - ``drift``: mean ‖w̃^t - w_k‖, D of FedGF. ``distance`` and ``distance_max``: ‖w^{t+1} - w_k‖, the terms of FedGF's
      Theorem 2.
    - ``divergence_previous`` and ``divergence_next``: mean ‖w_k - w^t‖² and ‖w_k - w^{t+1}‖² (FedSMOO, Table 2).
    - ``step_sharpness``: rho ‖w^t - w^{t+1}‖ (FedGMT, Eq. 5).
    - Scalars of the server's state, such as ``server_c`` of FedGF.

    Args:
        rho: Radius of ``step_sharpness``.
    """

    tracks = True

    def __init__(self, rho: float = 0.05) -> None:
        _check_positive(self, rho=rho)
        self.rho = rho
        self._models: list[LocalResult] = []

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        self._models = []

    def heard(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        self._models.append(result)

    def end(self, scene: Scene) -> list[Reading]:
        models, self._models = self._models, []
        mine = {r.client: [float((r.w - w).norm()) for w in (r.received.w, scene.before, scene.after)] for r in models}
        found = collectives.all_gather_dict(scene.trainer.fabric, mine)
        values = {"norm_w": float(scene.after.norm())}
        if found:
            sent, before, after = (list(column) for column in zip(*(found[k] for k in sorted(found)), strict=True))
            values |= {
                "drift": mean(sent),
                "distance": mean(after),
                "distance_max": max(after),
                "divergence_previous": mean(d * d for d in before),
                "divergence_next": mean(d * d for d in after),
                "step_sharpness": self.rho * float((scene.before - scene.after).norm()),
            }
        if scene.pseudo_gradient is not None:
            values["pseudo_gradient_norm"] = float(scene.pseudo_gradient.norm())
            if scene.previous is not None:
                values["pseudo_gradient_cosine"] = cosine(scene.pseudo_gradient, scene.previous)
        values |= {f"server_{name}": float(v) for name, v in scene.trainer.server.items() if v.numel() == 1}
        settings = {"step_sharpness": {"rho": self.rho}}
        data = f"{len(found)} clients" if found else ""
        return [
            Reading(name, v, "models of the round", data, settings=settings.get(name, {})) for name, v in values.items()
        ]


class DeltaEpsilon(Measure):
    """``delta_epsilon``: how far last round's pseudo-gradient is from the true one (FedGloSS, Eq. 6), from 0 to 2 rho.

    For this alone the cohort is trained once more, from the unperturbed global model. ``delta_epsilon_cosine`` is the
    cosine of the two. The first round has no last one.

    Args:
        rho: The server's radius; null: the algorithm's own ``rho``.
    """

    local = True
    tracks = True

    def __init__(self, rho: float | None = None) -> None:
        _check_positive(self, rho=rho)
        self.rho = rho
        self._true: Tensor | None = None

    def begin(self, trainer: FederatedTrainer, cohort: Sequence[int]) -> None:
        rho = getattr(trainer.objective, "rho", None)
        require(
            self.rho is not None or isinstance(rho, (int, float)),
            "measure: DeltaEpsilon.rho",
            self.rho,
            f"{type(trainer.objective).__name__} has no rho of its own, give one",
        )
        mean = PseudoGradient(trainer)
        trainer.rehearse(list(cohort), mean.add, clean=True)
        self._true = mean.value()

    def end(self, scene: Scene) -> list[Reading]:
        true, self._true = self._true, None
        if scene.previous is None or true is None:
            return []
        rho = float(scene.trainer.objective.rho if self.rho is None else self.rho)  # type: ignore[arg-type]
        values = {
            "delta_epsilon": delta_epsilon(scene.previous, true, rho),
            "delta_epsilon_cosine": cosine(scene.previous, true),
        }
        return [
            Reading(n, v, "pseudo-gradients", f"{len(scene.cohort)} clients", settings={"rho": rho})
            for n, v in values.items()
        ]


def default() -> list[Measure]:
    """What is measured if nothing else is asked for."""
    return [LambdaMax(), Discrepancy()]


class PseudoGradient:
    """Δ̃ = w̃ - Σ_k p_k w_k over a cohort, p_k as the algorithm weighs its clients.

    Args:
        trainer: Whose processes share the cohort.
    """

    def __init__(self, trainer: FederatedTrainer) -> None:
        self.trainer = trainer
        self._sum = torch.zeros_like(trainer.server.w)
        self._weight = 0.0

    def add(self, result: LocalResult) -> None:
        """A client has trained on this process; what is not finite counts nothing, as in the average."""
        if result.finite:
            weight = 1.0 if self.trainer.objective.weighting == "uniform" else float(result.ctx.n_k)
            self._sum, self._weight = self._sum + weight * (result.received.w - result.w), self._weight + weight

    def value(self) -> Tensor | None:
        """Δ̃, ``(d,)``, the same on every process; None if there was no client."""
        fabric = self.trainer.fabric
        weight = float(collectives.all_reduce_sum(fabric, self._sum.new_tensor(self._weight, dtype=torch.float64)))
        return collectives.all_reduce_sum(fabric, self._sum) / weight if weight else None


def _kept(read: Callable[[T], list[Reading]], compute: Callable[[], T]) -> list[Reading]:
    """What is read from a computation; if that is interrupted, from what there is, which the exception then holds."""
    try:
        return read(compute())
    except Interrupted as stop:
        raise Interrupted(read(stop.partial)) from None


def _check(measure: Measure, **values: int | None) -> None:
    for name, value in values.items():
        ok = value is None or value >= 1
        require(ok, f"measure: {type(measure).__name__}.{name}", value, "at least 1")


def _check_positive(measure: Measure, **values: float | None) -> None:
    for name, value in values.items():
        require(value is None or value > 0, f"measure: {type(measure).__name__}.{name}", value, "above 0")
