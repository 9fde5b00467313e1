"""The clients of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.core import ClientContext
from fl_lightning.trainer.collectives import assign
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.samplers import draw


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, the same on every process.

    Attributes:
        t: The round, from 0.
        clients: Their ids.
        contexts: The context that each trains in, in its first phase.
        shares: Positions of the cohort that each process trains.
    """

    t: int
    clients: list[int]
    contexts: list[ClientContext]
    shares: list[list[int]]

    @classmethod
    def draw(cls, run: Run, t: int) -> Cohort:
        """The cohort of round ``t``, a function of (seed, t)."""
        return cls.of(run, draw(run.settings.sampler, t, run.data.num_clients, run.seed), t)

    @classmethod
    def of(cls, run: Run, clients: Sequence[int], t: int) -> Cohort:
        """Some clients as the cohort of round ``t``.

        Args:
            run: The run.
            clients: Their ids.
            t: The round, from 0.
        """
        ctx, settings, data = run.round_context(t), run.settings, run.data
        lr = run.objective.lr(ctx)
        steps = [data.batches_per_client(k, settings.local_epochs, settings.local_steps) for k in clients]
        contexts = [
            ClientContext(**vars(ctx), lr=lr, K=K, k_lr=K * lr, n_k=int(data.client_sizes[k]), n_mean=run.mean_samples)
            for k, K in zip(clients, steps, strict=True)
        ]
        return cls(t, list(clients), contexts, assign(steps, run.fabric.world_size))
