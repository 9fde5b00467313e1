"""Functions of tensors, recorded once as a list of operations and replayed."""

import operator
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from numbers import Number
from operator import attrgetter, getitem
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fl_lightning.core import ClientContext, UserError, processor

Tensors = Mapping[str, Tensor]
Values = tuple[Tensor, ...]
Replay = Callable[..., Values]
NOTHING: Tensors = MappingProxyType({})
aten = torch.ops.aten
TAKE_TENSORS = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor}
"""Operations whose second argument may be a number or a tensor, with the same result in float32 and float64."""


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
        """
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

    A comparison returns its outcome in this round, which must hold wherever the record is used. Where the number meets
    a tensor, it is an input of the record: Python computes it anew in each round. Python refuses anything else.

    Args:
        of: The numbers of the record.
        value: The number as a function of the round; by default the round.
    """

    def __init__(self, of: Numbers, value: Callable[[int], Any] = int) -> None:
        self.of, self.value = of, value

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    def __neg__(self) -> "RecordedRound":
        return RecordedRound(self.of, lambda t: -self.value(t))

    def __index__(self) -> int:
        raise TypeError("Python code takes ctx.t as a number (RecordedRound), as range() and float() do")

    __int__ = __float__ = __index__
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensor(x: Any) -> Any:
            return x.of.input(x.value, args) if isinstance(x, RecordedRound) else x

        return function(*map(tensor, args), **{name: tensor(x) for name, x in (kwargs or {}).items()})


def _value(x: Any) -> Callable[[int], Any]:
    return x.value if isinstance(x, RecordedRound) else lambda t: x


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[RecordedRound, Any], bool]:
    def guarded(self: RecordedRound, other: Any) -> bool:
        one, two = self.value, _value(other)
        outcome = compare(one(self.of.t), two(self.of.t))
        self.of.guards.append(lambda t: compare(one(t), two(t)) is outcome)
        return outcome

    return guarded


def _arithmetic(operation: Callable[[Any, Any], Any], swapped: bool) -> Callable[[RecordedRound, Any], Any]:
    def recorded(self: RecordedRound, other: Any) -> Any:
        if isinstance(other, Tensor):
            number = self.of.input(self.value, [other])
            if operation is operator.truediv and not swapped:  # as torch divides a number by a tensor
                return other.reciprocal() * number
            return operation(other, number) if swapped else operation(number, other)
        one, two = (_value(other), self.value) if swapped else (self.value, _value(other))
        return RecordedRound(self.of, lambda t: operation(one(t), two(t)))

    return recorded


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(RecordedRound, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(RecordedRound, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(RecordedRound, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))


@dataclass
class Record:
    """A local step that was recorded.

    Attributes:
        stage: The step.
        replay: Replays it.
        compared: The round in which it was last recorded, for use or to compare.
    """

    stage: "Stage"
    replay: Replay
    compared: int


Make = Callable[[Tensors, ClientContext], Record]


class Records:
    """A cache of records by the shapes of their tensors, settings and round."""

    KEPT = 32
    """Maximum number of records; the oldest is dropped first."""

    def __init__(self) -> None:
        self._records: dict[Any, Record] = {}

    def find(self, named: Tensors, ctx: ClientContext, settings: tuple[Any, ...], make: Make) -> Record:
        """Returns the result of ``make(named, ctx)`` for these tensors, settings and round, cached if possible."""
        key = (*((n, v.shape, v.dtype) for n, v in named.items()), settings, ctx.rounds, ctx.m, ctx.phase)
        found = self._records.get(key)
        if found is None or not found.stage.numbers.hold(ctx.t):
            self._records.pop(key, None)
            if len(self._records) >= self.KEPT:
                del self._records[next(iter(self._records))]
            self._records[key] = found = make(named, ctx)
        return found


def plain_settings(parts: Iterable[object], inputs: Iterable[Tensor]) -> tuple[Any, ...]:
    """Returns the plain attributes of objects on which a record depends, without those that are its inputs."""
    given, plain = {id(value) for value in inputs}, (Number, str, tuple, NoneType, Tensor)  # which equals itself only
    values = [value for part in parts if part is not None for value in vars(part).values()]
    return tuple(value for value in values if isinstance(value, plain) and id(value) not in given)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations that torch does for some inputs, below autograd and vmap.

    It is what `torch.fx.experimental.proxy_tensor.make_fx` records of real tensors, in a tenth of the time.

    Args:
        inputs: The inputs by name; each is one tensor, or several names of one.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = Graph(), nn.Module()
        self._nodes, self._held = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._constant = WeakTensorKeyDictionary()
        for name, value in inputs.items():
            self._put(value, self.graph.placeholder(re.sub(r"\W", "_", name)), constant=False)
            self._nodes[value].meta["name"] = name

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh, given = func is aten.lift_fresh.default, (args, kwargs or {})
        func = aten.lift_fresh_copy.default if fresh else func  # else what is written into it stays in the record
        known = [self._constant[x] for x in tree_leaves(given) if isinstance(x, Tensor) and x in self._constant]
        if not all(known) and torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"Python code depends on values of tensors, as if, float() and item() do ({func})")
        out = func(*given[0], **given[1])
        node = self.graph.call_function(func, *tree_map_only(Tensor, self._node_of, given))
        # torch.tensor(number), and what is computed with it
        constant = fresh or (known and all(known) and torch.Tag.nondeterministic_seeded not in func.tags)
        several = isinstance(out, tuple | list)
        for i, value in enumerate(out if several else [out]):
            if isinstance(value, Tensor):
                of = self.graph.call_function(getitem, (node, i)) if several else node
                self._put(value, of, bool(constant and value.numel() == 1))
        return out

    def _put(self, value: Tensor, node: Node, constant: bool) -> None:
        self._nodes[value], self._constant[value], node.meta = node, constant, form(value)

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
        """Returns the record, with these tensors as its outputs."""
        self.graph.output(tuple(map(self._node_of, outputs)))
        return GraphModule(self.root, self.graph)


FORM = ("val", "device")
"""What `form` says of a tensor."""


def form(value: Tensor) -> dict[str, Any]:
    """Returns what a record says of a tensor: its device, and a tensor without memory like it."""
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return dict(zip(FORM, (like, value.device), strict=True))


def trace(
    function: Callable[[Tensors, ClientContext], Iterable[Tensor]], named: Tensors, ctx: ClientContext
) -> tuple[Numbers, GraphModule]:
    """Returns the operations of a function of named tensors; ``ctx.<attribute>`` are inputs as well.

    Args:
        function: A function of the tensors, and of the context that contains them, to tensors.
        named: The tensors; ``t`` are the numbers that `Numbers` has as inputs.
        ctx: The context.
    """
    numbers, cached = Numbers(ctx.t, named["t"]), torch.is_autocast_cache_enabled()
    columns = {name.removeprefix("ctx."): v for name, v in named.items() if name.startswith("ctx.")}
    now = replace(ctx, t=RecordedRound(numbers), **columns)  # type: ignore[arg-type]
    recording = Recording(named)
    torch.set_autocast_cache_enabled(False)  # what it has cast before is no input
    try:
        with recording:
            outputs = [*function(named, now)]
    finally:
        torch.set_autocast_cache_enabled(cached)
    return numbers, recording.recorded(outputs)


class Stage(NamedTuple):
    """A part of a program: a record, whose inputs and outputs have names.

    Attributes:
        numbers: What it takes from the round, its input ``t``.
        graph: The record.
        text: What `described` returns of it as it was recorded.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
    """

    numbers: Numbers
    graph: GraphModule
    text: tuple[str, list[Any]]
    inputs: Sequence[str]
    outputs: Sequence[str]


def stage(function: Callable[[Tensors, ClientContext], Tensors], named: Tensors, ctx: ClientContext) -> Stage:
    """Records a function of named tensors to named tensors; see `trace`."""
    outputs: list[str] = []

    def values(inputs: Tensors, ctx: ClientContext) -> list[Tensor]:
        found = function(inputs, ctx)
        outputs[:] = found
        return [*found.values()]

    numbers, graph = trace(values, named, ctx)
    return Stage(numbers, graph, described(graph), [*named], outputs)


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
    for t, each in stages:
        nodes, row = each.graph.graph.nodes, used.get(id(each), 0)
        used[id(each)] = row + 1
        known = dict[Node, Node]()
        for name, node in zip(each.inputs, [n for n in nodes if n.op == "placeholder"], strict=True):
            value = values[t if name == "t" else name]
            if name.startswith("block."):
                value = program.call_function(aten.slice.Tensor, (value, 0, row, row + 1))
            value.meta = {**{key: node.meta[key] for key in FORM}, **value.meta}
            known[node] = value
        for node in nodes:
            if node.op == "get_attr":
                name = f"of_{[*used].index(id(each))}_{node.target}".replace(".", "_")
                setattr(root, name, attrgetter(node.target)(each.graph))
                known[node] = program.get_attr(name)
                known[node].meta = {**node.meta}
        found: Any = program.graph_copy(each.graph.graph, known)
        values |= dict(zip(each.outputs, found, strict=True))
    program.output(tuple(values[name] for name in outputs))
    return GraphModule(root, program)


def described(graph: GraphModule) -> tuple[str, list[Any]]:
    """Returns the text of a graph, and the objects that it names."""
    return graph.code, [attrgetter(node.target)(graph) for node in graph.graph.nodes if node.op == "get_attr"]


def alike(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> bool:
    """Returns whether two graphs are the same, given what `described` returns of them."""
    return one[0] == other[0] and all(
        a is b or not isinstance(a, Tensor) or torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
    )


class Compiled:
    """A program as machine code, compiled at the first call.

    Args:
        program: The program.

    Raises:
        UserError: At the first call, if there is no working C++ compiler.
    """

    def __init__(self, program: GraphModule) -> None:
        # the compiler's cache: its default, which torch has set by now, is a temporary folder, lost at the next boot;
        # code in it is for one processor, and another one that shares the folder would compute wrong numbers with it
        user = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
        cache = Path(user, "fl_lightning", "inductor", re.sub(r"\W+", "_", processor()))
        default = str(Path(tempfile.gettempdir(), "torchinductor_"))
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default).startswith(default):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        self._function: Replay = torch.compile(program, dynamic=False, fullgraph=True)

    def __call__(self, *tensors: Tensor) -> Values:
        try:
            return self._function(*tensors)
        except Exception as error:
            if type(error).__module__.startswith("torch._"):
                cause = str(error.__cause__ or error).strip().splitlines()[0]
                raise UserError(
                    f"trainer.compile = true: the compiler failed ({cause:.150}); install a C++ compiler, delete its "
                    f"cache {os.environ['TORCHINDUCTOR_CACHE_DIR']} if a process was killed while it wrote, or set it "
                    "to false"
                ) from None
            raise


@dataclass(frozen=True)
class Program:
    """Some steps as one graph; those with the same key are the same.

    Of torch's own settings the key has the number of threads; the compiler sees to the others, as the default dtype.

    Attributes:
        key: The text of the graph, the operations and other objects named in it, and the layouts of its inputs.
        graph: The graph. Its inputs are the tensors that the record of a step holds, the numbers that it multiplies
            by, adds, subtracts or divides by, so that programs share code whose settings differ, and those of the
            record.
    """

    key: tuple[Any, ...]
    graph: GraphModule = field(compare=False)

    @classmethod
    def of(cls, graph: GraphModule, tensors: Sequence[Tensor]) -> tuple["Program", Values]:
        """Returns the program of a record, which is changed, and the tensors that it holds.

        Args:
            graph: The record.
            tensors: Its inputs.
        """
        _hold_numbers(graph)
        first = next(iter(graph.graph.nodes))
        held, others = dict[str, Tensor](), list[Any]()
        inputs = dict[str, Node]()
        for node in [*graph.graph.find_nodes(op="get_attr")]:
            value = attrgetter(node.target)(graph)
            if not isinstance(value, Tensor):
                others.append(value)
                continue
            if node.target not in held:
                held[node.target] = value
                with graph.graph.inserting_before(first):
                    inputs[node.target] = graph.graph.placeholder(f"held_{len(held)}")
            node.replace_all_uses_with(inputs[node.target])
            graph.graph.erase_node(node)
        graph.recompile()
        layouts = [(v.dtype, v.device, v.shape, v.stride()) for v in (*held.values(), *tensors)]
        functions = dict.fromkeys(node.target for node in graph.graph.nodes if node.op == "call_function")
        return cls((graph.code, *functions, *others, *layouts, torch.get_num_threads()), graph), (*held.values(),)


def _hold_numbers(step: GraphModule) -> None:
    """Makes numbers that a record computes with 0-d tensors of the result's dtype, to which torch rounds them, too."""
    for i, node in enumerate(step.graph.nodes):
        if node.target in TAKE_TENSORS and type(node.args[1]) is float:
            given, value = node.args[0].meta["val"], node.meta["val"]
            if given.dtype == value.dtype in (torch.float32, torch.float64):
                step.register_buffer(
                    f"number_{i}", torch.tensor(node.args[1], dtype=value.dtype, device=node.meta["device"])
                )
                with step.graph.inserting_before(node):
                    node.update_arg(1, step.graph.get_attr(f"number_{i}"))


@lru_cache(maxsize=32)
def compiled(program: Program) -> Compiled:
    """Returns the machine code of a program, the same for equal programs of a process."""
    return Compiled(program.graph)


def loop(function: Replay, carried: Values, fixed: Values, steps: Values) -> Values:
    """Takes all steps.

    Args:
        function: One step: it maps the tensors that steps change, those that stay the same, and those of this step to
            the new values of the first, like the body of ``jax.lax.scan``.
        carried: Tensors that steps change.
        fixed: Tensors that stay the same.
        steps: Those of each step, ``(steps, ...)``.

    Returns:
        The tensors that steps change, after the last step.
    """
    for now in zip(*steps, strict=True):
        carried = function(*carried, *fixed, *now)
    return carried


class Captured(NamedTuple):
    """A CUDA graph, and the memory that it reads and writes; the graph itself knows no more than the addresses.

    Attributes:
        graph: The graph of a step.
        at: The number of the step, ``(1,)``.
        carried: The tensors that a step changes.
        fixed: Those that stay the same.
        steps: Those of each step.
        now: Those of the present step.
    """

    graph: torch.cuda.CUDAGraph
    at: Tensor
    carried: Values
    fixed: Values
    steps: Values
    now: Values


class CudaGraph:
    """`loop` on a GPU: one step is one CUDA graph, and one launch.

    The graph updates the tensors that steps change in place. Buffers hold the tensors of all steps; the graph reads
    those of its step at a counter that it increments. So nothing is copied between two steps. If a call has more steps
    than the buffers hold, a new graph is captured.

    Args:
        function: As for `loop`; it neither synchronises nor looks at values.
    """

    WARM_UP = 3

    def __init__(self, function: Replay) -> None:
        self.function = function
        self._captured: Captured | None = None

    def __call__(self, carried: Values, fixed: Values, steps: Values) -> Values:
        """See `loop`."""
        n = len(steps[0])
        if self._captured is None or len(self._captured.steps[0]) < n:
            self._captured = None  # its memory is free for the next
            self._captured = self._capture(carried, fixed, steps)
        captured = self._captured
        for static, value in zip((*captured.carried, *captured.fixed), (*carried, *fixed), strict=True):
            static.copy_(value)
        for buffer, value in zip(captured.steps, steps, strict=True):
            buffer[:n].copy_(value)
        captured.at.zero_()
        for _ in range(n):
            captured.graph.replay()
        return tuple(v.clone() for v in captured.carried)  # the next steps overwrite the graph's memory

    def _capture(self, carried: Values, fixed: Values, steps: Values) -> Captured:
        graph, at = torch.cuda.CUDAGraph(), torch.zeros(1, dtype=torch.int64, device=steps[0].device)
        carried, fixed, steps = (tuple(v.clone() for v in values) for values in (carried, fixed, steps))
        now = tuple(v[:1].clone() for v in steps)  # in the memory format of each

        def step() -> Values:
            for buffer, one in zip(steps, now, strict=True):
                torch.index_select(buffer, 0, at, out=one)
            return self.function(*carried, *fixed, *(one[0] for one in now))

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose their kernels before the capture
            for _ in range(self.WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=graph_pool(at.device)[0], capture_error_mode="thread_local"):
            values = step()
            memory = {v.untyped_storage().data_ptr() for v in carried}
            apart = [v.clone() if v.untyped_storage().data_ptr() in memory else v for v in values]
            for static, value in zip(carried, apart, strict=True):
                static.copy_(value)
            at += 1
        return Captured(graph, at, carried, fixed, steps, now)


@cache
def graph_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Returns the memory that all graphs of a device share: they run one after another, and keep nothing in it.

    A first, empty graph keeps the pool when others are dropped. A capture in mode ``thread_local`` permits other
    threads to pin memory, as the one does that reads rows ahead.
    """
    pool, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with warnings.catch_warnings(action="ignore"), torch.cuda.graph(empty, pool, capture_error_mode="thread_local"):
        pass  # torch warns that it is empty
    return pool, empty
