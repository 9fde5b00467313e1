"""The features of a net: what its classifier sees."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import ensure


@contextmanager
def with_features(net: nn.Module) -> Iterator[None]:
    """Makes a net return ``(output, features)``, with the features ``(n, f)`` of the same forward pass.

    The features are the input of the last-defined `nn.Linear`, without the adapters of LoRA.

    Raises:
        UserError: If the net has no linear layer, or, in the forward pass, if it does not call the last-defined one.
    """
    linear = [module for name, module in net.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name]
    ensure(
        bool(linear),
        f"model.net = {type(net).__name__} has no linear layer, whose input would be the features; choose a net "
        "that ends in one",
    )
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(1))

    def both(module: nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        ensure(
            bool(seen),
            f"model.net = {type(net).__name__}: does not call the linear layer that it defines last, so it has no "
            "features; define its classifier last",
        )
        features = seen[-1]
        seen.clear()
        return output, features

    hooks = linear[-1].register_forward_pre_hook(see), net.register_forward_hook(both)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
