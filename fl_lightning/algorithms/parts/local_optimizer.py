"""The interface of the local optimizers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import Checked, FlatSpec, Init, Positive, State, UserError, norm


class LocalOptimizer(Checked, key="model.optimizer"):
    """A local optimizer: the learning rate by round, and one local step.

    Args:
        lr: Learning rate of round 0.
        clip: Largest norm of the direction, corrections included; null: no clipping.
        lr_decay: Factor of the learning rate per round.
        schedule: A further factor by round.

    Attributes:
        momentum: Factor of the momentum buffer; 0 where there is none.
        batches: Whether a step takes the vectors of several clients, ``(clients, d)``.
    """

    momentum: float = 0.0
    batches: ClassVar[bool] = True

    def __init__(self, lr: Positive, clip: Positive | None, lr_decay: Positive, schedule: Schedule | None) -> None:
        self.lr, self.clip, self.lr_decay, self.schedule = lr, clip, lr_decay, schedule

    def lr_at(self, t: int, rounds: int) -> float:
        """Returns the learning rate of round ``t``, counted from 0."""
        return self.lr * self.lr_decay**t * (self.schedule(t, rounds) if self.schedule else 1.0)

    def clipped(self, direction: Direction) -> Tensor:
        """Returns the direction as one vector ``(..., d)``, with what may be clipped at most ``clip`` long."""
        u, unclipped = direction if isinstance(direction, tuple) else (direction, None)
        if self.clip is not None:
            u = u * (self.clip / (norm(u) + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
        return u if unclipped is None else u + unclipped

    def check(self, flat: FlatSpec) -> None:
        """Checks that the optimizer takes weights of this layout.

        Raises:
            UserError: If it does not.
        """

    def check_batched(self, what: str) -> None:
        """Checks that a step takes several clients.

        Args:
            what: What needs it, for the error message.

        Raises:
            UserError: If it takes one client only.
        """
        if not self.batches:
            name = type(self).__name__
            raise UserError(f"{what}: model.optimizer = {name} steps one client at a time; use sequential, or SGD")

    def client_state(self, flat: FlatSpec) -> Mapping[str, Init]:
        """Returns what of the optimizer a client keeps between rounds, by name with its initial value.

        Args:
            flat: Layout of the weights.
        """
        return {}

    def begin(self, flat: FlatSpec, client: State) -> Any:
        """Returns what the first `step` of a client's local training takes as ``memory``."""
        return None

    def step(self, w: Tensor, direction: Direction, memory: Any, lr: float | Tensor) -> tuple[Tensor, Any]:
        """Takes one step.

        Args:
            w: Weights, ``(..., d)``.
            direction: The algorithm's direction.
            memory: What the last step, or `begin`, returned.
            lr: Learning rate, or several, ``(..., 1)``.

        Returns:
            The new weights, and the memory of the next step.
        """
        raise TypeError(f"{type(self).__name__} must define step")

    def end(self, memory: Any) -> Mapping[str, Tensor]:
        """Returns the values of `client_state` after the last step."""
        return {}
