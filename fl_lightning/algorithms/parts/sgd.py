"""The local optimizer: SGD on flat vectors."""

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import Checked, Decay, NonNegative, Positive, norm


class SGD(Checked, key="model.optimizer"):
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
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.clip, self.lr_decay, self.schedule = clip, lr_decay, schedule

    def lr_at(self, t: int, rounds: int) -> float:
        """Returns the learning rate of round ``t``, counted from 0."""
        return self.lr * self.lr_decay**t * (self.schedule(t, rounds) if self.schedule else 1.0)

    def step(
        self, w: Tensor, direction: Direction, buffer: Tensor | None, lr: float | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Takes one step.

        Args:
            w: Weights, ``(..., d)``.
            direction: The algorithm's direction.
            buffer: Momentum buffer of the last step, ``(..., d)``; None at the first step.
            lr: Learning rate, or several, ``(..., 1)``.

        Returns:
            The new weights and the new buffer.
        """
        u, unclipped = direction if isinstance(direction, tuple) else (direction, None)
        if self.clip is not None:
            u = u * (self.clip / (norm(u) + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
        if unclipped is not None:
            u = u + unclipped
        if self.weight_decay:
            u = torch.add(u, w, alpha=self.weight_decay)
        if self.momentum:
            u = buffer = u if buffer is None else torch.add(u, buffer, alpha=self.momentum)
        return w - lr * u, buffer
