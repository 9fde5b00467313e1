"""Replays of what was recorded: cached, as machine code, or as a CUDA graph."""

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from numbers import Number
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fl_lightning.core import UserError, processor
from fl_lightning.engine.record import Stage, Values, aten

Replay = Callable[..., Values]
TAKE_TENSORS = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor}
"""Operations whose second argument may be a number or a tensor, with the same result in float32 and float64."""


@dataclass
class Record:
    """A local step that was recorded.

    Attributes:
        stage: The step.
        replay: Replays it.
        compared: The round in which it was last recorded, for use or to compare.
    """

    stage: Stage
    replay: Replay
    compared: int


def plain_settings(parts: Iterable[object], inputs: Iterable[Tensor]) -> tuple[Any, ...]:
    """Returns the plain attributes of objects on which a record depends, without those that are its inputs."""
    input_ids = {id(value) for value in inputs}
    values = [value for part in parts if part is not None for value in vars(part).values()]
    return tuple(value for value in values if _is_plain(value) and id(value) not in input_ids)


def _is_plain(value: object) -> bool:
    """Returns whether a value is a number, text, None, a tensor, which equals itself only, or a tuple without lists."""
    try:
        return isinstance(value, (Number, str, tuple, NoneType, Tensor)) and bool({value})
    except TypeError:  # of what a tuple holds
        return False


class Compiled:
    """A program as machine code, compiled at the first call with tensors of these strides.

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
        self._program = program
        self._functions: dict[Any, Replay] = {}

    def __call__(self, *tensors: Tensor) -> Values:
        strides = (*map(Tensor.stride, tensors),)
        try:
            if strides not in self._functions:
                from torch._inductor import compile  # without torch.compile's guards, as long as a small step

                self._functions[strides] = compile(self._program, [*tensors])
            return self._functions[strides](*tensors)
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

    Attributes:
        key: The text of the graph, the operations and other objects named in it, the layouts of its inputs, and torch's
            own settings on which its code depends.
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
        settings = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
        key = graph.code, *functions, *others, *layouts, *settings, torch.are_deterministic_algorithms_enabled()
        return cls(key, graph), (*held.values(),)


def _hold_numbers(step: GraphModule) -> None:
    """Makes numbers that a record computes with 0-d tensors of the result's dtype, to which torch rounds them, too."""
    for i, node in enumerate(step.graph.nodes):
        if node.target in TAKE_TENSORS and type(node.args[1]) is float:
            operand, value = node.args[0].meta["val"], node.meta["val"]
            if operand.dtype == value.dtype in (torch.float32, torch.float64):
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
    for step in zip(*steps, strict=True):
        carried = function(*carried, *fixed, *step)
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
        graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, dtype=torch.int64, device=steps[0].device)
        carried, fixed, steps = (tuple(v.clone() for v in values) for values in (carried, fixed, steps))
        current = tuple(v[:1].clone() for v in steps)  # in the memory format of each

        def step() -> Values:
            for buffer, row in zip(steps, current, strict=True):
                torch.index_select(buffer, 0, counter, out=row)
            return self.function(*carried, *fixed, *(row[0] for row in current))

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose their kernels before the capture
            for _ in range(self.WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=graph_pool(counter.device)[0], capture_error_mode="thread_local"):
            values = step()
            memory = {v.untyped_storage().data_ptr() for v in carried}
            outputs = [v.clone() if v.untyped_storage().data_ptr() in memory else v for v in values]
            for static, value in zip(carried, outputs, strict=True):
                static.copy_(value)
            counter += 1
        return Captured(graph, counter, carried, fixed, steps, current)


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
