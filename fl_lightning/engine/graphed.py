"""The batched engine with its local step recorded once and replayed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from fl_lightning.core import ClientContext, Draws, State, accumulator_dtype, ensure, to_device
from fl_lightning.data.minibatches import Block
from fl_lightning.engine.base import COLUMNS, Carry, Fixed
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.record import (
    NOTHING,
    CudaGraph,
    Program,
    Record,
    RecordedRound,
    Records,
    Replay,
    Tensors,
    alike,
    compiled,
    described,
    loop,
    plain_settings,
    trace,
)
from fl_lightning.engine.simplify import simplified

REFUSED = (
    "trainer.engine = graphed: a hook draws random numbers in a local step, which the record would repeat; draw them "
    "in local_start or local_end, or use batched or sequential"
)


class GraphedEngine(BatchedEngine):
    """The batched engine with its local step recorded once and replayed, without Python, autograd or vmap."""

    name = "graphed"

    UNROLLED = 8
    """Maximum number of local steps that are compiled into one graph."""

    _compared = False

    @cached_property
    def records(self) -> Records:
        """The records that were made so far."""
        return Records()

    def steps(self, carry: Carry, block: Block, fixed: Fixed, settings: Tensors = NOTHING) -> Carry:
        n, objective = len(block.y), self.objective
        parts = objective, objective.ascent, objective.optimizer, objective.loss, *objective.parts
        plain = plain_settings(parts, settings.values())
        unroll = n if self.compile and n <= self.UNROLLED else 1
        inputs: Tensors = {
            **_prefixed("received", fixed.received),
            **_prefixed("ctx", {name: getattr(fixed.ctx, name) for name in COLUMNS}),
            **_prefixed("settings", settings),
            **_prefixed("teacher", _numbered(fixed.teachers)),
            **_prefixed("constant", _numbered(fixed.constants)),
            "t": to_device(float(fixed.ctx.t), carry.w.device, accumulator_dtype(carry.w.device)),
        }
        if fixed.start is not fixed.received.w:
            inputs["start"] = fixed.start
        if fixed.ctx.class_counts is not None:
            inputs["ctx.class_counts"] = fixed.ctx.class_counts
        carried = _tensors(replace(carry, w=carry.w.contiguous(), loss=torch.zeros_like(carry.loss)))
        steps = {name: torch.unflatten(v, 0, (-1, unroll)) for name, v in block.tensors().items()}
        first = {name: v[0] for name, v in steps.items()}
        named = {**carried, **inputs, **first}
        record = self.records.find(named, fixed.ctx, plain, self._record)
        self._compare(record, named, fixed.ctx)
        with torch.no_grad():
            values = record.replay(*(tuple(tensors.values()) for tensors in (carried, inputs, steps)))
        end = _carry(dict(zip(carried, values, strict=True)))
        return replace(end, loss=carry.loss + end.loss)

    def _trace(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, GraphModule]:
        one = {name: value[:1] for name, value in named.items() if name.startswith("block.")}
        return trace(self._recorded, named | one, ctx)

    def _compare(self, record: Record, named: Tensors, ctx: ClientContext) -> None:
        """Compares a record with a new one: the first that is used in another round, and each in the last round.

        Raises:
            UserError: If they differ.
        """
        if ctx.t == record.compared or (self._compared and ctx.t + 1 < ctx.rounds):
            return
        self._compared, record.compared = True, ctx.t
        ensure(
            alike(record.graph, described(self._trace(named, ctx)[1])),
            f"trainer.engine = graphed: a hook of {type(self.objective).__name__}, its net or its loss reads something "
            f"that has changed since its step was recorded in round {record.round.t}; keep it as a number or a tensor "
            "on the objective itself, or use batched or sequential",
        )

    def _record(self, named: Tensors, ctx: ClientContext) -> Record:
        """Records one step; compiled it is as many steps as ``named`` has minibatches."""
        recorded, graph = self._trace(named, ctx)
        text = described(graph)
        replay: Replay = simplified(graph).forward
        if self.compile:
            steps = sum(name.startswith("block.") for name in named)
            program, held = Program.of(graph, [*named.values()], steps)
            replay = partial(compiled(program), *held)
        replay = CudaGraph(replay) if named["w"].is_cuda else partial(loop, replay)
        return Record(recorded, text, replay, ctx.t)

    def _recorded(self, named: Tensors, ctx: ClientContext) -> list[Tensor]:
        """Takes a few steps with named tensors; returns those that a step changes, in the same order."""
        received, settings = State(_below("received", named)), _below("settings", named)
        teachers, constants = (tuple(_below(name, named).values()) for name in ("teacher", "constant"))
        start, block = named.get("start", received.w), Block.of(named)
        ctx = replace(ctx, draws=Draws([], start.device, True, REFUSED))
        with self.using(settings):
            take = self.objective.optimizer.begin(self.objective.flat, start)
            fixed = Fixed(received, start, teachers, constants, ctx, take)
            return list(_tensors(super().steps(_carry(named), block, fixed, settings)).values())


def _prefixed(prefix: str, values: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _numbered(tensors: Sequence[Tensor]) -> Tensors:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _below(prefix: str, named: Tensors) -> Tensors:
    return {name.removeprefix(f"{prefix}."): v for name, v in named.items() if name.startswith(f"{prefix}.")}


def _tensors(carry: Carry) -> Tensors:
    """Returns the tensors of a carry by name."""
    return {"w": carry.w, "loss": carry.loss, **_prefixed("state", carry.state)}


def _carry(named: Tensors) -> Carry:
    """Returns the carry of which `_tensors` returns the tensors; other names are ignored."""
    return Carry(named["w"], State(_below("state", named)), named["loss"])
