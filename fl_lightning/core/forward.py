"""The net's output at a point of the weight space."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fl_lightning.core import buffers
from fl_lightning.core.flat import FlatNet


@torch.no_grad()
def logits(
    net: FlatNet,
    module: nn.Module,
    w: Tensor,
    x: Tensor,
    autocast: Callable[[], AbstractContextManager[object]],
    by_batch: bool = False,
) -> Tensor:
    training = module.training
    net.move_to(w)
    module.eval()
    with autocast(), buffers.by_batch(module) if by_batch else nullcontext():
        out: Tensor = module(x)
    module.train(training)
    return out
