"""Recorded operations without those that change nothing or repeat others: each costs microseconds in every step."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
"""Operations that return their input if the shape stays the same."""


def simplified(graph: GraphModule) -> GraphModule:
    """Returns a record with the same results, to the bit, and fewer operations; nothing is run, and no value is kept.

    The record given may change, too. One that writes into tensors stays as it is.
    """
    targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if any(target._schema.is_mutable for target in targets):
        return graph
    shorter: GraphModule = CSEPass(get_CSE_banned_ops()).call(graph).graph_module
    for node in shorter.graph.nodes:
        if (same := _same(node)) is not None:
            node.replace_all_uses_with(same)
    shorter.graph.eliminate_dead_code()
    shorter.recompile()
    return shorter


def _same(node: Node) -> Node | None:
    """Returns the node whose result this one repeats, if there is one."""
    of, *arguments = node.args or (None,)
    if not isinstance(of, Node):
        return None
    if node.target in VIEWS and _shape(node) == _shape(of) is not None:
        return of
    if node.target is of.target is aten.transpose.int and {*of.args[1:]} == {*arguments}:
        return of.args[0]  # type: ignore[return-value]
    return None


def _shape(node: Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None
