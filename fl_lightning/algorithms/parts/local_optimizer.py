"""The interface of the local optimizers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import Checked, ClientContext, FlatSpec, Init, Positive, State, ensure, norm

Keep = Literal["reset", "keep"]
"""What happens to an optimizer's state at the end of a round: the next round starts afresh, or the client keeps it."""

Take = Callable[[Tensor, Direction, State, float | Tensor, ClientContext], tuple[Tensor, State]]
"""`LocalOptimizer.take`."""


class LocalOptimizer(Checked, ABC, key="model.optimizer"):
    """A local optimizer: the learning rate by round, and one local step.

    A subclass declares its ``state`` and defines `step`. Vectors have shape ``(..., d)``, as in the hooks of an
    algorithm, and the same rules hold: the last axis only is reduced, and nothing changes in place. Then it runs on
    every engine.

    Hooks see the state as client state, under the name of the class: ``client["Lion.momentum"]``.

    Args:
        lr: Learning rate of round 0.
        clip: Largest norm of the direction, corrections included; null: no clipping.
        lr_decay: Factor of the learning rate per round.
        schedule: A further factor by round.
        state: Whether each client and round starts from the initial state (reset), or from the client's last (keep).

    Attributes:
        state: Initial values of its state by name (see `fl_lightning.core.state.Init`). If it starts from them in every
            round, ``"w0"`` and ``"w"`` are the weights where local training starts.
        momentum: Factor of the momentum buffer, for optimizers that have one, such as SGD.
        supports_batching: Whether a step takes the vectors of several clients, ``(clients, d)``.
    """

    state: Mapping[str, Init] = {}
    momentum: float = 0.0
    supports_batching: ClassVar[bool] = True

    def __init__(
        self,
        lr: Positive = 0.1,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
        state: Keep = "reset",
    ) -> None:
        self.lr, self.clip, self.lr_decay, self.schedule = lr, clip, lr_decay, schedule
        self.keeps_state = state == "keep"

    def lr_at(self, t: int, rounds: int) -> float:
        """Returns the learning rate of round ``t``, counted from 0."""
        return self.lr * self.lr_decay**t * (self.schedule(t, rounds) if self.schedule else 1.0)

    def clipped(self, direction: Direction) -> Tensor:
        """Returns the direction as one vector ``(..., d)``; its part that may be clipped is at most ``clip`` long."""
        u, unclipped = direction if isinstance(direction, tuple) else (direction, None)
        u = u if self.clip is None else u * (self.clip / (norm(u) + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
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
        ensure(
            self.supports_batching,
            f"{what}: model.optimizer = {type(self).__name__} steps one client at a time; use sequential, or SGD",
        )

    @property
    def named_state(self) -> dict[str, Init]:
        """The initial values of the state by the names under which the client's state holds it."""
        return {f"{type(self).__name__}.{name}": init for name, init in self.state.items()}

    def begin(self, flat: FlatSpec, start: Tensor) -> Take:
        """Returns the function that takes the steps of one local training, by default `take`.

        Args:
            flat: Layout of the weights.
            start: Weights where local training starts, ``(..., d)``.
        """
        return self.take

    @abstractmethod
    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step.

        Args:
            w: Weights, ``(..., d)``.
            direction: The algorithm's direction.
            memory: The optimizer's state after the last step.
            lr: Learning rate, or several, ``(..., 1)``.
            ctx: The context; ``ctx.flat`` knows the shapes of the parameters.

        Returns:
            The new weights, and the new state.
        """

    def take(
        self, w: Tensor, direction: Direction, client: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step with the state that ``client`` holds.

        Returns:
            The new weights, and the client's state.
        """
        name = type(self).__name__
        names = {own: f"{name}.{own}" for own in self.state}
        memory = State({own: client[of] for own, of in names.items()})
        w, memory = self.step(w, direction, memory, lr, ctx)
        return w, client | {of: memory[own] for own, of in names.items()} if names else client
