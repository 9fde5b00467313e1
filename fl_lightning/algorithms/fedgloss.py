"""FedGloSS: the server's sharpness-aware step, paid for with last round's pseudo-gradient."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.flat import to_radius
from fl_lightning.state import RoundContext, Slots, Uploads, Weighting


class FedGloSS(FedDyn):
    """Caldarola et al., 2024, Algorithm 1: FedDyn around a model perturbed along last round's pseudo-gradient.

    Clients run SGD, or SAM with ``ascent: SAM``. In round 0 there is no pseudo-gradient, and no perturbation. The duals
    refer to the perturbed model that was sent, on both sides: line 22's ``w^t`` breaks lam = mean of lam_i.

    Args:
        net: The network.
        rho: Radius of the server's perturbation, rho_s.
        beta: Penalty of the duals.
        sigma_scale: Scale of the server's dual: 1/(beta M) as in the paper, or 1/(beta M S) as in the official code.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Caldarola et al., 2024 (arXiv:2412.03752)"
    server_slots = {**FedDyn.server_slots, "delta": "zeros"}
    default_weighting: Weighting = "samples"

    def __init__(
        self,
        net: nn.Module,
        rho: float = 0.1,
        beta: float = 10.0,
        sigma_scale: Literal["paper", "code"] = "paper",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, beta=beta, **kwargs)
        self.rho, self.sigma_scale = rho, sigma_scale

    def broadcast(self, server: Slots, ctx: RoundContext) -> Slots:
        """Lines 5 to 7: ``w + rho delta / ||delta||``."""
        return server.replace(w=server.w + to_radius(server.delta, self.rho))

    def server_beta(self, n: int, m: int) -> float:
        """Line 22, with the scale that was asked for."""
        return self.beta * m if self.sigma_scale == "code" else super().server_beta(n, m)

    def server_step(self, server: Slots, sent: Slots, uploads: Uploads, ctx: RoundContext) -> Slots:
        """Lines 21 to 23; the pseudo-gradient is kept for the next perturbation."""
        delta = sent.w - uploads.weighted("w")
        return super().server_step(server.replace(delta=delta), sent, uploads, ctx)
