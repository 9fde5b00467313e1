"""Records without the operations that change nothing or repeat others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fl_lightning.engine.record import Recording
from fl_lightning.engine.simplify import simplified


def nothing(x: Tensor) -> Tensor:
    return x.view(2, 3).expand(2, 3).detach().transpose(0, 1).transpose(1, 0) + x


def twice(x: Tensor) -> Tensor:
    return x.exp() + x.exp()


def shapes(x: Tensor) -> Tensor:
    return x.view(3, 2).transpose(0, 1) * 2


def writes(x: Tensor) -> Tensor:
    one, two = x.clone(), x.clone()
    return one.add_(1) * two


def random(x: Tensor) -> Tensor:
    return torch.randn_like(x) - torch.randn_like(x)


def zeros(x: Tensor) -> Tensor:
    """-0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0; Python takes both for equal."""
    return torch.copysign(x + 0.0, x + -0.0)


def dtypes(x: Tensor) -> Tensor:
    """Of integers, 1 makes integers, and 1.0 floats; Python takes them for equal, too."""
    signs = x.signbit().int()
    return (signs * 1 / 2).floor() + signs * 1.0 / 2 + (signs * 1).div(2, rounding_mode="floor")


def strides(x: Tensor) -> Tensor:
    """A view of the same shape may have other strides, by which convolutions and products choose their kernels."""
    return x.as_strided((1, 2), (3, 1)).view(1, 2) * 2


def ones(x: Tensor) -> Tensor:
    """A mean's backward pass multiplies by ones."""
    return x * torch.ones_like(x[0]).view(1, 3).expand(2, 3) * 1 + torch.zeros_like(x) * 0.5


def rows(x: Tensor) -> Tensor:
    """Those of one step, out of the minibatches of all steps."""
    return x[1:2].unbind()[0] + x[0:1].select(0, 0) + x[:, 0:1].select(0, 1)


def views(x: Tensor) -> Tensor:
    return (x + 1).view(6).view(3, 2).unsqueeze(0) * (x + 1).unsqueeze(1).transpose(0, 2).unsqueeze(0).sum()


def recorded(function: Callable[[Tensor], list[Tensor]], x: Tensor) -> GraphModule:
    with (recording := Recording({"x": x})):
        outputs = function(x)
    return recording.recorded(outputs)


def operations(graph: GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


DETACH = operations(recorded(lambda x: [x.detach()], torch.zeros(2)))
"""Operations of one: torch 2.9 has two."""


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (nothing, 5 + DETACH, 1),
        (twice, 3, 2),
        (shapes, 3, 3),
        (writes, 4, 4),
        (random, 3, 3),
        (zeros, 3, 3),
        (dtypes, 11, 9),
        (strides, 3, 3),
        (ones, 9, 2),
        (rows, 9, 6),
        (views, 10, 7),
    ],
)
def test_fewer_operations_and_the_same_bits(function: Callable[[Tensor], Tensor], before: int, after: int) -> None:
    x = torch.tensor([[0.1, -0.0, torch.inf], [1e-40, torch.nan, 3.0]])
    graph = recorded(lambda x: [function(x)], x)
    assert operations(graph) == before
    shorter = simplified(graph)
    assert operations(shorter) == after
    if function is not random:
        for v in (x, torch.randn(2, 3), torch.randn(3, 2).T):
            if function in (shapes, views):
                v = v.contiguous()
            assert torch.equal(shorter(v)[0].view(torch.int32), function(v).view(torch.int32))
