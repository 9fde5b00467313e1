"""Train and eval mode of modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode, and each of its submodules back into its own mode on exit."""
    with _modes_kept(module):
        module.eval()
        yield


@contextmanager
def train_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module in eval mode into train mode, and each of its submodules back into its own mode on exit.

    In a module in train mode, submodules in eval mode stay there.
    """
    with _modes_kept(module):
        if not module.training:
            module.train()
        yield


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
