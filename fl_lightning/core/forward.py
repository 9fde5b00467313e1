"""Forward passes of a net at given weights, and contexts for its modes and buffers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import FlatNet

T = TypeVar("T")

Autocast = Callable[[], AbstractContextManager[object]]
"""Context for forward passes: ``fabric.autocast``."""


def places(net: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of a net's parameters, each with its first name: a module may stand at several places."""
    first = {id(p): name for name, p in net.named_parameters()}
    by_module = (m.named_parameters(prefix, recurse=False, remove_duplicate=False) for prefix, m in net.named_modules())
    return [(name, first[id(p)]) for named in by_module for name, p in named]


def call_at(net: nn.Module, weights: Mapping[str, Tensor], x: Any, names: list[tuple[str, str]]) -> Any:
    """Returns a net's output with other values for some parameters, by their first names; the net keeps its own.

    The ``names`` are those of `places`: torch would leave the values in a module that the net has at several of them,
    since it exchanges them once for each.
    """
    values = {name: weights[first] for name, first in names if first in weights}
    return functional_call(net, values, (x,), tie_weights=False)


class _Within(nn.Module):
    """A net, called with what is to be done while it has other weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, do: Callable[[], Any]) -> Any:
        return do()


def while_at(net: nn.Module, weights: Mapping[str, Tensor], names: list[tuple[str, str]], do: Callable[[], T]) -> T:
    """Returns what a function returns that is called while a net has other values for some parameters, as in `call_at`.

    A backward pass needs them, too, if it computes parts of the forward pass again, as checkpoints of activations do.
    """
    values = {f"net.{name}": weights[first] for name, first in names if first in weights}
    result: T = functional_call(_Within(net), values, (do,), tie_weights=False)
    return result


def mend_group_norms(net: nn.Module) -> None:
    """Gives a net's GroupNorms contiguous inputs where torch would crash.

    Before torch 2.15 the backward pass on the CPU has a segmentation fault if the input is channels_last and needs no
    gradient, as behind frozen layers.
    """
    for module in net.modules() if torch.__version__ < "2.15" else ():
        if isinstance(module, nn.GroupNorm) and _contiguous not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_contiguous)


def _contiguous(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    def crashes(x: Tensor) -> bool:
        return torch.is_grad_enabled() and not x.requires_grad and x.device.type == "cpu"

    return tuple(x.contiguous() if crashes(x) else x for x in inputs)


class WithoutCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes float64 wherever an operation asks for a dtype of floats, so that a net's own casts do not round."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        wide = {"dtype": torch.float64} if dtype is not None and dtype.is_floating_point else {}
        return func(*args, **((kwargs or {}) | wide))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode, and each of its submodules back into its own mode on exit."""
    with modes_kept(module):
        module.eval()
        yield


def plain_recurrence(model: nn.Module) -> AbstractContextManager[None]:
    """Lets recurrent layers compute without cuDNN, which has no second derivative, none in eval mode, and no vmap."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Puts a module and each of its submodules back into their own modes on exit."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Restores the net's buffers on exit."""
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    try:
        yield
    finally:
        for name, value in buffers.items():
            net.get_buffer(name).copy_(value)


@contextmanager
def variance_needed(message: str) -> Iterator[None]:
    """Replaces BatchNorm's error about a channel with a single value by a message for users.

    Raises:
        UserError: With this message.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(message) from None


@contextmanager
def batch_statistics(net: nn.Module) -> Iterator[None]:
    """Normalizes by the statistics of each batch; running statistics do not change. The caller restores the modes."""
    with unchanged(net):
        net.train()  # what a net keeps in eval mode, such as its frozen modules, stays there
        for module in net.modules():
            module.training = module.training and getattr(module, "track_running_stats", False)
        yield


@torch.no_grad()
def forward_at(
    net: FlatNet, module: nn.Module, w: Tensor, x: Tensor, autocast: Autocast, by_batch: bool = False
) -> Tensor:
    """Returns the output of a net at weights ``w`` in eval mode; the weights stay there.

    Args:
        net: The flat view of the net.
        module: The net.
        w: Weights, ``(d,)``.
        x: Samples.
        autocast: Context for the forward pass.
        by_batch: Normalize by the statistics of the batch where the net keeps running ones.
    """
    net.move_to(w)
    with eval_mode(module), autocast(), batch_statistics(module) if by_batch else nullcontext():
        out: Tensor = module(x)
    return out
