"""FedGMT: clients follow a teacher that averages the trajectory of the global model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.ascent import Gradient
from fl_lightning.losses import kl_to_teacher
from fl_lightning.optim import Direction
from fl_lightning.state import ClientContext, RoundContext, Slots, Uploads


class FedGMT(FedDyn):
    """Li et al., ICML 2025, Algorithm 1: duals without the quadratic term, and KL to the teacher ``e``.

    Args:
        net: The network.
        gamma: Weight of the KL term.
        tau: Its temperature.
        ema_alpha: How much of the old teacher stays, per round.
        kl_tau2: Multiply the KL term by tau^2, as the official code does.
        beta: Penalty of the duals.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Li et al., ICML 2025"
    server_slots = {**FedDyn.server_slots, "e": "w0"}
    down = ("w", "e")

    def __init__(
        self,
        net: nn.Module,
        gamma: float = 1.0,
        tau: float = 3.0,
        ema_alpha: float = 0.95,
        kl_tau2: bool = True,
        beta: float = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, beta=beta, **kwargs)
        self.gamma, self.tau, self.ema_alpha, self.kl_tau2 = gamma, tau, ema_alpha, kl_tau2

    def teacher(self, client: Slots, sent: Slots) -> Tensor:
        """The averaged trajectory, e^t."""
        return sent.e

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Eq. 9: cross-entropy + gamma KL(e || w)."""
        kl = kl_to_teacher(logits, teacher[0], self.tau, self.kl_tau2)
        return super().losses(logits, target) + self.gamma * kl

    def local_step(
        self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext
    ) -> tuple[Direction, Slots]:
        """Line 11: ``g - u_m``."""
        return self.sharp(w, grad, client, sent, ctx) - client.lam, client

    def server_step(self, server: Slots, sent: Slots, uploads: Uploads, ctx: RoundContext) -> Slots:
        """Lines 15 to 18: the teacher follows the new model, its shift by the dual included."""
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(e=self.ema_alpha * server.e + (1 - self.ema_alpha) * server.w)
