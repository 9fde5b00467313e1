"""SCAFFOLD, option II."""

from __future__ import annotations

from torch import Tensor

from fl_lightning.ascent import Gradient
from fl_lightning.drift import control_variate
from fl_lightning.objective import LocalObjective
from fl_lightning.optim import Direction
from fl_lightning.state import ClientContext, RoundContext, Slots, Uploads, Weighting


class SCAFFOLD(LocalObjective):
    """Control variates that cancel client drift; with ``ascent: SAM`` it is FedGAMMA."""

    paper = "Karimireddy et al., ICML 2020"
    client_slots = {"c": "zeros"}
    server_slots = {"c": "zeros"}
    down, up = ("w", "c"), ("w", "delta_c")
    default_weighting: Weighting = "uniform"

    def local_step(
        self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext
    ) -> tuple[Direction, Slots]:
        """Line 10: ``g - c_i + c``."""
        return self.sharp(w, grad, client, sent, ctx) - client.c + sent.c, client

    def local_end(self, w: Tensor, client: Slots, sent: Slots, ctx: ClientContext) -> tuple[dict[str, Tensor], Slots]:
        """Lines 12 to 14."""
        c = control_variate(client.c, sent.c, w, sent.w, ctx.k_lr)
        return {"w": w, "delta_c": c - client.c}, client.replace(c=c)

    def server_step(self, server: Slots, sent: Slots, uploads: Uploads, ctx: RoundContext) -> Slots:
        """Lines 16 and 17."""
        c = server.c + uploads.n / ctx.m * uploads.mean("delta_c")
        return super().server_step(server.replace(c=c), sent, uploads, ctx)
