"""The batched engine with its local step recorded once and replayed."""

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from fl_lightning.core import ClientContext, Draws, State, accumulator_dtype, below, ensure, prefixed, to_device
from fl_lightning.data.minibatches import Block
from fl_lightning.engine.base import Carry, Fixed
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.record import NOTHING, REFUSED, Numbers, Stage, Tensors, alike, composed, stage
from fl_lightning.engine.replay import CudaGraph, Program, Record, Replay, compiled, loop, plain_settings
from fl_lightning.engine.simplify import Known, called_directly, simplified


class GraphedEngine(BatchedEngine):
    """The batched engine with its local step recorded once and replayed, without Python, autograd or vmap."""

    name = "graphed"

    UNROLLED = 8
    """Maximum number of local steps that are compiled into one graph."""
    KEPT = 32
    """Maximum number of records that are kept; the oldest is dropped first."""

    _compared = False

    @cached_property
    def _records(self) -> dict[Any, Record]:
        """Records by the shapes of their tensors, settings and round."""
        return {}

    def steps(self, carry: Carry, block: Block, fixed: Fixed, settings: Tensors = NOTHING) -> Carry:
        device, unroll = carry.w.device, self.unrolled(len(block.y))
        inputs = fixed.tensors() | prefixed("settings", settings)
        inputs["t"] = torch.zeros(Numbers.MOST, dtype=accumulator_dtype(device), device=device)
        carried = replace(carry, w=carry.w.contiguous(), loss=torch.zeros_like(carry.loss)).tensors()
        steps = {name: torch.unflatten(v, 0, (-1, unroll)) for name, v in block.tensors().items()}
        record = self.record_of({**carried, **inputs, **block.tensors()}, fixed.ctx, settings, check=True)
        inputs["t"] = to_device(record.stage.numbers.at(fixed.ctx.t), device, accumulator_dtype(device))
        with torch.no_grad():
            values = record.replay(*(tuple(tensors.values()) for tensors in (carried, inputs, steps)))
        end = Carry.of(dict(zip(carried, values, strict=True)))
        return replace(end, loss=carry.loss + end.loss)

    def unrolled(self, steps: int) -> int:
        """Returns how many of a client's local steps are one record's replay."""
        return steps if self.compile and steps <= self.UNROLLED else 1

    def record_of(
        self, tensors: Tensors, ctx: ClientContext, settings: Tensors = NOTHING, check: bool = False
    ) -> Record:
        """Returns the record of the local steps of a round; a new one only if none serves.

        Args:
            tensors: The tensors that `Fixed.tensors`, `Carry.tensors` and `Block.tensors` name, with ``t``.
            ctx: The context.
            settings: The clients' own settings, ``(clients, 1)``, among the tensors.
            check: Whether it is compared with a new one, if that is due.

        Raises:
            UserError: If a hook reads what has changed since.
        """
        blocks = {name: v[: self.unrolled(len(v))] for name, v in tensors.items() if name.startswith("block.")}
        first, known, objective = {**tensors, **blocks}, known_of(tensors), self.objective
        parts = objective, objective.ascent, objective.optimizer, objective.loss, *objective.parts
        shapes = [(n, v.shape, v.dtype) for n, v in first.items()]
        key = *shapes, *plain_settings(parts, settings.values()), *known.items(), ctx.rounds, ctx.m, ctx.phase
        record = self._records.get(key)
        if record is None or not record.stage.numbers.hold(ctx.t):
            self._records.pop(key, None)
            if len(self._records) >= self.KEPT:
                del self._records[next(iter(self._records))]
            self._records[key] = record = self._record(known, first, ctx)
        if check:
            self._compare(record, first, ctx)
        return record

    def step_stage(self, tensors: Tensors, ctx: ClientContext) -> Stage:
        """Records one local step of the tensors that `Fixed.tensors`, `Carry.tensors` and `Block.tensors` name."""
        minibatch = {name: value[:1] for name, value in tensors.items() if name.startswith("block.")}
        return stage(self._recorded, {**tensors, **minibatch}, ctx)

    def _compare(self, record: Record, tensors: Tensors, ctx: ClientContext) -> None:
        """Compares a record with a new one: the first that is used in another round, and each in the last round.

        Raises:
            UserError: If they differ.
        """
        if ctx.t == record.compared or (self._compared and ctx.t + 1 < ctx.rounds):
            return
        self._compared, record.compared = True, ctx.t
        self.check_alike(record.stage, self.step_stage(tensors, ctx))

    def check_alike(self, one: Stage, other: Stage) -> None:
        """Checks that two records of the same hooks are the same.

        Raises:
            UserError: If they differ.
        """
        ensure(
            alike(one, other),
            f"trainer.engine = graphed: a hook of {type(self.objective).__name__}, its net or its loss reads something "
            f"that has changed since its step was recorded in round {one.numbers.t + 1}; keep it as a number or a "
            "tensor on the objective itself, or use batched or sequential",
        )

    def _record(self, known: Known, tensors: Tensors, ctx: ClientContext) -> Record:
        """Records one step; compiled it is as many steps as ``tensors`` has minibatches."""
        step = self.step_stage(tensors, ctx)
        simplified(step.graph, not self.compile and tensors["w"].device.type == "cpu", known)
        if self.compile:
            steps, inputs = [("t", step)] * len(tensors["block.y"]), [tensors[name] for name in step.inputs]
            program, held = Program.of(composed(steps, step.inputs, step.outputs), inputs)
            replay: Replay = partial(compiled(program), *held)
        else:
            replay = called_directly(step.graph).forward
        replay = CudaGraph(replay) if tensors["w"].is_cuda else partial(loop, replay)
        return Record(step, replay, ctx.t)

    def _recorded(self, tensors: Tensors, ctx: ClientContext) -> Tensors:
        """Takes a local step with named tensors; returns those that it changes."""
        with self.using(below("settings", tensors)):
            fixed = self.fixed_of(tensors, ctx)
            return super().steps(Carry.of(tensors), Block.of(tensors), fixed, below("settings", tensors)).tensors()

    def fixed_of(self, tensors: Tensors, ctx: ClientContext) -> Fixed:
        """Returns the arguments whose `Fixed.tensors` these are; hooks cannot draw."""
        received = State(below("received", tensors))
        teachers, constants = (tuple(below(name, tensors).values()) for name in ("teacher", "constant"))
        start = tensors.get("start", received.w)
        ctx = self.without_draws(ctx)
        take = self.objective.optimizer.begin(self.objective.flat, start)
        return Fixed(received, start, teachers, constants, ctx, take)

    def without_draws(self, ctx: ClientContext) -> ClientContext:
        """Returns a context in which hooks cannot draw, since a record would repeat it."""
        return replace(ctx, draws=Draws([], self.net.device, True, REFUSED))


def known_of(tensors: Tensors) -> Known:
    """Returns what is known of the minibatches ``block.*``: whether all clients take part, and labels are masked.

    Of tensors on a GPU nothing is known: the host would have to wait for them.
    """
    active, y = tensors["block.active"], tensors["block.y"]
    if active.device.type != "cpu":
        return {}
    known = {"block.active": (1.0, 1.0)} if bool(active.all()) else {}
    unmasked = not y.is_floating_point() and y.numel() and bool(y.min() >= 0)
    return {**known, "block.y": (0.0, math.inf)} if unmasked else known
