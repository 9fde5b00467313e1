"""FedSWA and FedMoSWA: a learning rate that falls within each round, and a server that steps further than the mean."""

from dataclasses import replace
from typing import Annotated, Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import Gradient, ServerUpdate, Step
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.core import ClientContext, Interval, Positive, State, UnitInterval, Upload, Weighting


class FedSWA(LocalObjective):
    """Within a round the learning rate falls linearly from lr towards ``rho lr``; the server steps by alpha.

    Args:
        net: The network.
        rho: Learning rate that a step after the last one would have, as a fraction of the first; 1: constant.
        alpha: Factor of the server's step along the mean update.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., ICML 2025"
    scratch_state = {"step": 0.0}
    default_weighting: Weighting = "uniform"
    refers_to_received = True  # its learning rate starts again with each received model

    def __init__(self, net: nn.Module, rho: UnitInterval = 0.1, alpha: Positive = 1.5, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerUpdate(alpha), **kwargs)
        self.rho = rho

    def step_lr(self, client: State, ctx: ClientContext) -> Tensor:
        """``lr ((1 - k/K) + (k/K) rho)`` in step k, from 0, where K counts the steps that a late client misses, too."""
        return ctx.lr * (1 - (1 - self.rho) * client.step / (ctx.K + ctx.K_missed))

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Counts the steps."""
        direction, client = super().local_step(w, grad, client, received, ctx)
        return direction, client.replace(step=client.step + 1)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """The sum of the learning rates is ``lr (K (1 + rho) + (1 - rho)) / 2``, and more if the client is late."""
        missed = (1 - self.rho) * (ctx.K - 1) * (1 - ctx.K / (ctx.K + ctx.K_missed))
        k_lr = ctx.lr * (ctx.K * (1 + self.rho) + (1 - self.rho) + missed) / 2
        return super().local_end(w, client, received, replace(ctx, k_lr=k_lr))


class FedMoSWA(FedSWA, SCAFFOLD):
    """FedSWA with control variates around an exponential mean of the newest ones.

    Args:
        net: The network.
        gamma: The server's variate becomes ``(1 - gamma) c + gamma mean c_i``.
        **kwargs: As for `FedSWA` and `SCAFFOLD`.
    """

    paper = "Liu et al., ICML 2025"

    def __init__(self, net: nn.Module, gamma: Annotated[float, Interval("(0, 1]")] = 0.2, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.gamma = gamma

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """SCAFFOLD's new variate; uploads its difference from c, not from the client's old one."""
        upload, client = super().local_end(w, client, received, ctx)
        return {**upload, "delta_c": client.c - received.c}, client

    def variate_share(self, n: float, m: int) -> float:
        """Gamma."""
        return self.gamma
