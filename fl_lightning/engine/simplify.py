"""Recorded operations without those that change nothing: each costs some microseconds of every local step."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

aten = torch.ops.aten
SAME_VALUES = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
"""Operations that return their input if the layout stays the same."""
MADE = {aten.scalar_tensor.default, aten.zeros_like.default, aten.ones_like.default}
"""Operations whose result depends on the shapes alone."""
LARGEST = 1 << 16
"""Maximum number of values of a result that is kept."""


class _Seen(Interpreter):
    """Runs a record once, and keeps the layouts of all results, and those that are constants."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.layouts: dict[Node, tuple[Any, ...]] = {}
        self.constants: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.layouts[n] = value.shape, value.dtype, value.stride()
            of_constants = bool(n.all_input_nodes) and all(each in self.constants for each in n.all_input_nodes)
            random = getattr(n.target, "overloadpacket", None) in get_CSE_banned_ops()
            if value.numel() <= LARGEST and not random and (n.target in MADE or of_constants):
                self.constants[n] = value
        return value


def simplified(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """Returns a record with the same results, to the bit, and fewer operations.

    A record that writes into tensors stays as it is, and so does one whose results on ``inputs`` would differ.

    Args:
        graph: The record.
        inputs: Its inputs.
    """
    if any(n.target._schema.is_mutable for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)):
        return graph
    shorter = CSEPass(get_CSE_banned_ops()).call(deepcopy(graph)).graph_module
    seen = _Seen(shorter)
    seen.run(*inputs)
    for n in shorter.graph.nodes:
        if n.op == "call_function" and (of := _same(n, seen.layouts)) is not None:
            n.replace_all_uses_with(of)
    for i, (n, value) in enumerate(seen.constants.items()):
        if all(user in seen.constants for user in n.users):
            continue
        shorter.register_buffer(f"constant_{i}", value.clone())
        with shorter.graph.inserting_before(n):
            n.replace_all_uses_with(shorter.graph.get_attr(f"constant_{i}"))
    shorter.graph.eliminate_dead_code()
    shorter.recompile()
    try:
        results = zip(graph(*inputs), shorter(*inputs), strict=True)
    except RuntimeError:  # a view of another layout
        return graph
    return shorter if all(_equal(old, new) for old, new in results) else graph


def _same(n: Node, layouts: dict[Node, tuple[Any, ...]]) -> Node | None:
    """Returns the node whose result this one repeats, if there is one."""
    of, *arguments = n.args
    if not isinstance(of, Node) or n not in layouts or of not in layouts:
        return None
    if n.target in SAME_VALUES and layouts[n] == layouts[of]:
        return of
    if n.target in (aten.mul.Scalar, aten.mul.Tensor) and arguments == [1] and layouts[n][:2] == layouts[of][:2]:
        return of
    if n.target is aten.transpose.int and of.target is n.target and {*of.args[1:]} == {*arguments}:
        return of.args[0]  # type: ignore[return-value]
    return None


def _equal(old: Tensor, new: Tensor) -> bool:
    if old.is_floating_point():
        old, new = old.nan_to_num(nan=0.5), new.nan_to_num(nan=0.5)
    return old.stride() == new.stride() and old.dtype == new.dtype and torch.equal(old, new)
