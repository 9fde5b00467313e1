"""FedSMOO: one perturbation that all clients agree on, by ADMM."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.ascent import Gradient
from fl_lightning.errors import require
from fl_lightning.flat import to_radius
from fl_lightning.objective import LocalObjective
from fl_lightning.optim import Direction
from fl_lightning.state import ClientContext, RoundContext, Slots, Uploads


class FedSMOO(FedDyn):
    """Sun et al., ICML 2023, Algorithm 1: FedDyn's duals for the weights, further duals for the perturbation.

    Args:
        net: The network.
        rho: Radius of the perturbation.
        use_dual: Whether to keep the dynamic regulariser; without it, it is "FedSMOO w/o Reg" of the FedGF paper.
        s_agg: What the global perturbation is the mean of: mu less the last perturbation (the paper), or mu alone
            (FL-Simulator).
        **kwargs: As for `FedDyn`.
    """

    paper = "Sun et al., ICML 2023"
    scratch_slots = {"s_hat": "zeros"}
    down, up = ("w", "s"), ("w", "s")
    passes = (2, 2)

    def __init__(
        self,
        net: nn.Module,
        rho: float = 0.1,
        use_dual: bool = True,
        s_agg: Literal["mu_minus_shat", "mu_only"] = "mu_minus_shat",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        require(rho >= 0, "model.rho", rho, "a radius is 0 or more")
        self.rho, self.s_agg = rho, s_agg
        self.base = FedDyn if use_dual else LocalObjective
        if not use_dual:
            self.up, self.adds_updates = ("w", "s"), True
        self.client_slots = {**self.base.client_slots, "mu": "zeros"}
        self.server_slots = {**self.base.server_slots, "s": "zeros"}

    def local_step(
        self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext
    ) -> tuple[Direction, Slots]:
        """Lines 7 to 11."""
        s_hat = to_radius(grad(w) - client.mu - sent.s, self.rho)  # 7, 8
        mu = client.mu + s_hat - sent.s  # 9
        g_hat = grad(w + s_hat)  # 10
        direction = self.corrected(g_hat, w, client, sent) if self.base is FedDyn else g_hat  # 11
        return direction, client.replace(mu=mu, s_hat=s_hat)

    def local_end(self, w: Tensor, client: Slots, sent: Slots, ctx: ClientContext) -> tuple[dict[str, Tensor], Slots]:
        """Lines 13 to 15."""
        upload, client = self.base.local_end(self, w, client, sent, ctx)  # 14
        s = client.mu if self.s_agg == "mu_only" else client.mu - client.s_hat  # 13
        return {**upload, "s": s}, client  # 15

    def server_step(self, server: Slots, sent: Slots, uploads: Uploads, ctx: RoundContext) -> Slots:
        """Lines 17 to 19."""
        s = to_radius(uploads.mean("s"), self.rho)  # 17
        return self.base.server_step(self, server.replace(s=s), sent, uploads, ctx)  # 18, 19
