"""A local optimizer of torch."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.algorithms.parts.local_optimizer import LocalOptimizer
from fl_lightning.algorithms.parts.schedules import Schedule
from fl_lightning.core import FlatSpec, Init, Positive, State, UserError, require, to_device


class TorchOptimizer(LocalOptimizer):
    """Any optimizer of ``torch.optim``, or another class with its interface, on the sequential engine.

    The algorithm's direction is its gradient, so an ascent and an algorithm's corrections work as with SGD. It steps
    the parameters one by one, in their own shapes.

    Args:
        name: The class: a name in ``torch.optim``, or a dotted path.
        lr: Learning rate of round 0.
        options: Further arguments of the class, such as ``{weight_decay: 0.01}``.
        state: Its state, such as Adam's moments: reset for every client and round, or kept by each client.
        clip: As for SGD.
        lr_decay: As for SGD.
        schedule: As for SGD.

    Raises:
        UserError: If there is no such class, it does not take these options, or needs the loss again in a step (LBFGS)
            or sparse gradients, or has state to be kept that is not of a parameter.
    """

    batches: ClassVar[bool] = False

    def __init__(
        self,
        name: str = "AdamW",
        lr: Positive = 0.001,
        options: dict[str, Any] | None = None,
        state: Literal["reset", "keep"] = "reset",
        clip: Positive | None = None,
        lr_decay: Positive = 1.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(lr, clip, lr_decay, schedule)
        self.name, self.options, self.state = name, dict(options or {}), state
        require("lr" not in self.options, "model.optimizer.options.lr", self.options.get("lr"), "give it as lr")
        self._class = _find(name)
        self._kept = f"state of {self._class.__name__}"  # what of one class means another thing of another
        self._layouts: dict[Any, list[dict[str, Any]]] = {}
        self._states([torch.zeros(2, 2)])  # one step of a small matrix

    def check(self, flat: FlatSpec) -> None:
        self.make([nn.Parameter(torch.zeros(()).expand(shape)) for shape in flat.shapes])  # of no memory

    def client_state(self, flat: FlatSpec) -> Mapping[str, Init]:
        if self.state == "reset":
            return {}
        n = 1 + sum(_numel(value) for _, _, value in _entries(self._layout(flat)))
        return {self._kept: lambda w0: w0.new_zeros(n)}  # the first number counts the steps

    def begin(self, flat: FlatSpec, client: State) -> "LocalSteps":
        steps = LocalSteps(self, flat, client.start)
        if self.state == "keep":
            steps.load(client[self._kept], self._layout(flat, client.start.device))
        return steps

    def step(self, w: Tensor, direction: Direction, memory: Any, lr: float | Tensor) -> tuple[Tensor, Any]:
        memory.step(w, self.clipped(direction), float(lr))
        return memory.w.clone(), memory

    def end(self, memory: "LocalSteps") -> Mapping[str, Tensor]:
        return {} if self.state == "reset" else {self._kept: memory.vector()}

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
        reason = " ".join(str(error).split())
        return UserError(f"model.optimizer = {self.name}: {reason:.150}; choose other options, or another optimizer")

    def _layout(self, flat: FlatSpec, device: torch.device | str = "cpu") -> list[dict[str, Any]]:
        """The state of each parameter after a step; of a tensor of several numbers only the shape."""
        key = (*flat.shapes, device)
        if key not in self._layouts:
            states = self._states([torch.zeros(shape, device=device) for shape in flat.shapes])
            for state, name, value in _entries(states):
                state[name] = value.to("meta") if _is_array(value) else value
            self._layouts[key] = states
        return self._layouts[key]

    def _states(self, values: list[Tensor]) -> list[dict[str, Any]]:
        parameters = [nn.Parameter(value) for value in values]
        optimizer = self.make(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        before = _options(optimizer)
        try:
            optimizer.step()
        except (TypeError, RuntimeError, AssertionError) as error:  # it takes a closure, sparse gradients, or a GPU
            raise self._refused(error) from None
        same = self.state == "reset" or _options(optimizer) == before
        require(same, "model.optimizer.state", "keep", f"{self.name} has state that is not of a parameter; take reset")
        return [dict(optimizer.state[parameter]) for parameter in parameters]


class LocalSteps:
    """The optimizer of one client's local training.

    Args:
        of: The options.
        flat: Layout of the weights.
        w: The weights before the first step, ``(d,)``.

    Attributes:
        w: The weights, ``(d,)``; a step changes them in place.
    """

    def __init__(self, of: TorchOptimizer, flat: FlatSpec, w: Tensor) -> None:
        self.flat, self.w, self.count = flat, w.clone(), 0.0
        self._parameters = [nn.Parameter(part) for part in flat.split(self.w).values()]  # they share its memory
        self._optimizer = of.make(self._parameters)

    def step(self, w: Tensor, gradient: Tensor, lr: float) -> None:
        """Takes one step from ``w`` against ``gradient``, both ``(d,)``."""
        self.w.copy_(w)
        for parameter, part in zip(self._parameters, self.flat.split(gradient).values(), strict=True):
            parameter.grad = part
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.count += 1

    def vector(self) -> Tensor:
        """Returns the number of steps so far and the optimizer's state as one vector ``(n,)``."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        parts = (torch.as_tensor(value).reshape(-1) for _, _, value in _entries(states))
        values = [to_device(part, self.w.device, self.w.dtype) for part in parts]
        return torch.cat([self.w.new_full((1,), self.count), *values])

    def load(self, vector: Tensor, layout: list[dict[str, Any]]) -> None:
        """Restores what `vector` returned; zeros change nothing.

        Args:
            vector: ``(n,)``.
            layout: The state of each parameter, as `TorchOptimizer` finds it.
        """
        states = deepcopy(layout)
        entries = [*_entries(states)]
        count, *parts = torch.split(vector, [1, *(_numel(value) for _, _, value in entries)])
        alone = [part for part, (_, _, value) in zip(parts, entries, strict=True) if not _is_array(value)]
        numbers = iter(torch.cat([count, *alone]).cpu())  # a GPU is waited for once
        self.count = float(next(numbers))
        if not self.count:
            return
        for part, (state, name, value) in zip(parts, entries, strict=True):
            if _is_array(value):  # of the shape of the parameter, or a part of it: where the weights are
                state[name] = part.view(value.shape).to(vector, copy=True)
            elif isinstance(value, Tensor):
                state[name] = next(numbers).to(value, copy=True)
            else:
                state[name] = type(value)(next(numbers).item())
        for parameter, state in zip(self._parameters, states, strict=True):
            self._optimizer.state[parameter] = state


def _entries(states: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The tensors and numbers in the states of all parameters, with the state and name of each."""
    for state in states:
        for name in sorted(state):
            if isinstance(state[name], Tensor | int | float):
                yield state, name, state[name]


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module or "torch.optim"), attribute, None)
    except (ImportError, TypeError):  # no such module, or a relative name
        found = None
    fits = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    require(fits, "model.optimizer.name", name, "give a class of torch.optim, such as AdamW, or its dotted path")
    return found
