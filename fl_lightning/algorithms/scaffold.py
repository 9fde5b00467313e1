"""SCAFFOLD, option II; FedGAMMA and FedWMSAM, whose clients take the gradient at an ascent point, too."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import SAM, Gradient, Step, check_fresh_momentum, control_variate, effective_steps
from fl_lightning.core import (
    ClientContext,
    Interval,
    NonNegative,
    RoundContext,
    State,
    UnitInterval,
    Upload,
    Uploads,
    Weighting,
    norm,
    to_radius,
)

TINY = 1e-30
"""Least denominator of a cosine, so that the cosine of a zero vector is 0."""


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


class FedWMSAM(SCAFFOLD):
    """Steps along ``a g(w + e) + (1 - a) D_i`` with the personalized momentum ``D_i = D + a/(1-a) (c - c_i)``.

    The ascent e follows the momentum's path: after b steps that has come to ``w^t + b D_i``. One gradient a step.

    Args:
        net: The network.
        rho: Radius of the ascent.
        alpha: First weight a of the gradient; the server adapts it.
        lam: Rate at which it adapts.
        ascent_to: The ascent goes towards the momentum's path (the paper's algorithm), or away from it (its text, and
            the official code).
        **kwargs: As for `SCAFFOLD`.
    """

    paper = "Li et al., NeurIPS 2025"
    scratch_state = {"step": 0.0}
    down, up = ("w", "c", "D", "a"), ("w", "delta_c", "s")
    references = {**SCAFFOLD.references, "s": 0.0}
    refers_to_received = True

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.01,
        alpha: Annotated[float, Interval("(0, 1)")] = 0.1,
        lam: UnitInterval = 0.01,
        ascent_to: Literal["towards", "away"] = "towards",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.alpha, self.lam, self.ascent_to = rho, alpha, lam, ascent_to
        self.server_state = {**SCAFFOLD.server_state, "D": "zeros", "a": alpha}

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``e = +- rho d / ||d||`` with ``d = w^t + b D_i - w``."""
        a = received.a
        momentum = received.D + a / (1 - a) * self.cv_scale * (received.c - client.c)
        path = client.start + client.step * momentum
        e = to_radius(path - w, self.rho if self.ascent_to == "towards" else -self.rho, 1e-7)
        return a * grad(w + e) + (1 - a) * momentum, client.replace(step=client.step + 1)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """SCAFFOLD's variates; uploads ``1 + cos(w_i - w^t, D)``, and 0 while there is no D."""
        upload, after = super().local_end(w, client, received, ctx)
        u, D = w - client.start, received.D
        s = 1 + (u * D).sum(-1, keepdim=True) / (norm(u) * norm(D)).clamp(min=TINY)
        return {**upload, "s": s * (norm(D) > 0)}, after

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``a <- (1 - lam) a + lam clip(mean s, 0.1, 0.9)``; D is the mean of ``(w^t - w_i) / (K lr)``."""
        a = (1 - self.lam) * server.a + self.lam * uploads.mean("s").clamp(0.1, 0.9)
        D = server.c + uploads.mean("delta_c")
        return super().server_step(server.replace(a=a, D=D), sent, uploads, ctx)
