"""Recorded operations without those that change nothing or repeat others: each costs microseconds in every step."""

from operator import getitem

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
"""Operations that return their input if shape and strides stay the same."""


def simplified(graph: GraphModule) -> GraphModule:
    """Returns a record with the same results, to the bit, and fewer operations; nothing is run, and no value is kept.

    It changes the record given. One that writes into tensors loses only what is not used.
    """
    graph.graph.eliminate_dead_code()
    nodes = graph.graph.nodes
    writes = any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in nodes)
    seen: dict[tuple[object, str], Node] = {}
    for node in () if writes else nodes:
        same = _unchanged(node)
        if same is None and _repeatable(node):  # as text, arguments differ that Python takes for equal: 0.0 and -0.0
            same = seen.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _repeatable(node: Node) -> bool:
    """Returns whether a node gives the same again for the same arguments; of operations of others nothing is known."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags


def _unchanged(node: Node) -> Node | None:
    """Returns the node whose result this one returns as it is, if there is one."""
    of, *arguments = node.args or (None,)
    if not isinstance(of, Node):
        return None
    if node.target in VIEWS and _layout(node) == _layout(of) is not None:
        return of
    if node.target is of.target is aten.transpose.int and {*of.args[1:]} == {*arguments}:
        return of.args[0]  # type: ignore[return-value]
    return None


def _layout(node: Node) -> tuple[torch.Size, tuple[int, ...]] | None:
    value = node.meta.get("val")
    return (value.shape, value.stride()) if isinstance(value, Tensor) else None
