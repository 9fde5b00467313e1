"""Clients that know the global momentum: FedCM, MoFedSAM, FedACG, FedNSAM and FedWMSAM."""

from typing import Annotated, Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import SAM, Ascent, Gradient, ServerMomentum, Step, prox_pull
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.core import (
    ClientContext,
    Fraction,
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


class FedCM(LocalObjective):
    """Client momentum: ``alpha g + (1 - alpha) delta``, with delta the last mean update in units of a gradient.

    Args:
        net: The network.
        alpha: Weight of the client's own gradient.
        step: The server's step: along the mean update, or along delta (FedGF's code), 1/(K lr) times as far.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Xu et al., 2021"
    needs_sgd = "divides a displacement by the sum of SGD's learning rates to get a gradient"
    server_state = {"delta": "zeros"}
    down = ("w", "delta")
    default_weighting: Weighting = "uniform"

    def __init__(
        self,
        net: nn.Module,
        alpha: Annotated[float, Interval("(0, 1]")] = 0.1,
        step: Literal["mean", "gf_repo"] = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.alpha, self.step = alpha, step

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``alpha g + (1 - alpha) delta``."""
        g = self.local_gradient(w, grad, client, received, ctx)
        return self.alpha * g + (1 - self.alpha) * received.delta, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``delta <- (w^t - mean w_i) / (K lr)``; the model as FedAvg's."""
        delta = (sent.w - uploads.mean("w")) / uploads.mean("k_lr")
        server = server.replace(delta=delta)
        if self.step == "gf_repo":
            return self.server_update(server, delta, ctx)
        return super().server_step(server, sent, uploads, ctx)


class MoFedSAM(FedCM):
    """FedCM whose clients run SAM.

    Args:
        net: The network.
        rho: Radius of the ascent.
        **kwargs: As for `FedCM`.
    """

    paper = "Qu et al., ICML 2022"

    def __init__(self, net: nn.Module, rho: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, ascent=SAM(rho), **kwargs)


class LookAhead(LocalObjective):
    """Server momentum in Nesterov's form: the model that is sent is where the momentum leads.

    Args:
        net: The network.
        lam: Server momentum.
        **kwargs: As for `LocalObjective`.
    """

    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, lam: Fraction, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerMomentum(lam), **kwargs)
        self.lam = lam

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """``w + lam m``, where ``server_v`` is -m."""
        return server.replace(w=server.w - self.lam * server.server_v)


class FedACG(LookAhead):
    """Server momentum whose clients start at a look-ahead, ``w + lam m``, and are pulled towards it.

    Args:
        net: The network.
        lam: Server momentum.
        beta: Weight of the proximal term ``beta/2 ||v - (w + lam m)||^2``.
        prox: The proximal term: with the 1/2, or without it as in the official code (twice as strong).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Kim et al., CVPR 2024"
    refers_to_received = True

    def __init__(
        self,
        net: nn.Module,
        lam: Fraction = 0.85,
        beta: NonNegative = 1e-3,
        prox: Literal["half", "whole"] = "half",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lam, **kwargs)
        self.beta, self.prox = beta, prox

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g + beta (v - start)``, where training starts at the look-ahead."""
        pull = prox_pull(w, client.start, self.beta if self.prox == "half" else 2 * self.beta)
        return self.local_gradient(w, grad, client, received, ctx) + pull, client


class AlongMomentum(Ascent):
    """Look-ahead and ascent as one displacement ``gamma m - rho m / ||m||``, the same in all steps of a round.

    Args:
        gamma: Factor of the look-ahead.
        rho: Radius of the ascent.
        eps: Added to the norm.
    """

    down = ("server_v",)

    def __init__(self, gamma: Fraction, rho: NonNegative, eps: NonNegative = 1e-7) -> None:
        self.gamma, self.rho, self.eps = gamma, rho, eps

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        uphill = received.server_v  # -m
        return to_radius(uphill, self.rho, self.eps) - self.gamma * uphill


class FedNSAM(LookAhead):
    """Nesterov's look-ahead for SAM.

    Args:
        net: The network.
        gamma: Server momentum.
        rho: Radius of the ascent.
        along: The ascent: along the local gradient at the look-ahead, where clients start (the authors' present
            program); or along the momentum, with clients that start at w (the abstract, and their first program).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., 2026 (arXiv:2602.23827)"

    def __init__(
        self,
        net: nn.Module,
        gamma: Fraction = 0.85,
        rho: NonNegative = 0.05,
        along: Literal["gradient", "momentum"] = "gradient",
        **kwargs: Any,
    ) -> None:
        ascent = SAM(rho) if along == "gradient" else AlongMomentum(gamma, rho)
        super().__init__(net, gamma, ascent=ascent, **kwargs)
        self.along = along

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """``w + gamma m``; along the momentum w itself, and m."""
        return super().broadcast(server, ctx) if self.along == "gradient" else server


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
