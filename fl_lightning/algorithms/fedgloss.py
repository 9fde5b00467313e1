"""FedGloSS: a sharpness-aware step of the server along the last pseudo-gradient; S~AM: along the last gradient."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts import SAM, Gradient, Step, admm_dual, warm_up
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    NonNegativeInt,
    RoundContext,
    State,
    Upload,
    Uploads,
    Weighting,
    ensure,
    to_radius,
)


class FedGloSS(FedDyn):
    """Caldarola et al., 2024, Algorithm 1: FedDyn around a model perturbed along the last round's pseudo-gradient.

    Clients run SGD, or SAM with ``ascent: SAM``. In round 0 there is no pseudo-gradient, and no perturbation.

    Args:
        net: The network.
        rho: Radius of the server's perturbation, rho_s.
        sigma_scale: Scale of the server's dual: 1/(beta M) as in the paper, or 1/(beta M S) as in the official code.
        sigma_ref: Reference of the server's dual: the perturbed model that was sent, as for the clients (and in the
            official code), or the clean one (line 22 as printed; lam is then not the mean of lam_i, and the norm of w
            grows).
        rho_schedule: The server's radius by round: constant; linear (as the clients' warm-up); or repo_bug, as in the
            official code: the clients' rho + (rho - rho0) / T_s in rounds 1 to T_s, then rho.
        warmup: Rounds T_s of that schedule.
        rho0: Its first radius.
        **kwargs: As for `FedDyn`; ``use_dual: false`` is "without ADMM" (Table 9).
    """

    paper = "Caldarola et al., CVPR 2025"
    server_state = {**FedDyn.server_state, "delta": "zeros"}
    default_weighting: Weighting = "samples"

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        sigma_scale: Literal["paper", "code"] = "paper",
        sigma_ref: Literal["perturbed", "clean"] = "perturbed",
        rho_schedule: Literal["constant", "linear", "repo_bug"] = "constant",
        warmup: NonNegativeInt = 0,
        rho0: NonNegative = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        ensure(
            not self.virtual or (sigma_scale, sigma_ref) == ("paper", "perturbed"),
            "model.absent = virtual: the server's dual is the mean of all clients'; leave out sigma_scale, sigma_ref",
        )
        self.rho, self.sigma_scale, self.sigma_ref = rho, sigma_scale, sigma_ref
        self.rho_schedule, self.warmup, self.rho0 = rho_schedule, warmup, rho0

    def radius(self, t: int) -> float:
        """Returns the server's radius in round ``t``, counted from 0."""
        if self.rho_schedule == "constant":
            return self.rho
        if self.rho_schedule == "linear":
            return warm_up(self.rho, self.rho0, self.warmup, t)
        clients = self.ascent.rho if isinstance(self.ascent, SAM) else 0.0
        return clients + (self.rho - self.rho0) / self.warmup if 1 <= t <= self.warmup else self.rho

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """Lines 5 to 7: ``w + rho delta / ||delta||``."""
        return server.replace(w=server.w + to_radius(server.delta, self.radius(ctx.t)))

    def server_dual(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> Tensor:
        """Line 22, with the reference and the scale of the options."""
        if self.virtual:
            return super().server_dual(server, sent, uploads, ctx)
        w = server.w if self.sigma_ref == "clean" else self.mean_start(sent, uploads)
        n = 1 if self.sigma_scale == "code" else uploads.n
        return admm_dual(server.lam, uploads.mean("w"), w, self.beta * ctx.m / n)

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 21 to 23; keeps the pseudo-gradient for the next perturbation."""
        delta = sent.w - uploads.weighted("w")
        return super().server_step(server.replace(delta=delta), sent, uploads, ctx)


class NaiveFedGloSS(FedGloSS):
    """FedGloSS with the true pseudo-gradient: the cohort trains from ``w^t`` to find it, then from the perturbed model.

    Duals change in the second phase only. It takes twice the communication and computation.

    Args:
        net: The network.
        **kwargs: As for `FedGloSS`.
    """

    phases = 2

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        ensure(
            not self.relaxed_init,
            f"model.relaxed_init = {self.relaxed_init}: not with NaiveFedGloSS's two phases; use 0",
        )

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """First ``w^t``, then the perturbed model."""
        return server if ctx.phase == 0 else super().broadcast(server, ctx)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """In the first phase the dual does not change."""
        base = LocalObjective if ctx.phase == 0 else FedGloSS
        return base.local_end(self, w, client, received, ctx)

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """In the first phase only the pseudo-gradient, then FedGloSS's step."""
        if ctx.phase == 0:
            return server.replace(delta=sent.w - uploads.weighted("w"))
        return super().server_step(server, sent, uploads, ctx)


class STildeAM(LocalObjective):
    """The centralized reference of FedGloSS, Table 6: FedGloSS's cheap ascent in a single optimizer, one pass per step.

    ``g_i = grad(w + rho g_(i-1) / ||g_(i-1)||)``; the first step has no ascent. The paper has no box; this is our
    interpretation. In a federation every round starts without a previous gradient.

    Args:
        net: The network.
        rho: Radius of the ascent.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Caldarola et al., CVPR 2025, Table 6"
    scratch_state = {"g": "zeros"}

    def __init__(self, net: nn.Module, rho: NonNegative = 0.05, **kwargs: Any) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho = rho

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Returns the gradient at the ascent point, and keeps it for the next one."""
        g = grad(w + to_radius(client.g, self.rho))
        return g, client.replace(g=g)
