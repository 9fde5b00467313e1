"""The local optimizers: their interface, schedules of the learning rate, and SGD."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.core import (
    Checked,
    ClientContext,
    FlatSpec,
    Fraction,
    Init,
    Interval,
    Positive,
    PositiveInt,
    State,
    UnitInterval,
    WeightDecay,
    ensure,
    norm,
)

Keep = Literal["reset", "keep"]
"""What happens to an optimizer's state at the end of a round: the next round starts afresh, or the client keeps it."""

Take = Callable[[Tensor, Direction, State, float | Tensor, ClientContext], tuple[Tensor, State]]
"""`LocalOptimizer.take`."""


class Schedule(Checked, ABC, key="model.optimizer.schedule"):
    """Base class of the schedules; a subclass defines ``__call__(t, rounds)``."""

    @abstractmethod
    def __call__(self, t: int, rounds: int) -> float:
        """Returns the factor of the learning rate in round ``t`` of ``rounds``, counted from 0."""


class Cosine(Schedule):
    """Half a cosine from 1 to ``floor`` over all rounds.

    Args:
        floor: Factor at the end.
    """

    def __init__(self, floor: UnitInterval = 0.0) -> None:
        self.floor = floor

    def __call__(self, t: int, rounds: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * t / rounds)) / 2


class Poly(Schedule):
    """``(1 - t / rounds) ** power``, common in segmentation (FedDrive: 0.9).

    FedDrive's own code creates a schedule for each client and round, with a length of 10,000 times its local steps:
    there the learning rate hardly falls.

    Args:
        power: Exponent; 1 falls linearly.

    Raises:
        UserError: If it is negative.
    """

    def __init__(self, power: Annotated[float, Interval("[0, 100]")] = 0.9) -> None:
        self.power = power

    def __call__(self, t: int, rounds: int) -> float:
        return float((1 - t / rounds) ** self.power)


class Cyclic(Schedule):
    """A sawtooth: ``(1 - s) + s floor``, ``s = ((t mod period) + 1) / period``: SWA's cycle, from the first round on.

    Args:
        period: Rounds of a cycle.
        floor: Factor in its last round.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(self, period: PositiveInt = 10, floor: UnitInterval = 0.01) -> None:
        self.period, self.floor = period, floor

    def __call__(self, t: int, rounds: int) -> float:
        return in_cycle(t, self.period, 1.0, self.floor)


def in_cycle(t: int, period: int, first: float, last: float) -> float:
    """``(1 - s) first + s last`` with ``s = ((t mod period) + 1) / period`` (FedASAM + SWA, ECCV 2022, Algorithm 1)."""
    s = (t % period + 1) / period
    return (1 - s) * first + s * last


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

    def check_batched(self, what: str, otherwise: str = "") -> None:
        """Checks that a step takes several clients.

        Args:
            what: What needs it, for the error message.
            otherwise: What helps beside another optimizer.

        Raises:
            UserError: If it takes one client only.
        """
        ensure(
            self.supports_batching,
            f"{what}: model.optimizer = {type(self).__name__} steps one client at a time; take SGD, AdamW, Lion or Muon"
            + otherwise,
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
        names = dict(zip(self.state, self.named_state, strict=True))
        memory = State({name: client[key] for name, key in names.items()})
        w, memory = self.step(w, direction, memory, lr, ctx)
        return w, client | {key: memory[name] for name, key in names.items()} if names else client


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
