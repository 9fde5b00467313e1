"""MAN: small activations, as a term of the local objective."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fl_lightning.algorithms.module import SupervisedModule
from fl_lightning.algorithms.parts.base import Further, Part
from fl_lightning.core import NonNegative, ensure, matching

KEY = "model.parts: MAN"
ACTIVATIONS = {
    torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.relu, functional.relu_, functional.relu6,
    functional.hardtanh, functional.leaky_relu, functional.prelu, functional.elu, functional.selu, functional.celu,
    functional.gelu, functional.silu, functional.mish, functional.hardswish,
    torch.selu, torch.selu_, torch.celu, torch.celu_, functional.leaky_relu_, functional.elu_, functional.hardtanh_,
}  # fmt: skip
"""Functions whose results are activations; modules such as ``nn.ReLU`` call them, too, and ``nn.ReLU6`` hardtanh."""
POOLINGS = {
    torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
    functional.max_pool1d, functional.max_pool2d, functional.max_pool3d, torch.adaptive_max_pool1d,
    functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d,
}  # fmt: skip


class MAN(Part):
    """Minimize the activations' norms (WACV 2024, arXiv:2512.08314): the local loss gets ``zeta/2 sum_l q_l``.

    q_l is the mean square of the activations of layer l, over all units, positions and samples of the minibatch. It
    takes no further pass. In SAM methods it is in both passes; evaluation and flatness are those of the loss alone.

    Args:
        zeta: Twice the factor of the term.
        layers: Names of the modules whose outputs are activations, with ``*``, ``?`` and ``[...]`` as in a shell; null:
            the results of all activation functions (ReLU, GELU, SiLU and the like), as often as they are called.
        before_pooling: Whether an activation function that follows a max-pooling counts as if it came before. Results
            are the same, and nets of this package have this order, as it is faster; the published nets have the other.

    Raises:
        UserError: If a name matches no module, or one that returns no tensor; if the net calls no activation function.
    """

    def __init__(self, zeta: NonNegative = 0.15, layers: list[str] | None = None, before_pooling: bool = True) -> None:
        self.zeta, self.layers, self.before_pooling = zeta, layers, before_pooling

    def attach(self, objective: Any) -> None:
        """Checks the names of ``layers``, and that the local objective is one to which the term can be added."""
        kind = type(objective)
        custom = kind.training_step is not SupervisedModule.training_step
        ensure(
            not custom, f"{KEY}: {kind.__name__} has a training_step of its own, which lacks the term; define losses"
        )
        self._modules(objective.net)

    def _modules(self, net: nn.Module) -> list[nn.Module]:
        """Returns the modules that ``layers`` names; none if it is null."""
        names = [name for name, _ in net.named_modules() if name]
        chosen = [] if self.layers is None else matching(names, self.layers, f"{KEY}: layers")
        return [net.get_submodule(name) for name in chosen]

    @contextmanager
    def further(self, net: nn.Module) -> Iterator[Further]:
        """Sees the activations of a forward pass; gives ``zeta/2 sum_l`` of their mean squares, by sample."""
        seen: list[Tensor] = []

        def values(n: int) -> Tensor:
            ensure(bool(seen), f"{KEY}: {type(net).__name__} calls no activation function; name its layers in layers")
            squares = [a.to(torch.promote_types(a.dtype, torch.float32)).square() for a in seen]
            return self.zeta / 2 * sum(by_sample(square, n) for square in squares)  # type: ignore[return-value]

        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            returned = f"{type(module).__name__} returns a {type(output).__name__}; name modules that return one tensor"
            ensure(isinstance(output, Tensor), f"{KEY}: layers: {returned}")
            seen.append(output.clone())

        with ExitStack() as stack:
            if self.layers is None:
                stack.enter_context(Seen(seen, self.before_pooling))
            for module in self._modules(net):
                stack.enter_context(module.register_forward_hook(see))
            yield values


def by_sample(values: Tensor, n: int) -> Tensor:
    """Returns means by sample, ``(n,)``; the first axis of the values is that of the samples, alone or folded."""
    return values.reshape(n, -1).mean(1) if values.numel() % n == 0 else values.mean().expand(n)


class Seen(TorchFunctionMode):
    """Appends a copy of the result of each activation function to a list.

    Args:
        activations: The list.
        before_pooling: Whether one of what a max-pooling returns is that of what it gets.
    """

    def __init__(self, activations: list[Tensor], before_pooling: bool) -> None:
        super().__init__()
        self.activations, self.before_pooling = activations, before_pooling
        self._pooled: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ACTIVATIONS:
            x = args[0] if args else kwargs["input"]
            entered = next((before for before, after in self._pooled if after is x), None)
            options = {**kwargs, "inplace": False} if "inplace" in kwargs else kwargs
            if entered is not None and func.__name__[-1] == "_":  # the pooling needs what it has got
                entered = entered.clone()
            before = None if entered is None else func(entered, *args[1:], **options)
            result = func(*args, **kwargs)
            self.activations.append(result.clone() if before is None else before)  # the net may change it in place
            return result
        result = func(*args, **kwargs)
        if func in POOLINGS and self.before_pooling and isinstance(result, Tensor):
            self._pooled.append((args[0] if args else kwargs["input"], result))
        return result
