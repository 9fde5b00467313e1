"""The local optimizer: SGD on flat vectors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import Keep, LocalOptimizer
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import ClientContext, Fraction, Init, Positive, State, WeightDecay


class SGD(LocalOptimizer):
    """SGD with momentum and coupled weight decay.

    In this order: clip the direction, add ``weight_decay * w`` (at the unperturbed weights), momentum, step.

    Args:
        lr: Learning rate of round 0.
        momentum: Factor of the momentum buffer.
        weight_decay: L2 factor.
        clip: Largest norm of the direction, corrections included; null: no clipping.
        lr_decay: Factor of the learning rate per round.
        schedule: A further factor by round.
        state: Whether the momentum starts from zero for every client and round (reset), or each client keeps it (keep).

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        momentum: Fraction = 0.0,
        weight_decay: WeightDecay = 0.0,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
        state: Keep = "reset",
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule, state)
        self.momentum, self.weight_decay = momentum, weight_decay

    @property
    def state(self) -> Mapping[str, Init]:  # type: ignore[override]  # a class without momentum has no buffer
        """The momentum buffer, if there is momentum."""
        return {"momentum": "zeros"} if self.momentum else {}

    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step; see `LocalOptimizer.step`."""
        u = self.clipped(direction)
        u = torch.add(u, w, alpha=self.weight_decay) if self.weight_decay else u
        if self.momentum:
            u = torch.add(u, memory.momentum, alpha=self.momentum)
            memory = State({"momentum": u})
        return w - lr * u, memory
