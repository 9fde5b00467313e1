"""FedProx."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import Gradient, Step, prox_pull
from fl_lightning.core import ClientContext, NonNegative, State


class FedProx(LocalObjective):
    """FedAvg with ``mu/2 ||w - w^t||^2`` in the local objective; an ascent follows the loss alone.

    Args:
        net: The network.
        mu: Weight of the proximal term.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Li et al., MLSys 2020"
    refers_to_received = True

    def __init__(self, net: nn.Module, mu: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g + mu (w - w^t)``."""
        return self.local_gradient(w, grad, client, received, ctx) + prox_pull(w, client.start, self.mu), client
