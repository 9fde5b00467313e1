"""The batched engine with its local step recorded once and replayed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Autocast, ClientContext, FlatNet, State
from fl_lightning.data.minibatches import Block
from fl_lightning.engine.base import COLUMNS
from fl_lightning.engine.batched import BatchedEngine, Carry, Fixed, Tensors
from fl_lightning.engine.record import (
    Compiled,
    CudaGraph,
    Loop,
    RecordedRound,
    Records,
    plain_settings,
    round_number,
    trace,
)


class GraphedEngine(BatchedEngine):
    """The batched engine with its local step recorded once and replayed, without Python, autograd or vmap.

    Args:
        objective: As for `Engine`.
        net: As for `Engine`.
        autocast: As for `Engine`.
        width: As for `BatchedEngine`.
        compile: Compile the record to machine code, with all steps of a round if they are few.
    """

    name = "graphed"

    UNROLLED = 8
    """Most local steps that are compiled into one graph."""

    def __init__(
        self,
        objective: LocalObjective,
        net: FlatNet,
        autocast: Autocast,
        width: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(objective, net, autocast, width)
        self.compile = compile
        self.records = Records()

    def _steps(self, carry: Carry, block: Block, fixed: Fixed) -> Carry:
        n, settings = len(block.x), self._settings()
        unroll = n if self.compile and n <= self.UNROLLED else 1
        inputs: Tensors = {
            **_prefixed("received", fixed.received),
            **_prefixed("ctx", {name: getattr(fixed.ctx, name) for name in COLUMNS}),
            **_prefixed("settings", fixed.settings),
            **_prefixed("teacher", _numbered(fixed.teachers)),
            **_prefixed("constant", _numbered(fixed.constants)),
            "t": round_number(fixed.ctx, carry.w),
        }
        if fixed.start is not fixed.received.w:
            inputs["start"] = fixed.start
        if fixed.ctx.class_counts is not None:
            inputs["ctx.class_counts"] = fixed.ctx.class_counts
        carried = _tensors(replace(carry, w=carry.w.contiguous(), loss=torch.zeros_like(carry.loss)))
        steps = {name: v.unflatten(0, (-1, unroll)) for name, v in vars(block).items()}
        first = {name: v[0] for name, v in steps.items()}
        replay = self.records.find({**carried, **inputs, **first}, fixed.ctx, settings, self._record)
        with torch.no_grad():
            values = replay(*(tuple(tensors.values()) for tensors in (carried, inputs, steps)))
        end = _carry(dict(zip(carried, values, strict=True)))
        return replace(end, loss=carry.loss + end.loss)

    def _record(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, Loop | CudaGraph]:
        round_number, graph = trace(self._recorded, named, ctx)
        replay = Compiled(graph) if self.compile else graph
        return round_number, CudaGraph(replay) if named["w"].is_cuda else Loop(replay)

    def _recorded(self, named: Tensors, ctx: ClientContext) -> list[Tensor]:
        """A few steps, from named tensors to those of them that a step changes, in the same order."""
        received, settings = State(_below("received", named)), _below("settings", named)
        teachers, constants = (tuple(_below(name, named).values()) for name in ("teacher", "constant"))
        fixed = Fixed(received, named.get("start", received.w), teachers, constants, settings, ctx)
        block = Block(*(named[name] for name in ("x", "y", "weight", "active")))
        with self.using(settings):
            return list(_tensors(super()._steps(_carry(named), block, fixed)).values())

    def _settings(self) -> tuple[Any, ...]:
        objective = self.objective
        return plain_settings(objective, objective.ascent, objective.optimizer, objective.loss)


def _prefixed(prefix: str, values: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _numbered(tensors: Sequence[Tensor]) -> Tensors:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _below(prefix: str, named: Tensors) -> Tensors:
    return {name.removeprefix(f"{prefix}."): v for name, v in named.items() if name.startswith(f"{prefix}.")}


def _tensors(carry: Carry) -> Tensors:
    """The tensors of a carry by name."""
    momentum = {} if carry.momentum is None else {"momentum": carry.momentum}
    return {"w": carry.w, "loss": carry.loss, **_prefixed("state", carry.state), **momentum}


def _carry(named: Tensors) -> Carry:
    """The inverse of `_tensors`; other names are ignored."""
    return Carry(named["w"], State(_below("state", named)), named.get("momentum"), named["loss"])
