"""Records without the operations that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.engine.simplify import simplified


def nothing(x: Tensor) -> Tensor:
    return x.view(2, 3).expand(2, 3).detach().transpose(0, 1).transpose(0, 1) * 1 + x


def twice(x: Tensor) -> Tensor:
    return x.exp() + x.exp()


def constant(x: Tensor) -> Tensor:
    return x + torch.ones_like(x.exp())


def shapes(x: Tensor) -> Tensor:
    return x.view(3, 2).transpose(0, 1).reshape(2, 3) * 2


def writes(x: Tensor) -> Tensor:
    one, two = x.clone(), x.clone()
    return one.add_(1) * two


def random(x: Tensor) -> Tensor:
    return torch.rand_like(x) - torch.rand_like(x)


def operations(graph: GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [(nothing, 7, 1), (twice, 3, 2), (constant, 3, 1), (shapes, 4, 3), (writes, 4, 4), (random, 3, 3)],
)
def test_fewer_operations_and_the_same_bits(function: Callable[[Tensor], Tensor], before: int, after: int) -> None:
    x = torch.tensor([[0.1, -0.0, torch.inf], [1e-40, torch.nan, 3.0]])
    graph = make_fx(lambda x: (function(x),))(x)
    shorter = simplified(graph, [x])
    assert (operations(graph), operations(shorter)) == (before, after)
    if function is not random:
        for v in (x, torch.randn(2, 3)):
            assert torch.equal(shorter(v)[0].view(torch.int32), function(v).view(torch.int32))
