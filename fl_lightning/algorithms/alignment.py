"""What FedMuon and FedAdamW share: a further step along the last global direction, and a mean of optimizer states."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ClientContext, RoundContext, State, UnitInterval, Uploads, Weighting, ensure


class Aligned(LocalObjective):
    """After each step of the local optimizer ``w <- w - lr gamma G``, with G the last mean update as a gradient.

    Args:
        net: The network.
        gamma: Share of the global direction.
        **kwargs: As for `LocalObjective`; clients do not keep the optimizer's state.
    """

    server_state = {"G": "zeros"}
    down: tuple[str, ...] = ("w", "G")
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, gamma: UnitInterval = 0.5, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        ensure(
            not self.optimizer.keeps_state,
            f"model.optimizer.state = keep: clients of {type(self).__name__} start from the server's; set it to reset",
        )
        ensure(
            not self.personal,
            f"model.parts: {type(self).__name__} averages optimizers' states whole, so no client may have an own "
            "model; leave that part out",
        )
        self.gamma = gamma

    @property
    def rate(self) -> float:
        """The learning rate of the global direction, as a multiple of the optimizer's."""
        return 1.0

    def own(self, name: str) -> str:
        """Returns the name of a value of the optimizer's state in the client's."""
        return f"{type(self.optimizer).__name__}.{name}"

    def after_step(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Tensor:
        """``w <- w - lr gamma G``."""
        return w - ctx.lr * self.rate * self.gamma * received.G

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``G <- (w^t - mean w_i) / (K lr)``; the model as FedAvg's."""
        G = (sent.w - uploads.mean("w")) / (uploads.mean("k_lr") * self.rate)
        return super().server_step(server.replace(G=G), sent, uploads, ctx)
