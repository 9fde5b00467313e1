"""A local optimizer of torch."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import LocalOptimizer, Schedule, Take
from fl_lightning.core import ClientContext, FlatSpec, Positive, State, UserError, class_at, folded, require


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

    def check(self, flat: FlatSpec) -> None:
        self.make([nn.Parameter(torch.zeros(()).expand(shape)) for shape in flat.shapes])  # takes no memory

    def begin(self, flat: FlatSpec, start: Tensor) -> Take:
        parameters = [nn.Parameter(part) for part in flat.split(start.clone()).values()]
        optimizer = self.make(parameters)

        def take(
            w: Tensor, direction: Direction, client: State, lr: float | Tensor, ctx: ClientContext
        ) -> tuple[Tensor, State]:
            vectors = w, self.clipped(direction)
            for parameter, at, part in zip(parameters, *(flat.split(v).values() for v in vectors), strict=True):
                parameter.data.copy_(at)
                parameter.grad = part
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
            made: torch.optim.Optimizer = self._class(parameters, **{"lr": self.lr, **self.options})
        except (TypeError, ValueError) as error:
            raise self._refused(error) from None
        return made

    def _refused(self, error: Exception) -> UserError:
        return UserError(
            f"model.optimizer = {self.name}: {folded(error):.150}; choose other options, or another optimizer"
        )
