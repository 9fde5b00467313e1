"""SCAFFOLD, option II, and FedGAMMA."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import SAM, Gradient, Step, check_fresh_momentum, control_variate, effective_steps
from fl_lightning.core import ClientContext, NonNegative, RoundContext, State, Upload, Uploads, Weighting


class SCAFFOLD(LocalObjective):
    """Control variates against client drift.

    Args:
        net: The network.
        cv_scale: Factor of the correction; FedLESAM's official code has 0.1.
        momentum_aware: Take the local momentum into account when a displacement is converted to a gradient; otherwise
            the gradient is about 1/(1 - momentum) times too large (the paper's box has no momentum).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Karimireddy et al., ICML 2020"
    needs_sgd = "divides a displacement by the sum of SGD's learning rates to get a gradient"
    client_state = {"c": "zeros"}
    server_state = {"c": "zeros"}
    down: tuple[str, ...] = ("w", "c")
    up: tuple[str, ...] = ("w", "delta_c")
    references: Mapping[str, str | float] = {"w": "w", "delta_c": "zeros"}
    sums = {"delta_c": "c"}
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, cv_scale: float = 1.0, momentum_aware: bool = False, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.cv_scale, self.momentum_aware = cv_scale, momentum_aware
        if momentum_aware:
            check_fresh_momentum(self.optimizer, "momentum_aware")

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Line 10: ``g - c_i + c``."""
        return self.local_gradient(w, grad, client, received, ctx) + self.cv_scale * (received.c - client.c), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Lines 12 to 14."""
        steps = effective_steps(ctx.K, self.optimizer.momentum) if self.momentum_aware else ctx.K
        c = control_variate(client.c, received.c, w, client.start, ctx.k_lr * steps / ctx.K)
        return {"w": w, "delta_c": c - client.c}, client.replace(c=c)

    def variate_share(self, n: float, m: int) -> float:
        """Returns the server's factor of the cohort's mean change: S/M, so that c stays the mean of all c_i."""
        return n / m

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 16 and 17."""
        c = server.c + self.variate_share(uploads.n, ctx.m) * uploads.mean("delta_c")
        return super().server_step(server.replace(c=c), sent, uploads, ctx)


class FedGAMMA(SCAFFOLD):
    """SCAFFOLD whose clients run SAM.

    Args:
        net: The network.
        rho: Radius of the ascent.
        c_scale: The server's variate takes the sum of the changes over M, as SCAFFOLD's, or their mean (FedGF's code:
            S times slower).
        **kwargs: As for `SCAFFOLD`.
    """

    paper = "Dai et al., TNNLS 2023"

    def __init__(
        self, net: nn.Module, rho: NonNegative = 0.1, c_scale: Literal["sum", "mean"] = "sum", **kwargs: Any
    ) -> None:
        super().__init__(net, ascent=SAM(rho), **kwargs)
        self.c_scale = c_scale

    def variate_share(self, n: float, m: int) -> float:
        """S/M, or 1/M."""
        return super().variate_share(1 if self.c_scale == "mean" else n, m)
