"""Base class of the measures, the context they get, the measurements they return; and the measures without data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Checked, Positive, State, accumulator_dtype, ensure, require
from fl_lightning.engine import LocalResult
from fl_lightning.flatness import Batches, Progress, cosine, delta_epsilon
from fl_lightning.results.metrics import protocol
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.round import Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives

Split = Literal["train", "test"]
Clients = Literal["cohort", "all"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number and its protocol. Its numbers may be given as tensors of one value.

    Attributes:
        name: Name of the number; one without a slash is a measure of flatness.
        value: The number; None if it is undefined, as a ratio to zero.
        model: The weights it belongs to.
        data: The data.
        samples: Number of samples; 0 if it needs no data.
        residual: The relative residual ‖Hv - θv‖ / |θ| of an eigenvalue; None for other numbers.
        error: The standard error of a random estimate; None for other numbers.
        iterations: Number of products with the matrix, of ascent steps, or of draws.
        settings: Radius and the like.
        details: Further numbers: eigenvalues, or values of each client.
    """

    name: str
    value: float | None
    model: str = "global model"
    data: str = ""
    samples: int = 0
    residual: float | None = None
    error: float | None = None
    iterations: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("value", "residual", "error"):
            if isinstance(number := getattr(self, name), Tensor):  # such as the loss of an own measure
                object.__setattr__(self, name, float(number))

    @property
    def metric(self) -> str:
        """Its name in the logs."""
        return self.name if "/" in self.name else f"flatness/{self.name}"

    def protocol(self) -> str:
        """Returns model, data and settings in one line."""
        return protocol(vars(self))


@dataclass(frozen=True)
class MeasurementContext:
    """A round to measure, or a dry one.

    Attributes:
        run: The run.
        model: The global model that is evaluated, ``(d,)``.
        old: The server's state before the round.
        new: The server's state after it.
        cohort: Ids of the round's clients.
        pseudo_gradient: Δ̃ of the round, ``(d,)``; None if no measure `tracks` it.
        previous: Δ̃ of the round before; None in the first, and if its local models were not seen.
        progress: Called after each product with a matrix, with the number so far and the maximum.
    """

    run: Run
    model: Tensor
    old: State
    new: State
    cohort: Sequence[int] = ()
    pseudo_gradient: Tensor | None = None
    previous: Tensor | None = None
    progress: Progress | None = None

    @classmethod
    def between_rounds(cls, run: Run, cohort: Sequence[int] = ()) -> "MeasurementContext":
        """Returns the context of a run whose next round has not begun."""
        return cls(run, run.global_model, run.server, run.server, cohort)

    def train(self, samples: int | None, split: Split = "train") -> tuple[Batches, int, str]:
        """Returns samples of a split.

        Args:
            samples: Size of the stratified sample of the training data; None: all.
            split: "train" (of all clients), or "test", of which all are taken.

        Returns:
            This process's share of the batches, the number of all samples, and their description.
        """
        data = self.run.data
        if split == "test":
            return self.share("test"), len(data.y_test), "test set"
        chosen = data.sample_indices(samples, self.run.seed)
        part = "" if len(chosen) == int(data.client_sizes.sum()) else ", stratified sample"
        return self.share(chosen), len(chosen), f"training data of all clients{part}"

    def union(self, clients: Sequence[int]) -> tuple[Batches, int, str]:
        """Returns the data of some clients, as `train` does."""
        clients = list(dict.fromkeys(clients))  # one may be twice in a step of an asynchronous server
        chosen = torch.cat([self.run.data.clients[k] for k in clients])
        many = f"{len(clients)} of {self.run.data.num_clients} clients"
        return self.share(chosen), len(chosen), f"training data of {many}"

    def share(self, split: Tensor | Literal["test"]) -> Batches:
        """Returns this process's share of the test set, or of some training samples, given by their indices."""
        run = self.run
        return partial(run.data.eval_batches, split, run.dtype, (run.fabric.global_rank, run.fabric.world_size))

    def loss(self, batches: Batches, at: Tensor | State | None = None) -> dict[str, Any]:
        """Returns the loss at given weights: the first arguments of the functions of `fl_lightning.flatness`.

        The net gets the statistics that the global model is evaluated with, or those of the given state.

        Args:
            batches: This process's share of the data.
            at: Weights ``(d,)``, or a server's state, of which its model; by default the global model.
        """
        objective, w = self.run.objective, at.w if isinstance(at, State) else at
        if isinstance(at, State):
            self.run.evaluator.load_statistics(at.w, at.get("buffers"))
        else:
            self.run.load_statistics(self.model)
        return {
            "model": objective.net,
            "loss": objective.evaluation_loss,
            "batches": batches,
            "at": self.model if w is None else w,
            "reduce": partial(collectives.all_reduce_sum, self.run.fabric),
        }


class PseudoGradient:
    """Δ̃ = w̃ - Σ_k p_k w_k over a cohort, p_k as the algorithm weights its clients.

    Args:
        run: The run, whose processes share the cohort.
    """

    def __init__(self, run: Run) -> None:
        self.run, self._sum, self._weight = run, torch.zeros_like(run.server.w), 0.0

    def add(self, result: LocalResult) -> None:
        """Adds a finite local result of this process."""
        weight = 1.0 if self.run.objective.weighting == "uniform" else float(result.ctx.n_k)
        self._sum, self._weight = self._sum + weight * (result.received.w - result.w), self._weight + weight

    def value(self) -> Tensor | None:
        """Returns Δ̃, ``(d,)``, the same on every process; None if there was no client."""
        fabric, dtype = self.run.fabric, accumulator_dtype(self._sum.device)
        weight = float(collectives.all_reduce_sum(fabric, self._sum.new_tensor(self._weight, dtype=dtype)))
        return collectives.all_reduce_sum(fabric, self._sum) / weight if weight else None


class Measure(Checked, key="measure: {}"):
    """Base class of measures: `update` sees every local model of a round, and `compute` returns the measurements.

    Attributes:
        local: Whether it needs local models: centralized training leaves it out.
        of_global_model: Whether it needs a global model.
        needs_statistics: Whether it measures with running statistics of the global model, if the net keeps any.
        tracks: Whether it needs the pseudo-gradient of a measured round, and of the one before.
    """

    local = False
    of_global_model = True
    needs_statistics = True
    tracks = False

    @property
    def of_round(self) -> bool:
        """Whether it measures what happens in a round, so that a checkpoint alone does not do."""
        return type(self).update is not Measure.update or self.tracks

    def check(self, run: Run) -> None:
        """Raises a `UserError` if the measure does not suit the run; called before anything is measured."""

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        """Prepares for a measured round, when it begins, from the run's state before it."""

    def update(self, run: Run, result: LocalResult) -> None:
        """Takes a client's local result, if it is finite, on the process that trained the client."""

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        """Returns the measurements, the same on every process; every process calls."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next measurement needs of the ones before; a checkpoint has it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; an empty one: as before the first measurement."""

    def keep(self, run: Run) -> None:
        """Writes further files of a measured round to the run folder; rank 0 calls it after `compute`."""

    def resume(self, run: Run) -> None:
        """Removes rounds after ``run.rounds_done`` from the files of `keep`; rank 0 calls it when a run begins."""


def check_statistics(objective: LocalObjective) -> None:
    """Checks that the global model has running statistics, if its net keeps any.

    Raises:
        UserError: If every client keeps its own.
    """
    ensure(
        objective.net_buffers is None or objective.net_buffers.policy != "local",
        "model.buffers = local: the global model has no running statistics to measure its flatness with; use "
        "average or reset, or do not measure it",
    )


def local_loss(run: Run, client: int, w: Tensor, chosen: Tensor | None = None) -> dict[str, Any]:
    """Returns the loss at a client's model: the first arguments of the functions of `fl_lightning.flatness`.

    Args:
        run: The run; its net holds the client's buffers.
        client: The client.
        w: Its model, ``(d,)``.
        chosen: Indices into the training data; by default the client's own.
    """
    batches = partial(run.data.eval_batches, run.data.clients[client] if chosen is None else chosen, run.dtype)
    return {
        "model": run.objective.net, "loss": run.objective.evaluation_loss, "batches": batches, "at": w
    }  # fmt: skip


def dry_round(
    run: Run, clients: Sequence[int], on_result: Callable[[LocalResult], object], perturb: bool = True
) -> State:
    """Trains clients as the next round would; the run stays as it is. Every process calls.

    After the last round, its minibatches and learning rate are used again.

    Args:
        run: The run.
        clients: Ids of the clients; needs memory for as many local models.
        on_result: Called with each finite result of the last phase on this process.
        perturb: Whether the algorithm may perturb the model that it sends; otherwise it is the server's.

    Returns:
        The server's next state.

    Raises:
        UserError: If training diverges.
    """
    return _next_round(run, clients, on_result, perturb).train(run.engine).server


def local_models(run: Run, clients: Sequence[int], on_result: Callable[[LocalResult], object], at_once: int) -> None:
    """Trains clients as the next round would, and keeps nothing of it; the run stays as it is. Every process calls.

    Unlike `dry_round` it needs memory for a block of local models only, and makes no server step of the last phase.

    Args:
        run: The run.
        clients: Ids of the clients.
        on_result: Called with each finite result of the last phase on this process.
        at_once: Clients of a block, which is the cohort of an algorithm with several phases.
    """
    for start in range(0, len(clients), at_once):
        for phase in _next_round(run, clients[start : start + at_once], on_result).phases():
            results = run.engine.train(phase.send())
            if phase.last:
                phase.observe(results)
            else:
                phase.receive(results)
                phase.step()


def _next_round(
    run: Run, clients: Sequence[int], on_result: Callable[[LocalResult], object], perturb: bool = True
) -> Round:
    last = run.objective.phases - 1
    cohort = Cohort.of(run, clients, run.next_round)
    return Round(run, cohort, lambda r: on_result(r) if r.finite and r.ctx.phase == last else None, perturb)


class Updates(Measure):
    """Norms, distances and angles of a round's models.

    - ``norm_w``: ‖w^{t+1}‖.
    - ``pseudo_gradient_norm``: ‖Δ̃^t‖, Δ̃^t = w̃^t - Σ_k p_k w_k, with w̃^t the model that was sent; and
      ``pseudo_gradient_cosine`` with that of the round before, if its local models were seen: a run that ends in an
      evaluated round before ``max_rounds`` may have trained it in a program.
    - ``drift``: mean ‖w̃^t - w_k‖, D of FedGF. ``distance`` and ``distance_max``: ‖w^{t+1} - w_k‖, the terms of FedGF's
      Theorem 2.
    - ``divergence_previous`` and ``divergence_next``: mean ‖w_k - w^t‖² and ‖w_k - w^{t+1}‖² (FedSMOO, Table 2).
    - ``step_sharpness``: rho ‖w^t - w^{t+1}‖ (FedGMT, Eq. 5).
    - Scalars of the server's state, such as ``server_c`` of FedGF.

    Args:
        rho: Radius of ``step_sharpness``.
    """

    tracks = True
    needs_statistics = False

    def __init__(self, rho: Positive = 0.05) -> None:
        self.rho = rho

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._models: list[LocalResult] = []

    def update(self, run: Run, result: LocalResult) -> None:
        self._models.append(result)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        models, self._models = self._models, []
        mine = {
            r.client: [float((r.w - w).norm()) for w in (r.received.w, context.old.w, context.new.w)] for r in models
        }
        distances = collectives.all_gather_dict(context.run.fabric, mine)
        values = {"norm_w": float(context.new.w.norm())}
        if distances:
            received, before, after = zip(*distances.values(), strict=True)
            values |= {
                "drift": mean(received),
                "distance": mean(after),
                "distance_max": max(after),
                "divergence_previous": mean(d * d for d in before),
                "divergence_next": mean(d * d for d in after),
                "step_sharpness": self.rho * float((context.old.w - context.new.w).norm()),
            }
        if context.pseudo_gradient is not None:
            values["pseudo_gradient_norm"] = float(context.pseudo_gradient.norm())
            if context.previous is not None:
                values["pseudo_gradient_cosine"] = cosine(context.pseudo_gradient, context.previous)
        values |= {f"server_{name}": float(v) for name, v in context.new.items() if v.numel() == 1}
        settings = {"step_sharpness": {"rho": self.rho}}
        data = f"{len(distances)} clients" if distances else ""
        return [
            Measurement(name=name, value=v, model="models of the round", data=data, settings=settings.get(name, {}))
            for name, v in values.items()
        ]


class DeltaEpsilon(Measure):
    """``delta_epsilon``: distance of the last pseudo-gradient from the true one (FedGloSS, Eq. 6), from 0 to 2 rho.

    It trains the cohort once more, from the unperturbed global model. ``delta_epsilon_cosine`` is the cosine of the
    two. The first round has no last pseudo-gradient.

    Args:
        rho: The server's radius; null: the algorithm's own ``rho``.
    """

    local = True
    tracks = True
    needs_statistics = False

    def __init__(self, rho: Positive | None = None) -> None:
        self.rho = rho

    def check(self, run: Run) -> None:
        require(
            self.rho is not None or isinstance(getattr(run.objective, "rho", None), (int, float)),
            "measure: DeltaEpsilon.rho",
            self.rho,
            f"{type(run.objective).__name__} has no rho of its own, give one",
        )

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        true = PseudoGradient(run)
        dry_round(run, cohort, true.add, perturb=False)
        self._true = true.value()

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        true, self._true = self._true, None
        if context.previous is None or true is None:
            return []
        rho = float(context.run.objective.rho if self.rho is None else self.rho)  # type: ignore[arg-type]
        values = {
            "delta_epsilon": delta_epsilon(context.previous, true, rho),
            "delta_epsilon_cosine": cosine(context.previous, true),
        }
        data = f"{len(context.cohort)} clients"
        return [
            Measurement(name=name, value=v, model="pseudo-gradients", data=data, settings={"rho": rho})
            for name, v in values.items()
        ]
