"""FedCM and MoFedSAM: clients step along a mix of their gradient and the last global direction."""

from typing import Annotated, Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import SAM, Gradient, Step
from fl_lightning.core import ClientContext, Interval, NonNegative, RoundContext, State, Uploads, Weighting


class FedCM(LocalObjective):
    """Client momentum: ``alpha g + (1 - alpha) delta``, with delta the last mean update in units of a gradient.

    Args:
        net: The network.
        alpha: Weight of the client's own gradient.
        step: The server's step: along the mean update, or along delta (FedGF's code), 1/(K lr) times as far.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Xu et al., 2021"
    needs_sgd = "divides a displacement by the sum of SGD's learning rates to get a gradient"
    server_state = {"delta": "zeros"}
    down = ("w", "delta")
    default_weighting: Weighting = "uniform"

    def __init__(
        self,
        net: nn.Module,
        alpha: Annotated[float, Interval("(0, 1]")] = 0.1,
        step: Literal["mean", "gf_repo"] = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.alpha, self.step = alpha, step

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``alpha g + (1 - alpha) delta``."""
        g = self.local_gradient(w, grad, client, received, ctx)
        return self.alpha * g + (1 - self.alpha) * received.delta, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``delta <- (w^t - mean w_i) / (K lr)``; the model as FedAvg's."""
        delta = (sent.w - uploads.mean("w")) / uploads.mean("k_lr")
        server = server.replace(delta=delta)
        if self.step == "gf_repo":
            return self.server_update(server, delta, ctx)
        return super().server_step(server, sent, uploads, ctx)


class MoFedSAM(FedCM):
    """FedCM whose clients run SAM.

    Args:
        net: The network.
        rho: Radius of the ascent.
        **kwargs: As for `FedCM`.
    """

    paper = "Qu et al., ICML 2022"

    def __init__(self, net: nn.Module, rho: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, ascent=SAM(rho), **kwargs)
