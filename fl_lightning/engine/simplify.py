"""Recorded operations without those that change nothing or repeat others: each costs microseconds in every step."""

import re
from collections.abc import Mapping
from copy import deepcopy
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS: set[Any] = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default, aten.detach.default,
    aten.slice.Tensor,
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
SUBSETS: set[Any] = {*VIEWS, *RESHAPES, aten.select.int, aten.unbind.int, getitem}
"""Operations that return some of their input's values."""
LINEAR: set[Any] = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}
"""Operations whose values do not depend on the strides of their arguments."""
FUNCTIONS = {
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "abs", "add", "addcmul", "bmm", "cat", "clamp", "cos",
    "div", "exp", "gather", "log", "mm", "mul", "neg", "reciprocal", "relu", "rsqrt", "scatter", "select", "sigmoid",
    "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sum", "tanh", "transpose", "unbind", "unsqueeze", "where",
}  # fmt: skip
"""Operations that are functions of torch with the same arguments."""
METHODS = {"expand", "view"}
"""Operations that are methods of a tensor with the same arguments."""
SMALL = 1 << 14
"""Maximum number of values of a tensor that a record keeps."""
Known = Mapping[str, tuple[float, float]]
"""The least and the largest value of inputs, by name."""
NOTHING: Known = MappingProxyType({})


def simplified(graph: GraphModule, constants: bool = True, known: Known = NOTHING) -> GraphModule:
    """Returns a record with the same results, to the bit, and fewer operations; nothing is run.

    It changes the record given. One that writes into tensors loses only what is not used.

    Args:
        graph: The record.
        constants: Whether it keeps small tensors that are always the same, and leaves out factors of 1; not for a
            compiler, which sees more in operations, and shares code between settings.
        known: What is known of the values of its inputs; so masks go that mask nothing.
    """
    graph.graph.eliminate_dead_code()
    nodes = graph.graph.nodes
    writes = any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in nodes)
    seen: dict[tuple[object, str], Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["range"] = known.get(node.meta.get("name", ""))
    for node in () if writes else nodes:
        _shorten(node)
        twin = _constant(graph, node) or _product(graph, node) if constants else None
        twin = _chosen(graph, node) if twin is None else twin
        twin = _unchanged(node) if twin is None else twin
        if twin is None and _repeatable(node):  # as text, arguments differ that Python takes for equal: 0.0 and -0.0
            twin = seen.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
        if twin is not None and twin is not node:
            node.replace_all_uses_with(twin)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def called_directly(graph: GraphModule) -> GraphModule:
    """Returns a copy that calls the functions of torch, which Python reaches in half the time of its operations."""
    copy = deepcopy(graph.graph)
    for node in copy.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = node.target._schema.name.removeprefix("aten::")
            if name in FUNCTIONS and hasattr(torch, name):
                node.target = getattr(torch, name)
            elif name in METHODS:
                node.op, node.target = "call_method", name
    return GraphModule(graph, copy)


def _shorten(node: Node) -> None:
    """Lets a node skip the one before it, where a row of a slice, or a view of a view, is one of the whole."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return
    if node.target is getitem and source.target is aten.unbind.int and source.args[1:] in ((), (0,)):
        rows, row = source.args[0], node.args[1]
    elif node.target is aten.select.int and node.args[1] == 0:
        rows, row = source, node.args[2]
    else:
        rows = row = None
    if row == 0 and isinstance(rows, Node) and rows.target is aten.slice.Tensor and rows.args[1] == 0:
        node.target, node.args = aten.select.int, (rows.args[0], 0, rows.args[2])
    elif {node.target, source.target} <= RESHAPES:
        origin: Any = source.args[0]
        value, base = node.meta.get("val"), origin.meta.get("val")
        if isinstance(value, Tensor) and isinstance(base, Tensor) and _is_view(base, value):
            node.target, node.args = aten.view.default, (origin, [*value.shape])


def _is_view(base: Tensor, value: Tensor) -> bool:
    """Returns whether a tensor is what `view` returns of another one."""
    try:
        return base.view(value.shape).stride() == value.stride()
    except RuntimeError:  # its memory has gaps
        return False


def _constant(graph: GraphModule, node: Node) -> Node | None:
    """Returns a node with the value of one that is always the same everywhere, if it is small."""
    value, fill = node.meta.get("val"), _fill(graph, node)
    if fill is None or not isinstance(value, Tensor) or value.numel() > SMALL:
        return None
    device, layout = node.meta["device"], (*value.shape, "by", *value.stride())
    name = re.sub(r"\W", "_", "_".join(map(str, ("constant", fill, value.dtype, device, *layout))))
    if not hasattr(graph, name):
        size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        memory = torch.full((max(size, 1),), fill, dtype=value.dtype, device=device)
        graph.register_buffer(name, memory.as_strided(value.shape, value.stride()))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
    constant.meta |= {"val": value, "device": device}
    return constant


def _fill(graph: GraphModule, node: Node) -> Any:
    """Returns the value that an operation gives everywhere, always; None: it is not known."""
    if node.op != "call_function":
        return None
    if node.target in FILLED:
        return FILLED[node.target]
    if node.target is aten.ne.Scalar and (values := _range(node.args[0])):
        return True if not values[0] <= node.args[1] <= values[1] else None  # type: ignore[operator]
    if (values := _range(node)) and values[0] == values[1]:
        return values[0]
    if node.target is aten.scalar_tensor.default:
        return node.args[0]
    if node.target in (aten.full.default, aten.full_like.default):
        return None if isinstance(node.args[1], Node) else node.args[1]
    return _filled(graph, node.args[0]) if node.target in VIEWS | RESHAPES | {aten.select.int} else None


def _range(node: Any) -> tuple[float, float] | None:
    """Returns the least and the largest value, if they are known, of some values of an input."""
    while node.op == "call_function" and node.target in SUBSETS:
        node = node.args[0]
    return node.meta.get("range") if node.op == "placeholder" else None


def _chosen(graph: GraphModule, node: Node) -> Node | None:
    """Returns what a mask chooses that is the same everywhere."""
    if node.target is not aten.where.self:
        return None
    mask: Any = node.args[0]
    fill = _filled(graph, mask) if mask.op == "get_attr" else _fill(graph, mask)
    chosen = None if fill is None else node.args[1 if fill else 2]
    return chosen if isinstance(chosen, Node) and _form(chosen) == _form(node) != () else None


def _filled(graph: GraphModule, node: object) -> Any:
    """Returns the value that a constant of the record has everywhere; None: it is no such constant."""
    if isinstance(node, Node) and node.op == "get_attr" and str(node.target).startswith("constant_"):
        values = getattr(graph, str(node.target))
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
    left, right = node.args
    for factor, other in ((left, right), (right, left)):
        if (factor == 1 or _filled(graph, factor) == 1) and isinstance(other, Node):
            form, node_form = _form(other), _form(node)
            same_form = form == node_form != ()
            return other if same_form or (form[:2] == node_form[:2] and _serves(_empty(other), node)) else None
    return None


def _serves(value: Tensor, node: Node) -> bool:
    """Returns whether what uses a node has the same results with a value of the same numbers and other strides."""
    for user in node.users:
        arguments = [value if x is node else _empty(x) for x in user.args]
        if user.target not in RESHAPES | LINEAR:
            return False
        try:
            result = user.target(*arguments)  # type: ignore[operator]
        except RuntimeError:  # a view of memory that has gaps
            return False
        if user.target in LINEAR and (result.dtype, result.shape, result.stride()) != _form(user):
            return False
        if user.target in RESHAPES and not _serves(result, user):
            return False
    return True


def _empty(x: Any) -> Any:
    """Returns a tensor without values for a node, anything else as it is."""
    value = x.meta["val"] if isinstance(x, Node) else None
    return x if value is None else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _unchanged(node: Node) -> Node | None:
    """Returns the node whose result this one returns as it is, if there is one."""
    source, *arguments = node.args or (None,)
    if not isinstance(source, Node):
        return None
    if node.target in VIEWS and _form(node) == _form(source) != ():
        return source
    if node.target is source.target is aten.transpose.int and {*source.args[1:]} == {*arguments}:
        return source.args[0]  # type: ignore[return-value]
    return None


def _form(node: Node) -> tuple[object, ...]:
    """Returns dtype, shape and strides of a node's value; nothing if it is no tensor."""
    value = node.meta.get("val")
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else ()
