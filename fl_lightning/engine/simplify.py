"""Recorded operations without those that change nothing or repeat others: each costs microseconds in every step."""

import re
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS: set[Any] = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
"""Operations that return their input if shape and strides stay the same."""
RESHAPES: set[Any] = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.squeeze.dim,
}
"""Operations that change the shape and nothing else."""
FILLED: dict[Any, int] = {
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
        constants: Whether it keeps small tensors that are always the same, and leaves out factors of 1; not for a
            compiler, which sees more in operations, and shares code between settings.
    """
    graph.graph.eliminate_dead_code()
    nodes = graph.graph.nodes
    writes = any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in nodes)
    seen: dict[tuple[object, str], Node] = {}
    for node in () if writes else nodes:
        _shorten(node)
        same = _constant(graph, node) or _product(graph, node) if constants else None
        same = _unchanged(node) if same is None else same
        if same is None and _repeatable(node):  # as text, arguments differ that Python takes for equal: 0.0 and -0.0
            same = seen.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _shorten(node: Node) -> None:
    """Lets a node skip the one before it, where a row of a slice, or a view of a view, is one of the whole."""
    of: Any = node.args[0] if node.args else None
    if not isinstance(of, Node):
        return
    if node.target is getitem and of.target is aten.unbind.int and of.args[1:] in ((), (0,)):
        rows, row = of.args[0], node.args[1]
    elif node.target is aten.select.int and node.args[1] == 0:
        rows, row = of, node.args[2]
    else:
        rows = row = None
    if row == 0 and isinstance(rows, Node) and rows.target is aten.slice.Tensor and rows.args[1] == 0:
        node.target, node.args = aten.select.int, (rows.args[0], 0, rows.args[2])
    elif {node.target, of.target} <= RESHAPES:
        whole: Any = of.args[0]
        value, base = node.meta.get("val"), whole.meta.get("val")
        if isinstance(value, Tensor) and isinstance(base, Tensor) and _is_view(base, value):
            node.target, node.args = aten.view.default, (whole, [*value.shape])


def _is_view(whole: Tensor, value: Tensor) -> bool:
    """Returns whether a tensor is what `view` returns of another one."""
    try:
        return whole.view(value.shape).stride() == value.stride()
    except RuntimeError:  # its memory has gaps
        return False


def _constant(graph: GraphModule, node: Node) -> Node | None:
    """Returns a node with the value of one that is always the same everywhere, if it is small."""
    value, fill = node.meta.get("val"), _fill(graph, node)
    if fill is None or not isinstance(value, Tensor) or value.numel() > SMALL:
        return None
    layout = *value.shape, "by", *value.stride()
    name = re.sub(r"\W", "_", "_".join(map(str, ("constant", fill, value.dtype, value.device, *layout))))
    if not hasattr(graph, name):
        size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        memory = torch.full((max(size, 1),), fill, dtype=value.dtype, device=value.device)
        graph.register_buffer(name, memory.as_strided(value.shape, value.stride()))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
    constant.meta["val"] = getattr(graph, name)
    return constant


def _fill(graph: GraphModule, node: Node) -> Any:
    """Returns the value that an operation gives everywhere, always; None: it is not known."""
    if node.op != "call_function":
        return None
    if node.target in FILLED:
        return FILLED[node.target]
    if node.target is aten.scalar_tensor.default:
        return node.args[0]
    if node.target in (aten.full.default, aten.full_like.default):
        return None if isinstance(node.args[1], Node) else node.args[1]
    return _filled(graph, node.args[0]) if node.target in VIEWS | RESHAPES else None


def _filled(graph: GraphModule, of: object) -> Any:
    """Returns the value that a constant of the record has everywhere; None: it is no such constant."""
    if isinstance(of, Node) and of.op == "get_attr" and str(of.target).startswith("constant_"):
        values = getattr(graph, str(of.target))
        return values.flatten()[0].item() if values.numel() else None
    return None


def _repeatable(node: Node) -> bool:
    """Returns whether a node gives the same again for the same arguments; of operations of others nothing is known."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags


def _product(graph: GraphModule, node: Node) -> Node | None:
    """Returns the other factor of a product with ones."""
    if node.target not in (aten.mul.Scalar, aten.mul.Tensor):
        return None
    one, two = node.args
    for factor, other in ((one, two), (two, one)):
        if (factor == 1 or _filled(graph, factor) == 1) and isinstance(other, Node):
            return other if _form(other) == _form(node) is not None else None
    return None


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


def _form(node: Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else None


def _layout(node: Node) -> tuple[torch.Size, tuple[int, ...]] | None:
    value = node.meta.get("val")
    return (value.shape, value.stride()) if isinstance(value, Tensor) else None
