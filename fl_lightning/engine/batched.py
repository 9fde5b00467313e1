"""All clients of a block at once: the same hooks on ``(clients, d)``, gradients by vmap."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.core import (
    Autocast,
    ClientContext,
    FlatNet,
    State,
    Upload,
    UserError,
    ensure,
    eval_mode,
    is_finite,
    to_device,
)
from fl_lightning.data.minibatches import Block, blocks
from fl_lightning.engine.base import COLUMNS, Engine, Job, LocalResult

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Carry:
    """Tensors that a local step changes.

    Attributes:
        w: Weights, ``(clients, d)``.
        state: The clients' state, without ``start``.
        momentum: Momentum buffers ``(clients, d)``, if the optimizer has any.
        loss: Sum of the losses so far, ``(clients,)``.
    """

    w: Tensor
    state: State
    momentum: Tensor | None
    loss: Tensor


@dataclass(frozen=True)
class Fixed:
    """Arguments that stay the same over the local steps of a round.

    Attributes:
        received: The state that the server sent; ``(d,)`` where it is the same for all clients.
        start: Weights where local training starts.
        teachers: The teachers' weights.
        constants: The clients' own further arguments of the loss, ``(clients, ...)``.
        settings: The clients' own settings, ``(clients, 1)``.
        ctx: The clients' contexts as one.
    """

    received: State
    start: Tensor
    teachers: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    settings: Tensors
    ctx: ClientContext


class BatchedEngine(Engine):
    """Blocks of clients in one batched program; clients with fewer steps, or smaller minibatches, are masked.

    Args:
        objective: As for `Engine`.
        net: As for `Engine`.
        autocast: As for `Engine`.
        width: Clients of a block; null: all jobs at once. A block that does not fit into memory is halved.

    Raises:
        UserError: If the objective defines a ``training_step``, whose mean would include padding, or the net has
            buffers; or, in training, if the net cannot be batched: it draws random numbers, or its Python code depends
            on values.
    """

    name = "batched"

    SIGNS = ("vmap", "Boolean value of Tensor", "tracing tensor", "RecordedRound", "only integer tensors")
    """Parts of messages by which errors of vmap or of the recording are recognized."""

    def __init__(self, objective: LocalObjective, net: FlatNet, autocast: Autocast, width: int | None = None) -> None:
        super().__init__(objective, net, autocast)
        ensure(
            type(objective).training_step is LocalObjective.training_step,
            f"trainer.engine = {self.name}: {type(objective).__name__} defines training_step; define `losses`, one "
            "value per sample, or use sequential",
        )
        ensure(
            objective.net_buffers is None,
            f"trainer.engine = {self.name}: {type(objective.net).__name__} has buffers, which hold those of one "
            "client; use sequential",
        )
        objective.optimizer.check_batched(f"trainer.engine = {self.name}")
        self.width = width
        self._widest = 2  # a convolution of a single group rounds differently

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        done = 0
        while done < len(jobs):
            block = jobs[done : done + (self.width or len(jobs))]
            try:
                results = self._train_block(block)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                results = []
            if not results:  # the error is gone, and with it the tensors that its traceback held
                self._halve(len(block))
            yield from results
            done += len(results)

    def _halve(self, clients: int) -> None:
        """Trains half as many clients at once from now on."""
        ensure(
            clients > 2,
            f"trainer.engine = {self.name}: out of memory with {clients} clients at once; use sequential, or a smaller "
            "data.batch_size",
        )
        self.width = self._widest = max(2, clients // 2)
        if self.net.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"out of memory with {clients} clients at once: {self.width} from now on; trainer.client_block: "
            f"{self.width} begins with that",
            stacklevel=2,
        )

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
        # a narrower block is padded with clients that take no step, so that shapes stay the same
        self._widest = width = max(self._widest, len(jobs))
        rows = [*jobs, *repeat(jobs[0], width - len(jobs))]
        like = rows[0].received.w
        settings = {
            n: to_device([[job.settings[n]] for job in rows], like.device, like.dtype) for n in rows[0].settings
        }
        with self.using(settings):
            return self._train_rows(jobs, rows, settings)

    def _train_rows(self, jobs: Sequence[Job], rows: Sequence[Job], settings: Tensors) -> list[LocalResult]:
        objective, received, width = self.objective, _together([job.received for job in jobs]), len(rows)
        self.train_mode()
        state = State({name: torch.stack([job.state[name] for job in rows]) for name in jobs[0].state})
        received = State({name: v if v.ndim == 1 else _widened(v, width) for name, v in received.items()})
        ctx = self._context(rows)
        start, client = objective.begin_local(state, received, ctx)
        teachers, constants = objective.teachers(client, received), objective.loss_constants(client, received, ctx)
        fixed = Fixed(received, start, teachers, constants, settings, ctx)
        w = start.expand(width, -1)
        momentum = torch.zeros_like(w) if objective.optimizer.momentum else None
        carry = Carry(w, client.only(state), momentum, w.new_zeros(width))
        for block in self._blocks([job.minibatches for job in jobs], width):
            carry = self._steps(carry, block, fixed)
        upload, client = objective.finish_local(carry.w, carry.state | {"start": start}, received, ctx)
        return self._results(jobs, carry, upload, client.only(objective.client_inits()))

    def _results(self, jobs: Sequence[Job], carry: Carry, upload: Upload, state: State) -> list[LocalResult]:
        width = len(carry.w)
        groups = [{n: v if v.ndim > 1 else v.expand(width, -1) for n, v in g.items()} for g in (upload, state)]
        finite = torch.stack([is_finite(v) for group in groups for v in group.values()]).all(0).unbind()
        uploads, states = ({name: v.unbind() for name, v in group.items()} for group in groups)
        steps = to_device([max(job.ctx.K, 1) for job in jobs], carry.loss.device, carry.loss.dtype)
        each = zip(jobs, carry.w.unbind(), (carry.loss[: len(jobs)] / steps).unbind(), finite, strict=False)  # padding
        return [
            LocalResult(
                job.client,
                job.received,
                w,
                {name: v[i] for name, v in uploads.items()},
                State({name: v[i] for name, v in states.items()}),
                loss,
                job.ctx,
                ok,
            )
            for i, (job, w, loss, ok) in enumerate(each)
        ]

    def _context(self, jobs: Sequence[Job]) -> ClientContext:
        """Returns the clients' contexts as one; attributes that differ between clients are ``(clients, 1)``."""
        like, contexts = jobs[0].received.w, [self.context(job) for job in jobs]
        first = contexts[0]
        table = [[[getattr(ctx, name)] for ctx in contexts] for name in COLUMNS]
        columns: dict[str, Any] = dict(zip(COLUMNS, to_device(table, like.device, like.dtype).unbind(), strict=True))
        if counts := [ctx.class_counts for ctx in contexts if ctx.class_counts is not None]:
            columns["class_counts"] = torch.stack(counts)
        return ClientContext(first.t, first.rounds, first.m, first.flat, first.phase, **columns)

    def _blocks(self, clients: Sequence[Any], width: int) -> Iterator[Block]:
        batch = max(max(client.sizes) for client in clients)
        yield from blocks(clients, width, clients[0].source.batch_size or 1 << (batch - 1).bit_length())

    def _steps(self, carry: Carry, block: Block, fixed: Fixed) -> Carry:
        """Takes all steps of a block."""
        now = replace(carry, loss=torch.zeros_like(carry.loss))
        for x, y, weight, active in zip(block.x, block.y, block.weight, block.active, strict=True):
            now = self._step(now, (x, y, weight), active, fixed)
        return replace(now, loss=carry.loss + now.loss)

    def _step(self, carry: Carry, batch: tuple[Tensor, ...], active: Tensor, fixed: Fixed) -> Carry:
        """Takes one local step of every client; those that are not active do not change."""
        values: list[Tensor] = []
        batch = (*batch, *(self._teach(teacher, batch[0]) for teacher in fixed.teachers), *fixed.constants)

        def grad(v: Tensor, losses: Losses | None = None) -> Tensor:
            g: Tensor
            with self.autocast():
                g, loss = vmap(grad_and_value(partial(self._loss, losses)))(v.expand_as(carry.w), *batch)
            if losses is None:
                values.append(loss.detach())
            return g

        client = carry.state | {"start": fixed.start}
        lr = self.objective.step_lr(client, fixed.ctx)
        direction, client = self.objective.local_step(carry.w, grad, client, fixed.received, fixed.ctx)
        w, momentum = self.objective.optimizer.step(carry.w, direction, carry.momentum, lr)

        def where(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(active, new, old)

        state = State({name: where(client[name], old) for name, old in carry.state.items()})
        momentum = None if carry.momentum is None or momentum is None else where(momentum, carry.momentum)
        return Carry(where(w, carry.w), state, momentum, carry.loss + torch.where(active[:, 0], values[0], 0))

    def _loss(self, losses: Losses | None, v: Tensor, x: Tensor, y: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
        objective = self.objective
        with objective.observed():
            output = functional_call(objective.net, self.net.spec.split(v), (x,))
        return objective.batch_loss(output, y, *teacher, weight=weight, losses=losses)

    @torch.no_grad()
    def _teach(self, teacher: Tensor, x: Tensor) -> Tensor:
        """Returns a teacher's output on every client's minibatch, in eval mode."""
        net, spec = self.objective.net, self.net.spec

        def forward(v: Tensor, x: Tensor) -> Tensor:
            logits: Tensor = functional_call(net, spec.split(v), (x,))
            return logits

        out: Tensor
        with eval_mode(net), self.autocast(), self.objective.observed():
            if teacher.ndim == 1:  # the same for all
                out = vmap(forward, in_dims=(None, 0))(teacher, x)
            else:
                out = vmap(forward)(teacher, x)
        return out


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _together(received: Sequence[State]) -> State:
    """Returns the states that clients received as one: a state that all share stays ``(d,)``, others are stacked."""
    first = received[0]
    if all(other is first for other in received):
        return first
    return State({name: torch.stack([state[name] for state in received]) for name in first})


def _widened(v: Tensor, width: int) -> Tensor:
    return torch.cat([v, v[:1].expand(width - len(v), -1)]) if len(v) < width else v
