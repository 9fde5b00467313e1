"""The batched engine with its local step recorded once and replayed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fl_lightning.core import ClientContext, Draws, State, accumulator_dtype, to_device
from fl_lightning.data.minibatches import Block
from fl_lightning.engine.base import COLUMNS, Carry, Fixed
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.record import (
    Compiled,
    CudaGraph,
    RecordedRound,
    Records,
    Replay,
    Tensors,
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

    @cached_property
    def records(self) -> Records:
        """The records that were made so far."""
        return Records()

    def _steps(self, carry: Carry, block: Block, fixed: Fixed, settings: Tensors) -> Carry:
        carried, inputs = named_tensors(carry, fixed)
        inputs |= prefixed("settings", settings)
        inputs["t"] = to_device(float(fixed.ctx.t), carry.w.device, accumulator_dtype(carry.w.device))
        steps, first = self.unrolled(block)
        _, (_, replay) = self.find({**carried, **inputs, **first}, fixed.ctx)
        with torch.no_grad():
            values = replay(*(tuple(tensors.values()) for tensors in (carried, inputs, steps)))
        end = carry_of(dict(zip(carried, values, strict=True)))
        return replace(end, loss=carry.loss + end.loss)

    def unrolled(self, block: Block) -> tuple[Tensors, Tensors]:
        """Returns the tensors of a block by replay, ``(replays, steps, ...)``, and those of the first replay."""
        n = len(block.y)
        unroll = n if self.compile and n <= self.UNROLLED else 1
        steps = {name: torch.unflatten(v, 0, (-1, unroll)) for name, v in block.tensors().items()}
        return steps, {name: v[0] for name, v in steps.items()}

    def find(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, tuple[Replay, Replay]]:
        """Returns the record of a replay's steps, as a function for `loop`, and as the loop itself."""
        objective = self.objective
        plain = plain_settings(objective, objective.ascent, objective.optimizer, objective.loss)
        return self.records.find(named, ctx, plain, self._record)

    def _record(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, tuple[Replay, Replay]]:
        recorded, graph = trace(self._recorded, named, ctx)
        replay = Compiled(graph) if self.compile else simplified(graph).forward
        return recorded, (replay, CudaGraph(replay) if named["w"].is_cuda else partial(loop, replay))

    def _recorded(self, named: Tensors, ctx: ClientContext) -> list[Tensor]:
        """Takes a few steps with named tensors; returns those that a step changes, in the same order."""
        received, settings = State(below("received", named)), below("settings", named)
        teachers, constants = (tuple(below(name, named).values()) for name in ("teacher", "constant"))
        start, block = named.get("start", received.w), Block.of(named)
        ctx = replace(ctx, draws=Draws([], start.device, True, REFUSED))
        with self.using(settings):
            take = self.objective.optimizer.begin(self.objective.flat, start)
            fixed = Fixed(received, start, teachers, constants, ctx, take)
            return list(_tensors(super()._steps(carry_of(named), block, fixed, settings)).values())


def prefixed(prefix: str, values: Mapping[str, Tensor]) -> Tensors:
    """Returns tensors under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def below(prefix: str, named: Tensors) -> Tensors:
    """Returns the tensors whose names have a prefix, under the names without it."""
    return {name.removeprefix(f"{prefix}."): v for name, v in named.items() if name.startswith(f"{prefix}.")}


def named_tensors(carry: Carry, fixed: Fixed) -> tuple[Tensors, Tensors]:
    """Returns by name the tensors that steps change, as before the first one, and those that stay the same."""
    ctx = {name: getattr(fixed.ctx, name) for name in COLUMNS}
    if fixed.ctx.class_counts is not None:
        ctx["class_counts"] = fixed.ctx.class_counts
    several = {"teacher": fixed.teachers, "constant": fixed.constants}
    inputs: Tensors = {**prefixed("received", fixed.received), **prefixed("ctx", ctx)}
    inputs |= {f"{name}.{i}": v for name, values in several.items() for i, v in enumerate(values)}
    if fixed.start is not fixed.received.w:
        inputs["start"] = fixed.start
    return _tensors(replace(carry, w=carry.w.contiguous(), loss=torch.zeros_like(carry.loss))), inputs


def carry_of(named: Tensors) -> Carry:
    """Returns the carry of named tensors; other names are ignored."""
    return Carry(named["w"], State(below("state", named)), named["loss"])


def _tensors(carry: Carry) -> Tensors:
    return {"w": carry.w, "loss": carry.loss, **prefixed("state", carry.state)}
