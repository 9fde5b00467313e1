"""FedGF: gradients between the local and the global ascent point."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    RoundContext,
    Size,
    State,
    UnitInterval,
    Upload,
    Uploads,
    norm,
    to_radius,
)

UNKNOWN = -1.0
"""Entry of the window for a round that has not been, or in which nobody answered."""


class FedGF(LocalObjective):
    """Lee and Yoon, ICML 2024: ``c`` moves the clients' ascent point towards the server's as their models diverge.

    In round 0 the server has no ascent point yet, and clients run SAM.

    Args:
        net: The network.
        rho: Radius of the clients' ascent.
        rho_g: Radius of the server's; null: rho.
        T_D: Divergence above which a round counts as diverged.
        W: Number of rounds that c is the mean of; rounds in which nobody answers do not count.
        c: A fixed mix instead (0: FedSAM, 1: the server's ascent point alone); null: adaptive.
        window_warmup: c in the first W rounds: the mean of the rounds so far (the official code), or their sum over W
            (the paper).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Lee and Yoon, ICML 2024"
    down, up = ("w", "w_tilde", "c"), ("w", "distance")
    references = {"w": "w", "distance": 0.0}

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.05,
        rho_g: NonNegative | None = None,
        T_D: NonNegative = 0.2,
        W: Size = 30,
        c: UnitInterval | None = None,
        window_warmup: Literal["available", "full"] = "available",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.rho_g = rho, rho if rho_g is None else rho_g
        self.T_D, self.W, self.c, self.window_warmup = T_D, W, c, window_warmup
        self.server_state = {"w_tilde": "w0", "c": 0.0, "window": lambda w0: w0.new_full((W,), UNKNOWN)}

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``grad(c w_tilde + (1 - c) (w + rho g / ||g||))``."""
        ascent_point = w + to_radius(grad(w), self.rho)
        return grad(received.c * received.w_tilde + (1 - received.c) * ascent_point), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Uploads the distance ``||w^r - w_k||``, a scalar."""
        return {"w": w, "distance": norm(client.start - w)}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Window and c from this round's divergence; the next ascent point from this round's step."""
        diverged = (uploads.mean("distance") > self.T_D).to(server.window)
        window = torch.cat([server.window[1:], diverged])
        rounds = self.W if self.window_warmup == "full" else (window != UNKNOWN).sum(0, keepdim=True)
        c = window.clamp(min=0).sum(0, keepdim=True) / rounds if self.c is None else server.c * 0 + self.c
        after = super().server_step(server, sent, uploads, ctx)
        w_tilde = after.w + to_radius(server.w - after.w, self.rho_g)
        return after.replace(w_tilde=w_tilde, c=c, window=window)
