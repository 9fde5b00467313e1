"""Local optimizers with a state: AdamW, Lion and Muon, and those of torch."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import Keep, LocalOptimizer, Schedule, Take
from fl_lightning.core import (
    ClientContext,
    FlatSpec,
    Fraction,
    Positive,
    PositiveInt,
    State,
    UserError,
    WeightDecay,
    class_at,
    folded,
    require,
)


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


class Muon(AdamW):
    """Muon (Jordan et al., 2024): the momentum of each matrix is orthogonalized; AdamW updates the other parameters.

    A parameter of more than two axes is the matrix (first axis, all others). As in the authors' code, a step is scaled
    by ``sqrt(max(1, a / b))`` with the lengths a, b of the parameter's last two axes; a step of a square or wide matrix
    has singular values of about 1. Weight decay is decoupled.

    Args:
        lr: Learning rate of round 0, of the matrices.
        momentum: Decay of the matrices' momentum, which is a running mean of the gradients.
        nesterov: Whether the step looks ahead along the momentum.
        ns_steps: Number of Newton-Schulz iterations.
        ns_bfloat16: Whether they are done in bfloat16, as in the authors' code, or in the precision of the weights.
        weight_decay: A step multiplies the weights by one minus their learning rate times ``weight_decay``.
        lr_others: Learning rate of the other parameters as a multiple of ``lr``.
        beta1: Decay of the first moment of the other parameters.
        beta2: Decay of their second moment.
        eps: Added to the root of their second moment.
        clip: As for `SGD`.
        lr_decay: As for `SGD`.
        schedule: As for `SGD`.
        state: As for `AdamW`.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(
        self,
        lr: Positive = 0.02,
        momentum: Fraction = 0.95,
        nesterov: bool = True,
        ns_steps: PositiveInt = 5,
        ns_bfloat16: bool = False,
        weight_decay: WeightDecay = 0.01,
        lr_others: Positive = 0.05,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.95,
        eps: Positive = 1e-10,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
        state: Keep = "reset",
    ) -> None:
        super().__init__(lr, beta1, beta2, eps, weight_decay, clip, lr_decay, schedule, state)
        self.momentum, self.nesterov, self.lr_others = momentum, nesterov, lr_others
        self.ns_steps, self.ns_bfloat16 = ns_steps, ns_bfloat16

    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes one step; see `LocalOptimizer.step`."""
        flat, updates = ctx.flat, list[tuple[Tensor, Tensor, Tensor]]()
        vectors = (w, self.clipped(direction), memory.first, memory.second)
        for shape, *part in zip(flat.shapes, *(torch.split(v, flat.numels, -1) for v in vectors), strict=True):
            weights, g, first, second = part
            if len(shape) > 1:
                first = self.momentum * first + (1 - self.momentum) * g
                u = (1 - self.momentum) * g + self.momentum * first if self.nesterov else first
                u = u.bfloat16() if self.ns_bfloat16 else u
                u = orthogonalized(u.unflatten(-1, (shape[0], -1)), self.ns_steps).flatten(-2).to(g.dtype)
                rate, u = 1.0, u * max(1.0, shape[-2] / shape[-1]) ** 0.5
            else:
                moments = self.moments(g, State({"first": first, "second": second, "count": memory.count}))
                rate, u, first, second = self.lr_others, self.scaled(moments), moments.first, moments.second
            updates.append((rate * (u + self.weight_decay * weights), first, second))
        step, first, second = (torch.cat(parts, -1) for parts in zip(*updates, strict=True))
        return w - lr * step, State({"first": first, "second": second, "count": memory.count + 1})


def orthogonalized(u: Tensor, steps: int) -> Tensor:
    """Returns about ``U V^T`` of the singular value decomposition ``U S V^T``, by quintic Newton-Schulz iterations.

    With five steps the singular values of the result lie between about 0.65 and 1.25.

    Args:
        u: Matrices ``(..., rows, columns)``.
        steps: Number of iterations.
    """
    x: Tensor = u.mT if u.shape[-2] > u.shape[-1] else u
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        square = 2.0315 * a @ a if a.dtype == torch.bfloat16 else 2.0315 * (a @ a)  # FedMuon's program rounds so
        x = 3.4445 * x + (-4.7750 * a + square) @ x
    return x.mT if u.shape[-2] > u.shape[-1] else x


class TorchOptimizer(LocalOptimizer):
    """Any optimizer of ``torch.optim``, or another class with its interface, on the sequential engine.

    The algorithm's direction is its gradient, so an ascent and an algorithm's corrections work as with SGD. It steps
    the parameters one by one, in their own shapes. Its state, such as Adam's moments, starts afresh for every client
    and round. SGD, AdamW, Lion and Muon of this package run on all engines, and a client can keep their state.

    Args:
        name: The class: a name in ``torch.optim``, or a dotted path.
        lr: Learning rate of round 0.
        options: Further arguments of the class, such as ``{weight_decay: 0.01}``.
        clip: As for SGD.
        lr_decay: As for SGD.
        schedule: As for SGD.

    Raises:
        UserError: If there is no such class, it does not take these options, or needs the loss again in a step (LBFGS)
            or sparse gradients.
    """

    supports_batching: ClassVar[bool] = False

    def __init__(
        self,
        name: str = "AdamW",
        lr: Positive = 0.001,
        options: dict[str, Any] | None = None,
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule)
        self.name, self.options = name, dict(options or {})
        require("lr" not in self.options, "model.optimizer.options.lr", self.options.get("lr"), "give it as lr")
        self._class: Any = class_at(name, ["torch.optim"], torch.optim.Optimizer)
        remedy = "give a class of torch.optim, such as AdamW, or its dotted path"
        require(self._class is not None, "model.optimizer.name", name, remedy)
        matrix = nn.Parameter(torch.zeros(2, 2))
        matrix.grad = torch.zeros_like(matrix)
        optimizer = self.make([matrix])
        try:
            optimizer.step()
        except (TypeError, RuntimeError, AssertionError) as error:  # it takes a closure, sparse gradients, or a GPU
            raise self._refused(error) from None

    def begin(self, flat: FlatSpec, start: Tensor) -> Take:
        parameters = [nn.Parameter(part) for part in flat.split(start.clone()).values()]
        optimizer = self.make(parameters)

        def take(
            w: Tensor, direction: Direction, client: State, lr: float | Tensor, ctx: ClientContext
        ) -> tuple[Tensor, State]:
            vectors = w, self.clipped(direction)
            for parameter, value, g in zip(parameters, *(flat.split(v).values() for v in vectors), strict=True):
                parameter.data.copy_(value)
                parameter.grad = g
            for group in optimizer.param_groups:
                group["lr"] = float(lr)
            optimizer.step()
            return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), client

        return take

    def step(
        self, w: Tensor, direction: Direction, memory: State, lr: float | Tensor, ctx: ClientContext
    ) -> tuple[Tensor, State]:
        """Takes the first step of a local training; `begin` returns what takes all of them."""
        return self.begin(ctx.flat, w)(w, direction, memory, lr, ctx)

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the optimizer of some parameters.

        Raises:
            UserError: If it does not take the options or the parameters.
        """
        try:
            optimizer: torch.optim.Optimizer = self._class(parameters, **{"lr": self.lr, **self.options})
        except (TypeError, ValueError) as error:
            raise self._refused(error) from None
        return optimizer

    def _refused(self, error: Exception) -> UserError:
        return UserError(
            f"model.optimizer = {self.name}: {folded(error):.150}; choose other options, or another optimizer"
        )
