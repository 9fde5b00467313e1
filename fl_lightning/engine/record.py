"""Functions of tensors, recorded once as a list of operations."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, getitem
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fl_lightning.core import ClientContext, ensure
from fl_lightning.core.flat import UNRECORDED

Tensors = Mapping[str, Tensor]
Values = tuple[Tensor, ...]
NOTHING: Tensors = MappingProxyType({})
aten = torch.ops.aten
DEPENDS = "Python code depends on values of tensors, as if, float() and item() do"
REFUSED = (
    "trainer.engine = graphed: a hook draws random numbers in a local step, which the record would repeat; draw them "
    "in local_start or local_end, or use batched or sequential"
)


class Numbers:
    """What a record takes from the round: numbers computed from it, which are inputs, and outcomes of comparisons.

    Args:
        t: The round that is recorded.
        inputs: The record's input with these numbers, ``(MOST,)``.
    """

    MOST = 32

    def __init__(self, t: int, inputs: Tensor) -> None:
        self.t, self.inputs = t, inputs
        self.values = list[Callable[[int], float]]()
        self.guards = list[Callable[[int], bool]]()

    def input(self, value: Callable[[int], float], others: Iterable[object]) -> Tensor:
        """Returns the input that has this function of the round as its value.

        Args:
            value: The function.
            others: What it meets in an operation; as Python's numbers, it takes the dtype of a scalar tensor.

        Raises:
            UserError: If there are more such inputs than `MOST`.
        """
        ensure(
            len(self.values) < self.MOST,
            f"trainer.engine = graphed: hooks compute with ctx.t more than {self.MOST} times in one local step; "
            "compute what depends on it once, or use batched or sequential",
        )
        self.values.append(value)
        dtypes = {x.dtype for x in others if isinstance(x, Tensor) and x.is_floating_point() and not x.ndim}
        number = self.inputs[len(self.values) - 1]
        return number.to(dtypes.pop()) if len(dtypes) == 1 else number

    def hold(self, t: int) -> bool:
        """Returns whether all comparisons have the same outcome in round ``t``."""
        return all(guard(t) for guard in self.guards)

    def at(self, t: int) -> list[float]:
        """Returns the inputs of round ``t``, ``(MOST,)``."""
        return [float(value(t)) for value in self.values] + [0.0] * (self.MOST - len(self.values))


class RecordedRound:
    """The number of the round, or one computed from it, while a function is recorded.

    A comparison returns its outcome in this round, which must hold wherever the record is used; its text is that of
    this number, which must be the same. Where the number meets a tensor, it is an input of the record: Python computes
    it anew in each round. Python refuses anything else.

    Args:
        record: The numbers of the record.
        value: The number as a function of the round; by default the round.
    """

    def __init__(self, record: Numbers, value: Callable[[int], Any] = int) -> None:
        self.record, self.value = record, value

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    def __repr__(self) -> str:
        """Returns the text of the number; `str` and f-strings do, too."""
        value = self.value(self.record.t)
        self.record.guards.append(lambda t: self.value(t) == value)
        return repr(value)

    def __neg__(self) -> "RecordedRound":
        return RecordedRound(self.record, lambda t: -self.value(t))

    def __index__(self) -> int:
        raise TypeError("Python code takes ctx.t as a number (RecordedRound), as range() and float() do")

    __int__ = __float__ = __index__
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensor(x: Any) -> Any:
            return x.record.input(x.value, args) if isinstance(x, RecordedRound) else x

        return function(*map(tensor, args), **{name: tensor(x) for name, x in (kwargs or {}).items()})


def _value(x: Any) -> Callable[[int], Any]:
    return x.value if isinstance(x, RecordedRound) else lambda t: x


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[RecordedRound, Any], bool]:
    def guarded(self: RecordedRound, other: Any) -> bool:
        left, right = self.value, _value(other)
        outcome = compare(left(self.record.t), right(self.record.t))
        self.record.guards.append(lambda t: compare(left(t), right(t)) is outcome)
        return outcome

    return guarded


def _arithmetic(operation: Callable[[Any, Any], Any], swapped: bool) -> Callable[[RecordedRound, Any], Any]:
    def recorded(self: RecordedRound, other: Any) -> Any:
        if isinstance(other, Tensor):
            number = self.record.input(self.value, [other])
            if operation is operator.truediv and not swapped:  # as torch divides a number by a tensor
                return other.reciprocal() * number
            return operation(other, number) if swapped else operation(number, other)
        left, right = (_value(other), self.value) if swapped else (self.value, _value(other))
        return RecordedRound(self.record, lambda t: operation(left(t), right(t)))

    return recorded


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(RecordedRound, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(RecordedRound, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(RecordedRound, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations that torch does for some inputs, below autograd and vmap.

    It is what `torch.fx.experimental.proxy_tensor.make_fx` records of real tensors, in a quarter of the time.

    Args:
        inputs: The inputs by name; each is one tensor, or several names of one.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = Graph(), nn.Module()
        self._nodes, self._held = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        for name, value in inputs.items():
            self._nodes[value] = node = self.graph.placeholder(re.sub(r"\W", "_", name))
            node.meta = {**form(value), "name": name, "constant": False}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if UNRECORDED.get():
            return func(*args, **(kwargs or {}))
        fresh, arguments = func is aten.lift_fresh.default, (args, kwargs or {})
        ensure(not any(isinstance(x, torch.Generator) for x in tree_leaves(arguments)), REFUSED)
        func = aten.lift_fresh_copy.default if fresh else func  # else what is written into it stays in the record
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        known = [self._nodes[x].meta["constant"] for x in tensors if x in self._nodes]
        if not all(known) and torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(DEPENDS)
        if torch.Tag.dynamic_output_shape in func.tags:  # Python sees the shape
            masks = [x for x in tensors[1:] if x.dtype == torch.bool]
            self.look_at(masks if func is aten.index.Tensor else tensors)
        out = func(*arguments[0], **arguments[1])
        node = self.graph.call_function(func, *tree_map_only(Tensor, self._node_of, arguments))
        # torch.tensor(number), and what is computed with it
        constant = fresh or (any(known) and all(known) and torch.Tag.nondeterministic_seeded not in func.tags)
        several = isinstance(out, tuple | list)
        for i, value in enumerate(out if several else [out]):
            if isinstance(value, Tensor):
                self._nodes[value] = value_node = self.graph.call_function(getitem, (node, i)) if several else node
                value_node.meta = {**form(value), "constant": constant and value.numel() == 1}
        return out

    def look_at(self, values: Iterable[Tensor]) -> None:
        """Notes that Python code depends on values of tensors, which must not depend on the inputs.

        Raises:
            RuntimeError: If they do.
        """
        nodes, seen = [self._nodes[x] for x in values if x in self._nodes], set[Node]()
        while nodes:
            if (node := nodes.pop()).op == "placeholder":
                raise RuntimeError(DEPENDS)
            nodes += [argument for argument in node.all_input_nodes if argument not in seen]
            seen |= {*node.all_input_nodes}

    def _node_of(self, value: Tensor) -> Node:
        """Returns the node of a tensor; one that is no input and no result is part of the record."""
        nodes = self._nodes if value in self._nodes else self._held
        if value not in nodes:
            name = f"tensor_{len(self._held)}"
            self.root.register_buffer(name, value)
            nodes[value] = node = self.graph.get_attr(name)
            node.meta = form(value)
        return nodes[value]  # type: ignore[no-any-return]

    def recorded(self, outputs: Iterable[Tensor]) -> GraphModule:
        """Returns the record, with these tensors as its outputs; what they do not depend on may be of a cache."""
        self.graph.output(tuple(map(self._node_of, outputs)))
        self.graph.eliminate_dead_code()
        return GraphModule(self.root, self.graph)


class Looks(TorchFunctionMode):
    """Tells a recording which values Python looks at past it, as arrays of NumPy and as lists."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist) and not UNRECORDED.get():
            self.recording.look_at(args[:1])
        return func(*args, **(kwargs or {}))


def form(value: Tensor) -> dict[str, Any]:
    """Returns what a record says of a tensor: its device, and a tensor without memory like it."""
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return {"val": like, "device": value.device}


class Stage(NamedTuple):
    """A part of a program: a record, whose inputs and outputs have names.

    Attributes:
        numbers: What it takes from the round, its input ``t``.
        graph: The record.
        text: Its text as it was recorded, and the objects that it names.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
    """

    numbers: Numbers
    graph: GraphModule
    text: tuple[str, list[Any]]
    inputs: Sequence[str]
    outputs: Sequence[str]


def stage(function: Callable[[Tensors, ClientContext], Tensors], tensors: Tensors, ctx: ClientContext) -> Stage:
    """Records a function of named tensors to named tensors; ``ctx.<attribute>`` are inputs as well.

    Args:
        function: A function of the tensors, and of the context that contains them.
        tensors: The tensors; ``t`` are the numbers that `Numbers` has as inputs.
        ctx: The context.
    """
    numbers, cached = Numbers(ctx.t, tensors["t"]), torch.is_autocast_cache_enabled()
    columns = {name.removeprefix("ctx."): v for name, v in tensors.items() if name.startswith("ctx.")}
    context = replace(ctx, t=RecordedRound(numbers), **columns)  # type: ignore[arg-type]
    recording = Recording(tensors)
    torch.set_autocast_cache_enabled(False)  # what it has cast before is no input
    try:
        with recording, Looks(recording):
            outputs = function(tensors, context)
    finally:
        torch.set_autocast_cache_enabled(cached)
    graph = recording.recorded(outputs.values())
    held = [attrgetter(node.target)(graph) for node in graph.graph.find_nodes(op="get_attr")]
    return Stage(numbers, graph, (graph.code, held), [*tensors], [*outputs])


def composed(stages: Sequence[tuple[str, Stage]], inputs: Sequence[str], outputs: Sequence[str]) -> GraphModule:
    """Returns stages one after another as one record: each takes the values that inputs and earlier stages name.

    Args:
        stages: The stages, each with the name of its input ``t``. One that is there several times has the rows of the
            inputs ``block.*`` in turn.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
    """
    program, root, used = Graph(), nn.Module(), dict[int, int]()
    values = {name: program.placeholder(re.sub(r"\W", "_", name)) for name in inputs}
    for name, value in values.items():
        value.meta["name"] = name
    for t, stage in stages:
        nodes, row = stage.graph.graph.nodes, used.get(id(stage), 0)
        used[id(stage)] = row + 1
        known = dict[Node, Node]()
        for name, node in zip(stage.inputs, [n for n in nodes if n.op == "placeholder"], strict=True):
            value = values[t if name == "t" else name]
            if name.startswith("block."):
                value = program.call_function(aten.slice.Tensor, (value, 0, row, row + 1))
            for key in ("val", "device"):
                value.meta.setdefault(key, node.meta[key])
            known[node] = value
        for node in nodes:
            if node.op == "get_attr":
                name = f"of_{[*used].index(id(stage))}_{node.target}".replace(".", "_")
                setattr(root, name, attrgetter(node.target)(stage.graph))
                known[node] = program.get_attr(name)
                known[node].meta = {**node.meta}
        returned: Any = program.graph_copy(stage.graph.graph, known)
        values |= dict(zip(stage.outputs, returned, strict=True))
    program.output(tuple(values[name] for name in outputs))
    return GraphModule(root, program)


def alike(one: Stage, other: Stage) -> bool:
    """Returns whether two stages were recorded with the same operations and objects."""
    (code, held), (other_code, others) = one.text, other.text
    return code == other_code and all(
        a is b or not isinstance(a, Tensor) or torch.equal(a, b) for a, b in zip(held, others, strict=True)
    )
