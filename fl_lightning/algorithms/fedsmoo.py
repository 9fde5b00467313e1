"""FedSMOO: a perturbation on which all clients agree, by ADMM."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts import Gradient, Step, warm_up
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    NonNegativeInt,
    RoundContext,
    State,
    Upload,
    Uploads,
    to_radius,
)


class FedSMOO(FedDyn):
    """Sun et al., ICML 2023, Algorithm 1: FedDyn's duals for the weights, further duals for the perturbation.

    Args:
        net: The network.
        rho: Radius of the perturbation.
        s_agg: The mean that gives the global perturbation: of mu minus the last perturbation (the paper), or of mu
            (FL-Simulator).
        warmup: Rounds over which the radius grows linearly from ``rho0``; 0: none. FedGloSS's FedSMOO+wp has it.
        rho0: Its first radius.
        **kwargs: As for `FedDyn`; with ``use_dual: false`` it is "FedSMOO w/o Reg" of the FedGF paper.
    """

    paper = "Sun et al., ICML 2023"
    client_state = {**FedDyn.client_state, "mu": "zeros"}
    server_state = {**FedDyn.server_state, "s": "zeros"}
    scratch_state = {"s_hat": "zeros"}
    down, up = ("w", "s"), ("w", "s")
    references = {**FedDyn.references, "s": "zeros"}
    dense = ("s",)

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        s_agg: Literal["mu_minus_shat", "mu_only"] = "mu_minus_shat",
        warmup: NonNegativeInt = 0,
        rho0: NonNegative = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.s_agg, self.warmup, self.rho0 = rho, s_agg, warmup, rho0

    def radius(self, t: int) -> float:
        """Returns the radius of round ``t``, counted from 0."""
        return warm_up(self.rho, self.rho0, self.warmup, t)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Lines 7 to 11."""
        s_hat = to_radius(grad(w) - client.mu - received.s, self.radius(ctx.t))  # 7, 8
        mu = client.mu + s_hat - received.s  # 9
        g_hat = grad(w + s_hat)  # 10
        return self.corrected(g_hat, w, client), client.replace(mu=mu, s_hat=s_hat)  # 11

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Lines 13 to 15."""
        upload, client = super().local_end(w, client, received, ctx)  # 14
        s = client.mu if self.s_agg == "mu_only" else client.mu - client.s_hat  # 13
        return {**upload, "s": s}, client  # 15

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 17 to 19."""
        s = to_radius(uploads.mean("s"), self.radius(ctx.t))  # 17
        return super().server_step(server.replace(s=s), sent, uploads, ctx)  # 18, 19
