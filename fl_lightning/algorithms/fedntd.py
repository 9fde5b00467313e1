"""FedNTD."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import NonNegative, Positive, State, kl_to_teacher, not_true


class FedNTD(LocalObjective):
    """Not-true distillation: cross-entropy + gamma KL to the received model over all classes except the true one.

    Args:
        net: The network.
        gamma: Weight of the KL term.
        tau: Its temperature.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Lee et al., NeurIPS 2022"
    needs_classes = True
    refers_to_received = True

    def __init__(self, net: nn.Module, gamma: NonNegative = 1.0, tau: Positive = 1.0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.gamma, self.tau = gamma, tau

    def teacher(self, client: State, received: State) -> Tensor:
        """Returns the received model, w^t."""
        return received.w

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """``CE(z, y) + gamma tau^2 KL(teacher || student)`` without the true class."""
        kl = kl_to_teacher(not_true(logits, target), not_true(teacher[0], target), self.tau)
        return super().losses(logits, target) + self.gamma * kl
