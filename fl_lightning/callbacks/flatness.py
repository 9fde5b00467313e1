"""Flatness of the global model while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning import processes
from fl_lightning.callbacks.base import Callback
from fl_lightning.errors import require

if TYPE_CHECKING:
    from fl_lightning.engine import LocalResult
    from fl_lightning.state import RoundContext
    from fl_lightning.trainer import FederatedTrainer


class FlatnessMonitor(Callback):
    """Logs lambda_max of the Hessian and the flatness discrepancy of FedGF's Definition 1.

    ``flatness/lambda_max`` is the largest eigenvalue at the evaluated global model, by Lanczos, with its relative
    residual beside it. ``flatness/discrepancy`` is ``|S(w^{t+1}) - sum_k p_k S_k(w_k)|``: the sharpness (one gradient
    step to radius ``rho``) of the new global model on training data of all clients, against that of this round's local
    models on their own. Loss without weight decay, eval mode, no augmentation; the seeded samples stay the same.
    Processes share the samples evenly.

    Args:
        every_n_rounds: Rounds between two measurements; the last round is always measured.
        rho: Radius of the sharpness.
        hessian_samples: Training images for lambda_max, stratified; null: all.
        sharpness_samples: Training images for the global sharpness, stratified; null: all. Local models see all of
            their client's data.
        iterations: Most Lanczos steps.
        tol: Relative residual to stop at.
    """

    def __init__(
        self,
        every_n_rounds: int = 10,
        rho: float = 0.05,
        hessian_samples: int | None = 1000,
        sharpness_samples: int | None = 10_000,
        iterations: int = 100,
        tol: float = 1e-3,
    ) -> None:
        for name, value in (
            ("every_n_rounds", every_n_rounds),
            ("hessian_samples", hessian_samples),
            ("sharpness_samples", sharpness_samples),
            ("iterations", iterations),
        ):
            require(value is None or value >= 1, f"callbacks: FlatnessMonitor.{name}", value, "at least 1")
        for name, number in (("rho", rho), ("tol", tol)):
            require(number > 0, f"callbacks: FlatnessMonitor.{name}", number, "above 0")
        self.every_n_rounds, self.rho = every_n_rounds, rho
        self.hessian_samples, self.sharpness_samples = hessian_samples, sharpness_samples
        self.iterations, self.tol = iterations, tol
        self._local = torch.zeros(2, dtype=torch.float64)
        self._seconds = 0.0
        self._due = False

    def on_round_start(self, trainer: FederatedTrainer, ctx: RoundContext, cohort: list[int]) -> None:
        self._due = (ctx.t + 1) % self.every_n_rounds == 0 or ctx.t + 1 == ctx.rounds
        self._local = torch.zeros(2, dtype=torch.float64)
        self._seconds = 0.0

    def on_local_end(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        from fl_lightning.flatness import sharpness

        final = result.ctx.exchange == trainer.objective.exchanges - 1  # the local models that the server's step is of
        if self._due and final and bool(torch.isfinite(result.w).all()):
            started = time.perf_counter()
            batches = partial(trainer.data.client_eval_batches, result.client, trainer.dtype)
            rise = sharpness(trainer.objective.net, trainer.objective.loss, batches, self.rho, at=result.w)
            self._local += torch.tensor([result.ctx.n_k * rise, result.ctx.n_k], dtype=torch.float64)
            self._seconds += time.perf_counter() - started

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        if not self._due:
            return
        from fl_lightning.flatness import lambda_max, sharpness

        started = time.perf_counter()
        fabric, net, loss, data = trainer.fabric, trainer.objective.net, trainer.objective.loss, trainer.data
        reduce = partial(processes.total, fabric)

        def share(samples: int | None) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
            mine = data.sample_indices(samples, trainer.seed)[fabric.global_rank :: fabric.world_size]
            return partial(data.eval_batches, mine, trainer.dtype)

        total = reduce(self._local.to(fabric.device))
        rise = sharpness(net, loss, share(self.sharpness_samples), self.rho, at=trainer.server.w, reduce=reduce)
        top = lambda_max(
            net,
            loss,
            share(self.hessian_samples),
            at=trainer.global_model,
            iterations=self.iterations,
            tol=self.tol,
            seed=trainer.seed,
            reduce=reduce,
        )
        measured = {
            "flatness/lambda_max": top.value,
            "flatness/lambda_max_residual": top.residual,
            "flatness/sharpness_global": rise,
        }
        if total[1] > 0:  # centralized training has no local models
            local = float(total[0] / total[1])
            measured |= {"flatness/discrepancy": abs(rise - local), "flatness/sharpness_local": local}
        trainer.log({**measured, "time/flatness_s": self._seconds + time.perf_counter() - started})
