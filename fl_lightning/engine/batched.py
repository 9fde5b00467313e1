"""All clients of a block at once: the same hooks on ``(clients, d)``, gradients by vmap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import is_finite
from fl_lightning.core.state import ClientContext, State
from fl_lightning.data.minibatches import Block, blocks
from fl_lightning.engine.base import COLUMNS, Autocast, Engine, Job, LocalResult
from fl_lightning.engine.record import (
    Compiled,
    CudaGraph,
    RecordedRound,
    Records,
    Replay,
    plain_settings,
    round_number,
    trace,
)

Tensors = dict[str, Tensor]


class BatchedEngine(Engine):
    """Blocks of clients in one batched program; clients with fewer steps, or smaller minibatches, are masked.

    Args:
        objective: As for `Engine`.
        autocast: As for `Engine`.
        width: Clients of a block; null: all that are given at once.

    Raises:
        UserError: If the objective defines a ``training_step`` of its own, whose mean could not leave padding out, or
            the net has buffers; or (in training) if the net cannot be batched: it draws random numbers, or its Python
            code looks at values.
    """

    name = "batched"

    SIGNS = ("vmap", "Boolean value of Tensor", "tracing tensor", "RecordedRound", "only integer tensors")
    """What errors say that vmap or the recording raises, and not the net."""

    def __init__(self, objective: LocalObjective, autocast: Autocast, width: int | None = None) -> None:
        super().__init__(objective, autocast)
        if type(objective).training_step is not LocalObjective.training_step:
            raise UserError(
                f"trainer.engine = {self.name}: {type(objective).__name__} defines training_step; define `losses`, one "
                "value per sample, or use sequential"
            )
        if objective.net_buffers is not None:
            raise UserError(
                f"trainer.engine = {self.name}: {type(objective.net).__name__} has buffers, which hold those of one "
                "client; use sequential"
            )
        self.width = width
        self._own: Tensors = {}
        self._widest = 2  # a convolution of a single group rounds differently

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        width = self.width or len(jobs)
        for at in range(0, len(jobs), width or 1):
            yield from self._train_block(jobs[at : at + width])

    def _train_block(self, jobs: Sequence[Job]) -> list[LocalResult]:
        try:
            return self._trained(jobs)
        except (RuntimeError, TypeError) as error:
            if not any(sign in str(error) for sign in self.SIGNS):
                raise
            names = type(self.objective).__name__, type(self.objective.net).__name__
            raise UserError(
                f"trainer.engine = {self.name}: {names[0]} with {names[1]} cannot be batched "
                f"({str(error).splitlines()[0]:.100}); use sequential"
            ) from None

    def _trained(self, jobs: Sequence[Job]) -> list[LocalResult]:
        # a block narrower than before is padded with a client that makes no step, so that shapes stay the same
        self._widest = width = max(self._widest, len(jobs))
        rows = [*jobs, *repeat(jobs[0], width - len(jobs))]
        self._own = self._values(rows)
        with self._with(self._own):
            return self._train_rows(jobs, rows)

    def _train_rows(self, jobs: Sequence[Job], rows: Sequence[Job]) -> list[LocalResult]:
        objective, sent, width = self.objective, _together([job.sent for job in jobs]), len(rows)
        objective.train()
        state = State({name: torch.stack([job.state[name] for job in rows]) for name in jobs[0].state})
        sent = State({name: v if v.ndim == 1 else _widened(v, width) for name, v in sent.items()})
        ctx = self._context(rows)
        w, slots = objective.local_start(state, sent, ctx)
        start, teacher = sent.replace(w=w), objective.teacher(slots, sent)
        w = w.expand(width, -1)
        buffer = torch.zeros_like(w) if objective.optimizer.momentum else None
        loss = w.new_zeros(width)
        for block in self._blocks([job.minibatches for job in jobs], width):
            w, slots, buffer, losses = self._steps(w, slots, buffer, start, teacher, block, ctx)
            loss = loss + losses
        upload, slots = objective.finish_local(w, slots, sent, start, ctx)
        return self._results(jobs, w, upload, slots, loss)

    def _results(
        self, jobs: Sequence[Job], w: Tensor, upload: Tensors, slots: State, loss: Tensor
    ) -> list[LocalResult]:
        width = len(w)
        slots = slots.only(self.objective.client_inits())
        named = {**{f"u{n}": v for n, v in upload.items()}, **{f"s{n}": v for n, v in slots.items()}}
        rows = {name: v if v.ndim > 1 else v.expand(width, -1) for name, v in named.items()}
        finite = torch.stack([is_finite(v) for v in rows.values()]).all(0).tolist()
        each = {name: v.unbind() for name, v in rows.items()}
        ws, steps = w.unbind(), loss.new_tensor([max(job.ctx.K, 1) for job in jobs])
        losses = (loss[: len(jobs)] / steps).unbind()
        return [
            LocalResult(
                job.client,
                job.sent,
                ws[i],
                {name: each[f"u{name}"][i] for name in upload},
                State({name: each[f"s{name}"][i] for name in slots}),
                losses[i],
                job.ctx,
                finite[i],
            )
            for i, job in enumerate(jobs)
        ]

    def _context(self, jobs: Sequence[Job]) -> ClientContext:
        """The clients' contexts as one; what differs between clients is ``(clients, 1)``."""
        like, first = jobs[0].sent.w, jobs[0].ctx
        columns: dict[str, Any] = {
            name: like.new_tensor([[getattr(job.ctx, name)] for job in jobs]) for name in COLUMNS
        }
        return ClientContext(first.t, first.rounds, first.m, first.flat, first.phase, **columns)

    @staticmethod
    def _values(jobs: Sequence[Job]) -> Tensors:
        """The clients' own settings, ``(clients, 1)``."""
        return {name: jobs[0].sent.w.new_tensor([[job.values[name]] for job in jobs]) for name in jobs[0].values}

    def _blocks(self, clients: Sequence[Any], width: int) -> Iterator[Block]:
        batch = max(max(client.sizes) for client in clients)
        yield from blocks(clients, width, clients[0].source.batch_size or 1 << (batch - 1).bit_length())

    def _steps(
        self,
        w: Tensor,
        slots: State,
        buffer: Tensor | None,
        start: State,
        teacher: Tensor | None,
        block: Block,
        ctx: ClientContext,
    ) -> tuple[Tensor, State, Tensor | None, Tensor]:
        """All steps of a block; the losses are summed over them."""
        total = w.new_zeros(len(w))
        for x, y, weight, active in zip(block.x, block.y, block.weight, block.active, strict=True):
            w, slots, buffer, loss = self._step(w, slots, buffer, start, teacher, (x, y, weight), active, ctx)
            total = total + loss
        return w, slots, buffer, total

    def _step(
        self,
        w: Tensor,
        slots: State,
        buffer: Tensor | None,
        start: State,
        teacher: Tensor | None,
        batch: tuple[Tensor, ...],
        active: Tensor,
        ctx: ClientContext,
    ) -> tuple[Tensor, State, Tensor | None, Tensor]:
        """One local step of every client; those that are not active stay where they are."""
        values: list[Tensor] = []
        if teacher is not None:
            batch = (*batch, self._teach(teacher, batch[0]))

        def grad(v: Tensor) -> Tensor:
            g: Tensor
            with self.autocast():
                g, loss = vmap(grad_and_value(self._loss))(v.expand_as(w), *batch)
            values.append(loss.detach())
            return g

        direction, new = self.objective.local_step(w, grad, slots, start, ctx)
        after, momentum = self.objective.optimizer.step(w, direction, buffer, ctx.lr)

        def where(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(active, new, old)

        slots = State({name: where(new[name], old) for name, old in slots.items()})
        buffer = None if buffer is None or momentum is None else where(momentum, buffer)
        return where(after, w), slots, buffer, torch.where(active[:, 0], values[0], 0)

    def _loss(self, v: Tensor, x: Tensor, y: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.objective.net, self.net.spec.split(v), (x,))
        return torch.sum(self.objective.losses(logits, y, *teacher) * weight)

    @torch.no_grad()
    def _teach(self, teacher: Tensor, x: Tensor) -> Tensor:
        """The teacher's logits on every client's minibatch, in eval mode."""
        net, spec = self.objective.net, self.net.spec

        def forward(v: Tensor, x: Tensor) -> Tensor:
            logits: Tensor = functional_call(net, spec.split(v), (x,))
            return logits

        net.eval()
        out: Tensor
        with self.autocast():
            if teacher.ndim == 1:  # the same for all
                out = vmap(forward, in_dims=(None, 0))(teacher, x)
            else:
                out = vmap(forward)(teacher, x)
        net.train()
        return out


def _together(sent: Sequence[State]) -> State:
    """What clients received: shared tensors stay as they are, different ones are stacked."""
    first = sent[0]
    if all(other is first for other in sent):
        return first
    return State({name: torch.stack([s[name] for s in sent]) for name in first})


def _widened(v: Tensor, width: int) -> Tensor:
    return torch.cat([v, v[:1].expand(width - len(v), -1)]) if len(v) < width else v


class GraphedEngine(BatchedEngine):
    """The batched engine with its local step recorded once and replayed: no Python, autograd or vmap in between.

    Args:
        objective: As for `Engine`.
        autocast: As for `Engine`.
        width: As for `BatchedEngine`.
        compile: Compile the record to machine code, of all steps of a round if they are few.
    """

    name = "graphed"

    UNROLLED = 8
    """Most local steps that are compiled into one graph."""

    def __init__(
        self, objective: LocalObjective, autocast: Autocast, width: int | None = None, compile: bool = False
    ) -> None:
        super().__init__(objective, autocast, width)
        self.compile = compile
        self.records = Records()

    def _steps(
        self,
        w: Tensor,
        slots: State,
        buffer: Tensor | None,
        start: State,
        teacher: Tensor | None,
        block: Block,
        ctx: ClientContext,
    ) -> tuple[Tensor, State, Tensor | None, Tensor]:
        n, settings = len(block.x), self._settings()
        unroll = n if self.compile and n <= self.UNROLLED else 1
        fixed: Tensors = {
            **{f"start.{name}": v for name, v in start.items()},
            **{f"ctx.{name}": getattr(ctx, name) for name in COLUMNS},
            **{f"value.{name}": v for name, v in self._own.items()},
            "t": round_number(ctx, w),
        }
        if teacher is not None:
            fixed["teacher"] = teacher
        state: Tensors = {
            "w": w.contiguous(),
            "loss": w.new_zeros(len(w)),
            **{f"slot.{name}": v for name, v in slots.items()},
        }
        if buffer is not None:
            state["buffer"] = buffer
        for at in range(0, n, unroll):
            span = slice(at, at + unroll)
            data = {"x": block.x[span], "y": block.y[span], "weight": block.weight[span], "active": block.active[span]}
            named = {**state, **fixed, **data}
            replay = self.records.find(named, ctx, settings, self._record)
            with torch.no_grad():
                state = dict(zip(state, replay(*named.values()), strict=True))
        slots = State({name: state[f"slot.{name}"] for name in slots})
        return state["w"], slots, state.get("buffer"), state["loss"]

    def _record(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, Replay]:
        round_number, graph = trace(self._recorded, named, ctx)
        replay = Compiled(graph) if self.compile else graph
        return round_number, CudaGraph(replay) if named["w"].is_cuda else replay

    def _recorded(self, named: Tensors, ctx: ClientContext) -> list[Tensor]:
        """What is recorded: a few steps, from named tensors to those of them that are state, in the same order."""
        slots = State({n.removeprefix("slot."): v for n, v in named.items() if n.startswith("slot.")})
        start = State({n.removeprefix("start."): v for n, v in named.items() if n.startswith("start.")})
        block = Block(*(named[name] for name in ("x", "y", "weight", "active")))
        values = {n.removeprefix("value."): v for n, v in named.items() if n.startswith("value.")}
        with self._with(values):
            w, slots, buffer, loss = super()._steps(
                named["w"], slots, named.get("buffer"), start, named.get("teacher"), block, ctx
            )
        return [w, named["loss"] + loss, *slots.values(), *([] if buffer is None else [buffer])]

    def _settings(self) -> tuple[Any, ...]:
        objective = self.objective
        return plain_settings(objective, objective.ascent, objective.optimizer, objective.loss)
