"""FedSpeed, A-FedPDSAM and FedTOGA: FedDyn whose clients take the gradient at an ascent point, too."""

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


class FedTOGA(FedDyn):
    """FedDyn whose clients ascend and step along the last global update, too.

    Args:
        net: The network.
        rho: Radius of the ascent.
        b1: Weight of the global update in a step.
        kappa: Its weight in the ascent.
        last_g: What the ascent adds: of the step before the gradient at the ascent point (perturbed), or the whole
            direction but for ``w / beta`` (corrected: the ports with torch 2); the present gradient once more (present:
            the ports with older versions); or nothing (none).
        **kwargs: As for `FedDyn`.
    """

    paper = "Li et al., 2024 (arXiv:2408.14144)"
    server_state = {**FedDyn.server_state, "delta": "zeros"}
    scratch_state = {"r": "zeros"}
    down: tuple[str, ...] = ("w", "delta")

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        b1: NonNegative = 0.9,
        kappa: NonNegative = 1.0,
        last_g: Literal["perturbed", "corrected", "present", "none"] = "perturbed",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.b1, self.kappa, self.last_g = rho, b1, kappa, last_g

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``u = g(w + rho a / ||a||)`` with ``a = g(w) + kappa delta + r``; the step is ``u + b1 delta``, corrected."""
        g = grad(w)
        a = g + self.kappa * received.delta + (g if self.last_g == "present" else client.r)
        u = grad(w + to_radius(a, self.rho, 1e-7))
        step = u + self.b1 * received.delta
        if self.last_g == "perturbed":
            client = client.replace(r=u)
        elif self.last_g == "corrected":
            linear = step - client.lam - client.start / self.beta if self.use_dual else step
            client = client.replace(r=self.optimizer.clipped(linear))
        return self.corrected(step, w, client), client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``delta <- (mean start_i - mean w_i) / K``; FedDyn's step."""
        steps = uploads.mean("k_lr") / self.lr(ctx)
        delta = (self.mean_start(sent, uploads) - uploads.mean("w")) / steps
        return super().server_step(server.replace(delta=delta), sent, uploads, ctx)
