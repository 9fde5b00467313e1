"""Local optimizers that scale each coordinate: AdamW and Lion."""

import math

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import Keep, LocalOptimizer, Schedule
from fl_lightning.core import ClientContext, Fraction, Positive, State, WeightDecay


class AdamW(LocalOptimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019): Adam with bias correction and decoupled weight decay.

    Args:
        lr: Learning rate of round 0.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: A step multiplies the weights by ``1 - lr * weight_decay``.
        clip: As for `SGD`.
        lr_decay: As for `SGD`.
        schedule: As for `SGD`.
        state: Whether moments and count start afresh for every client and round (reset), or each client keeps them.

    Raises:
        UserError: If a value is out of range.
    """

    state = {"first": "zeros", "second": "zeros", "count": 0.0}

    def __init__(
        self,
        lr: Positive = 0.001,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.999,
        eps: Positive = 1e-8,
        weight_decay: WeightDecay = 0.01,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
        state: Keep = "reset",
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule, state)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay

    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step; see `LocalOptimizer.step`."""
        memory = self.moments(self.clipped(direction), memory)
        return w - lr * (self.scaled(memory) + self.weight_decay * w), memory

    def moments(self, g: Tensor, memory: State) -> State:
        """Returns the moments after a gradient ``(..., d)``."""
        first = self.beta1 * memory.first + (1 - self.beta1) * g
        second = self.beta2 * memory.second + (1 - self.beta2) * g * g
        return State({"first": first, "second": second, "count": memory.count + 1})

    def scaled(self, memory: State) -> Tensor:
        """Returns the first moment over the root of the second, both corrected for their bias, ``(..., d)``."""
        first = memory.first / unbias(self.beta1, memory.count[..., :1])
        second = memory.second / unbias(self.beta2, memory.count[..., -1:])  # `FedAdamW` counts them separately
        return first / (second.sqrt() + self.eps)


def unbias(beta: float | Tensor, count: Tensor) -> Tensor:
    """Returns ``1 - beta^count`` without cancellation in float32."""
    log = beta.log() if isinstance(beta, Tensor) else math.log(beta) if beta else -math.inf
    return -torch.expm1(count * log)


class Lion(LocalOptimizer):
    """Lion (Chen et al., NeurIPS 2023): the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        lr: Learning rate of round 0.
        beta1: Weight of the momentum in the step's direction.
        beta2: Decay of the momentum.
        weight_decay: A step multiplies the weights by ``1 - lr * weight_decay``.
        clip: As for `SGD`.
        lr_decay: As for `SGD`.
        schedule: As for `SGD`.
        state: As for `SGD`.

    Raises:
        UserError: If a value is out of range.
    """

    state = {"momentum": "zeros"}

    def __init__(
        self,
        lr: Positive = 0.0001,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        weight_decay: WeightDecay = 0.0,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
        state: Keep = "reset",
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule, state)
        self.beta1, self.beta2, self.weight_decay = beta1, beta2, weight_decay

    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step; see `LocalOptimizer.step`."""
        g, m = self.clipped(direction), memory.momentum
        u = torch.sign(self.beta1 * m + (1 - self.beta1) * g)
        return w - lr * (u + self.weight_decay * w), State({"momentum": self.beta2 * m + (1 - self.beta2) * g})
