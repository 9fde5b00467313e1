"""FedWMSAM: an ascent relative to where the momentum leads, and a weight of the momentum that adapts."""

from typing import Annotated, Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.core import (
    ClientContext,
    Interval,
    NonNegative,
    RoundContext,
    State,
    UnitInterval,
    Upload,
    Uploads,
    norm,
    to_radius,
)

TINY = 1e-30
"""Least denominator of a cosine, so that the cosine of a zero vector is 0."""


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
