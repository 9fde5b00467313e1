"""The local optimizer: SGD on flat vectors."""

from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import LocalOptimizer
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import Decay, NonNegative, Positive


class SGD(LocalOptimizer):
    """SGD with momentum and coupled weight decay; momentum starts from zero for every client and round.

    In this order: clip the direction, add ``weight_decay * w`` (at the unperturbed weights), momentum, step.

    Args:
        lr: Learning rate of round 0.
        momentum: Factor of the momentum buffer.
        weight_decay: L2 factor.
        clip: Largest norm of the direction, corrections included; null: no clipping.
        lr_decay: Factor of the learning rate per round.
        schedule: A further factor by round.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        momentum: Decay = 0.0,
        weight_decay: NonNegative = 0.0,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule)
        self.momentum, self.weight_decay = momentum, weight_decay

    def step(self, w: Tensor, direction: Direction, memory: Any, lr: float | Tensor) -> tuple[Tensor, Tensor | None]:
        """Takes one step.

        Args:
            w: Weights, ``(..., d)``.
            direction: The algorithm's direction.
            memory: Momentum buffer of the last step, ``(..., d)``; None at the first step.
            lr: Learning rate, or several, ``(..., 1)``.

        Returns:
            The new weights and the new buffer.
        """
        u = self.clipped(direction)
        if self.weight_decay:
            u = torch.add(u, w, alpha=self.weight_decay)
        if self.momentum:
            u = memory = u if memory is None else torch.add(u, memory, alpha=self.momentum)
        return w - lr * u, memory
