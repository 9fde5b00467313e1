"""FedDyn, in ADMM form; the base of the methods that keep its duals."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_lightning.ascent import Gradient
from fl_lightning.drift import admm_dual, admm_pull
from fl_lightning.errors import UserError
from fl_lightning.objective import LocalObjective
from fl_lightning.optim import Direction
from fl_lightning.state import ClientContext, RoundContext, Slots, Uploads, Weighting


class FedDyn(LocalObjective):
    """Dynamic regularisation: every client's dual ``lam_i`` tracks its gradient at the fixed point.

    The server's ``lam`` is the mean of all M duals, those of clients never seen (zero) included.

    Args:
        net: The network.
        beta: Inverse of FedDyn's alpha.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Acar et al., ICLR 2021"
    client_slots = {"lam": "zeros"}
    server_slots = {"lam": "zeros"}
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, beta: float = 10.0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        if beta <= 0:
            raise UserError(f"model.beta = {beta}: must be above 0 (it is 1/alpha of FedDyn)")
        self.beta = beta

    def local_step(
        self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext
    ) -> tuple[Direction, Slots]:
        """``g - lam_i + (w - w^t) / beta``."""
        return self.sharp(w, grad, client, sent, ctx) + admm_pull(client.lam, w, sent.w, self.beta), client

    def local_end(self, w: Tensor, client: Slots, sent: Slots, ctx: ClientContext) -> tuple[dict[str, Tensor], Slots]:
        """``lam_i <- lam_i - (w_i - w^t) / beta``."""
        return {"w": w}, client.replace(lam=admm_dual(client.lam, w, sent.w, self.beta))

    def server_beta(self, n: int, m: int) -> float:
        """Penalty of the server's dual: ``beta M / S`` keeps it the mean of all clients'."""
        return self.beta * m / n

    def server_step(self, server: Slots, sent: Slots, uploads: Uploads, ctx: RoundContext) -> Slots:
        """``lam <- lam - sum_S (w_i - w^t) / (beta M)``; then ``w <- mean w_i - beta lam``."""
        lam = admm_dual(server.lam, uploads.mean("w"), sent.w, self.server_beta(uploads.n, ctx.m))
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(w=server.w - self.beta * lam, lam=lam)
