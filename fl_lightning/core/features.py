"""The features of a net: what its classifier sees."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import UserError


@contextmanager
def with_features(net: nn.Module) -> Iterator[None]:
    """Makes a net return ``(output, features)``, with the features ``(n, f)`` of the same forward pass.

    Features are the input of the net's last linear layer, in the order in which its modules were defined; adapters of
    LoRA do not count.

    Raises:
        UserError: If the net has no linear layer.
    """
    linear = [module for name, module in net.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name]
    if not linear:
        raise UserError(
            f"model.net = {type(net).__name__} has no linear layer, whose input would be the features; choose a net "
            "that ends in one"
        )
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(1))

    def both(module: nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        return output, seen.pop()

    hooks = linear[-1].register_forward_pre_hook(see), net.register_forward_hook(both)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
