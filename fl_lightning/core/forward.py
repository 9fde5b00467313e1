"""Forward passes of a net at given weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fl_lightning.core import buffers
from fl_lightning.core.flat import FlatNet
from fl_lightning.core.modes import eval_mode

Autocast = Callable[[], AbstractContextManager[object]]
"""Context for forward passes: ``fabric.autocast``."""


@torch.no_grad()
def logits(net: FlatNet, module: nn.Module, w: Tensor, x: Tensor, autocast: Autocast, by_batch: bool = False) -> Tensor:
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
    with eval_mode(module), autocast(), buffers.by_batch(module) if by_batch else nullcontext():
        out: Tensor = module(x)
    return out
