"""FedSpeed, and A-FedPDSAM with A-FedPD's duals."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.feddyn import AFedPD, FedDyn
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import (
    EPS,
    ClientContext,
    NonNegative,
    RoundContext,
    State,
    UnitInterval,
    Upload,
    Uploads,
    to_radius,
)


class FedSpeed(FedDyn):
    """FedDyn with a mix of the gradients at the weights and at SAM's ascent point.

    Args:
        net: The network.
        rho: Radius of the ascent.
        alpha: Weight of the gradient at the ascent point; 1 in the official code.
        dual_agg: Duals that correct the global model: those of all clients (the official code), or of the active ones
            (the paper).
        eps: Added to the norm.
        **kwargs: As for `FedDyn`.
    """

    paper = "Sun et al., ICLR 2023"
    references = {**FedDyn.references, "end_w": "w"}

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        alpha: UnitInterval = 1.0,
        dual_agg: Literal["all", "active"] = "all",
        eps: NonNegative = EPS,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.alpha, self.eps = rho, alpha, eps
        self.dual_agg = dual_agg if self.use_dual else "all"
        if self.dual_agg == "active":
            self.server_state = {name: init for name, init in self.server_state.items() if name != "lam"}
            self.up = ("w", "end_w") if self.virtual else ("w",)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``(1 - alpha) g(w) + alpha g(w + rho g / ||g||)``, corrected."""
        g1 = grad(w)
        g2 = grad(w + to_radius(g1, self.rho, self.eps))
        return self.corrected((1 - self.alpha) * g1 + self.alpha * g2, w, client), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """FedDyn's; the paper's clients upload ``w_i - beta lam_i``."""
        upload, client = super().local_end(w, client, received, ctx)
        if self.dual_agg == "active":
            upload = {"w": w - self.beta * client.lam, **({"end_w": w} if self.virtual else {})}
        return upload, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """FedDyn's step, or the mean of the active clients' uploads."""
        if self.dual_agg == "all":
            return super().server_step(server, sent, uploads, ctx)
        return LocalObjective.server_step(self, self.move_unseen(server, sent, uploads), sent, uploads, ctx)


class AFedPDSAM(FedSpeed):
    """FedSpeed with A-FedPD's duals: the clients of A-FedPD run SAM.

    Args:
        net: The network.
        absent: As for `AFedPD`; kept is FedSpeed.
        eps: As for `FedSpeed`.
        **kwargs: As for `FedSpeed`.
    """

    paper = AFedPD.paper

    def __init__(
        self,
        net: nn.Module,
        absent: Literal["kept", "virtual"] = "virtual",
        eps: NonNegative = 1e-7,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, absent=absent, eps=eps, **kwargs)
