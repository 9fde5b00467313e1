"""A function of tensors recorded once as a list of operations, and replayed."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.state import ClientContext

Tensors = dict[str, Tensor]
Step = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], ClientContext], Tensors]
Replay = Callable[..., tuple[Tensor, ...]]


class RecordedRound:
    """The number of the round while a step is recorded.

    A comparison gives its present outcome, which becomes a guard of the record; arithmetic is recorded, so that a later
    round gets its own value. Anything else is refused by Python.

    Args:
        t: The present round.
        tensor: The same as an input of the record.
    """

    def __init__(self, t: int, tensor: Tensor) -> None:
        self.t, self.tensor = t, tensor
        self.guards: list[tuple[Callable[[Any, Any], bool], Any, bool]] = []

    def hold(self, t: int) -> bool:
        """Whether all comparisons would come out the same in round ``t``."""
        return all(compare(t, other) is outcome for compare, other, outcome in self.guards)

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    __hash__ = None  # type: ignore[assignment]


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[RecordedRound, Any], bool]:
    def guarded(self: RecordedRound, other: Any) -> bool:
        outcome = compare(self.t, other)
        self.guards.append((compare, other, outcome))
        return outcome

    return guarded


def _arithmetic(operation: Callable[[Any, Any], Any], swapped: bool) -> Callable[[RecordedRound, Any], Any]:
    def recorded(self: RecordedRound, other: Any) -> Any:
        return operation(other, self.tensor) if swapped else operation(self.tensor, other)

    return recorded


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(RecordedRound, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(RecordedRound, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(RecordedRound, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))


class Recorder:
    """Keeps records by shapes, settings and round; makes one when none fits.

    Args:
        compile: Compile each record.

    Raises:
        UserError: If a record is to be compiled and there is no working C++ compiler.
    """

    KEPT = 32
    """Most records that are kept; the oldest goes first."""

    def __init__(self, compile: bool = False) -> None:
        self.compile = compile
        self.made = 0
        """Records made so far."""
        self._records: dict[Any, tuple[RecordedRound, Replay]] = {}

    def __call__(
        self, state: Tensors, inputs: Tensors, step: Step, ctx: ClientContext, settings: tuple[Any, ...]
    ) -> Tensors:
        """``step(state, inputs, ctx)``, whose result has the names of ``state``."""
        device = state["w"].device
        round_number = torch.tensor(float(ctx.t), dtype=torch.float64, device=device)
        tensors = (*state.values(), *inputs.values(), round_number)
        names = (*state, *inputs)
        shapes = tuple((tuple(v.shape), v.dtype) for v in tensors)
        key = (names, shapes, settings, ctx.rounds, ctx.m, ctx.exchange)
        record = self._records.get(key)
        if record is None or not record[0].hold(ctx.t):
            self._records.pop(key, None)
            if len(self._records) >= self.KEPT:
                del self._records[next(iter(self._records))]
            self._records[key] = record = self._record(state, inputs, tensors, step, ctx)
        with torch.no_grad():
            return dict(zip(state, record[1](*tensors), strict=True))

    def _record(
        self, state: Tensors, inputs: Tensors, tensors: tuple[Tensor, ...], step: Step, ctx: ClientContext
    ) -> tuple[RecordedRound, Replay]:
        from torch.fx.experimental.proxy_tensor import make_fx

        rounds: list[RecordedRound] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip((*state, *inputs), tensors, strict=False))
            rounds.append(RecordedRound(ctx.t, tensors[-1]))
            columns = {name.removeprefix("ctx."): v for name, v in named.items() if name.startswith("ctx.")}
            here = replace(ctx, t=rounds[-1], **columns)  # type: ignore[arg-type]
            after = step({n: named[n] for n in state}, {n: named[n] for n in inputs}, here)
            return tuple(after[name] for name in state)

        graph = make_fx(flat)(*tensors)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        self.made += 1
        replay: Replay = graph
        if self.compile:
            replay = _compiled(graph, tensors)
        if tensors[0].is_cuda:
            replay = _CudaGraph(replay)
        return rounds[-1], replay


def _compiled(graph: torch.fx.GraphModule, tensors: tuple[Tensor, ...]) -> Replay:
    # where the compiler keeps what it made: a temporary folder would be gone with the next boot
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fl_lightning", "inductor")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    compiled: Replay = torch.compile(graph, dynamic=False, fullgraph=True)
    try:
        with torch.no_grad():
            compiled(*tensors)
    except Exception as error:
        if type(error).__module__.startswith("torch._"):
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(
                f"trainer.compile = true: the compiler failed ({cause:.150}); install a C++ compiler, or set it to "
                "false"
            ) from None
        raise
    return compiled


class _CudaGraph:
    """A function of tensors of fixed shapes as one CUDA graph.

    Args:
        function: The function; it neither synchronises nor looks at values.
    """

    WARM_UP = 3

    def __init__(self, function: Replay) -> None:
        self.function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._graph is None:
            self._capture(tensors)
        for static, value in zip(self._inputs, tensors, strict=True):
            if static.data_ptr() != value.data_ptr():
                static.copy_(value)
        assert self._graph is not None
        self._graph.replay()
        return tuple(v.clone() for v in self._outputs)

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(v.clone() for v in tensors)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose their kernels before the capture
            for _ in range(self.WARM_UP):
                self.function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self.function(*self._inputs)
