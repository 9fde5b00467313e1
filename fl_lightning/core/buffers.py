"""Contexts for nets that keep running statistics, such as those of BatchNorm."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fl_lightning.core.errors import UserError


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Restores the net's buffers on exit."""
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    try:
        yield
    finally:
        for name, value in kept.items():
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
def by_batch(net: nn.Module) -> Iterator[None]:
    """Normalizes by the statistics of each batch; running statistics do not change. The caller restores the modes."""
    with unchanged(net):
        for module in net.modules():
            if getattr(module, "track_running_stats", False):
                module.training = True
        yield
