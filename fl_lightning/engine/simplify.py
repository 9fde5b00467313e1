"""Recorded operations without those that change nothing or repeat others: each costs microseconds in every step."""

import re
from operator import getitem

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
"""Operations that return their input if shape and strides stay the same."""
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim}
"""Operations that change the shape and nothing else."""
FILLED = {
    aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.zeros.default: 0,
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.ones.default: 1,
}  # fmt: skip
"""Operations whose result has one value everywhere."""
SMALL = 1 << 14
"""Maximum number of values of a tensor that a record keeps."""


def simplified(graph: GraphModule, constants: bool = True) -> GraphModule:
    """Returns a record with the same results, to the bit, and fewer operations; nothing is run.

    It changes the record given. One that writes into tensors loses only what is not used.

    Args:
        graph: The record.
        constants: Whether it keeps small tensors that are always the same, not for a compiler, which sees more in the
            operations that make them.
    """
    graph.graph.eliminate_dead_code()
    nodes = graph.graph.nodes
    writes = any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in nodes)
    seen: dict[tuple[object, str], Node] = {}
    for node in () if writes else nodes:
        _shorten(node)
        same = _constant(graph, node) if constants else None
        same = _unchanged(graph, node) if same is None else same
        if same is None and _repeatable(node):  # as text, arguments differ that Python takes for equal: 0.0 and -0.0
            same = seen.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _shorten(node: Node) -> None:
    """Lets a node skip the ones before it where a row of a slice, or a view of a view, is one of the whole."""
    of = node.args[0] if node.args else None
    if not isinstance(of, Node) or of.op != "call_function":
        return
    if node.target is getitem and of.target is aten.unbind.int and of.args[1:] in ((), (0,)):
        row, of = node.args[1], of.args[0]
    elif node.target is aten.select.int and node.args[1] == 0:
        row = node.args[2]
    else:
        row = None
    if row == 0 and isinstance(of, Node) and of.target is aten.slice.Tensor and of.args[1] == 0:
        node.target, node.args = aten.select.int, (of.args[0], 0, of.args[2])
    base = of.args[0] if isinstance(of, Node) and of.args else None
    if node.target in RESHAPES and of.target in RESHAPES and isinstance(base, Node):
        value, whole = node.meta.get("val"), base.meta.get("val")
        if isinstance(value, Tensor) and isinstance(whole, Tensor) and _is_view(whole, value):
            node.target, node.args = aten.view.default, (base, [*value.shape])


def _is_view(whole: Tensor, value: Tensor) -> bool:
    """Returns whether a tensor is what `view` returns of another one."""
    try:
        return whole.view(value.shape).stride() == value.stride()
    except RuntimeError:  # its memory has gaps
        return False


def _constant(graph: GraphModule, node: Node) -> Node | None:
    """Returns a node with the value of one that is always the same, if it is small."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() > SMALL or node.op != "call_function":
        return None
    if node.target in FILLED:
        fill = FILLED[node.target]
    elif node.target in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default):
        fill = node.args[-1] if node.target is not aten.scalar_tensor.default else node.args[0]
    elif node.target in (*VIEWS, *RESHAPES) and _filled(graph, node.args[0]) is not None:
        fill = _filled(graph, node.args[0])
    else:
        return None
    if isinstance(fill, Node):
        return None
    layout = "_".join(map(str, (*value.shape, "by", *value.stride())))
    name = re.sub(r"\W", "_", f"constant_{fill}_{value.dtype}_{value.device}_{layout}")
    if not hasattr(graph, name):
        size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        memory = torch.full((max(size, 1),), fill, dtype=value.dtype, device=value.device)
        graph.register_buffer(name, memory.as_strided(value.shape, value.stride()))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
    constant.meta["val"] = getattr(graph, name)
    return constant


def _filled(graph: GraphModule, of: object) -> float | None:
    """Returns the value that a constant has everywhere; None: it is no such constant."""
    if isinstance(of, Node) and of.op == "get_attr" and str(of.target).startswith("constant_"):
        values = getattr(graph, str(of.target))
        return float(values.flatten()[0]) if values.numel() else None
    return None


def _repeatable(node: Node) -> bool:
    """Returns whether a node gives the same again for the same arguments; of operations of others nothing is known."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags


def _unchanged(graph: GraphModule, node: Node) -> Node | None:
    """Returns the node whose result this one returns as it is, if there is one."""
    of, *arguments = node.args or (None,)
    if node.target in (aten.mul.Scalar, aten.mul.Tensor):
        for factor, other in ((of, arguments[0]), (arguments[0], of)):
            if factor == 1 or _filled(graph, factor) == 1:
                return other if isinstance(other, Node) and _form(other) == _form(node) is not None else None
    if not isinstance(of, Node):
        return None
    if node.target in VIEWS and _layout(node) == _layout(of) is not None:
        return of
    if node.target is of.target is aten.transpose.int and {*of.args[1:]} == {*arguments}:
        return of.args[0]  # type: ignore[return-value]
    return None


def _form(node: Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else None


def _layout(node: Node) -> tuple[torch.Size, tuple[int, ...]] | None:
    value = node.meta.get("val")
    return (value.shape, value.stride()) if isinstance(value, Tensor) else None
