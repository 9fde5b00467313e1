"""All clients of a block at once: the same hooks on ``(clients, d)``, gradients by vmap."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.core import (
    ClientContext,
    Draws,
    Logs,
    State,
    Upload,
    UserError,
    call_at,
    ensure,
    eval_mode,
    global_generator,
    is_finite,
    places,
    plain_recurrence,
    to_device,
)
from fl_lightning.data.minibatches import Block, blocks
from fl_lightning.engine.base import COLUMNS, Carry, Engine, Fixed, Job, LocalResult
from fl_lightning.engine.record import NOTHING, Tensors


class BatchedEngine(Engine):
    """Blocks of clients in one batched program; clients with fewer steps, or smaller minibatches, are masked.

    It refuses objectives that define a ``training_step``, whose mean would include padding, and nets with buffers; in
    training also nets that draw random numbers, or whose Python code depends on values of tensors.
    """

    name = "batched"

    SIGNS = (
        "vmap",
        "Boolean value of Tensor",
        "depends on values of tensors",
        "RecordedRound",
        "only integer tensors",
        "expected scalar type",
    )
    """Parts of messages by which errors of vmap or of the recording are recognized."""

    trains_several = True

    _widest = 2  # most clients so far; at least two, since a convolution of a single group rounds differently

    def check_objective(self) -> None:
        """See `Engine.check_objective`."""
        objective = self.objective
        ensure(
            type(objective).training_step is LocalObjective.training_step,
            f"trainer.engine = {self.name}: {type(objective).__name__} defines training_step; define `losses`, one "
            "value per sample, or use sequential",
        )
        ensure(
            objective.net_buffers is None,
            f"trainer.engine = {self.name}: {type(objective.net).__name__} has buffers, which can hold the values of "
            "one client only; use sequential",
        )
        objective.optimizer.check_batched(f"trainer.engine = {self.name}", ", or the engine sequential")

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        # clients with about as many steps share a block, so that there is little padding
        waiting = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].minibatches))
        trained, yielded = dict[int, LocalResult](), 0
        while waiting:
            block = sorted(waiting[: self.width or len(jobs)])
            try:
                results = self._train_block([jobs[i] for i in block])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                results = []
            if not results:  # the error is gone, and with it the tensors that its traceback held
                self._halve()
            waiting = waiting[len(results) :]
            trained.update(zip(block, results, strict=False))
            while yielded in trained:
                yield trained.pop(yielded)
                yielded += 1

    def _halve(self) -> None:
        """Trains half as many clients at once from now on."""
        clients = self._widest
        ensure(
            clients > 2,
            f"trainer.engine = {self.name}: out of memory with {clients} clients at once; use sequential, or a smaller "
            "data.batch_size",
        )
        self.width = self._widest = max(2, clients // 2)
        if self.net.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"out of memory with {clients} clients at once: {self.width} from now on; to begin with that, set "
            f"trainer.client_block: {self.width}",
            stacklevel=2,
        )

    def _train_block(self, jobs: Sequence[Job]) -> list[LocalResult]:
        with self.checked():
            rows = [*jobs, *repeat(jobs[0], self.widened(len(jobs)) - len(jobs))]  # padding takes no step
            clients = [job.minibatches for job in jobs]
            batch = clients[0].source.batch_size or 1 << (max(max(client.sizes) for client in clients) - 1).bit_length()
            carry, upload, state, logs = self._trained(rows, blocks(clients, len(rows), batch))
            values = (v.reshape(len(rows), -1) for group in (upload, state) for v in group.values())
            finite = torch.stack([*map(is_finite, values)]).all(0)
            n = len(jobs)  # the rest is padding
            steps = to_device([max(job.ctx.K, 1) for job in jobs], carry.loss.device, carry.loss.dtype)
            loss = carry.loss[:n] / steps
        per_client = zip(
            jobs,
            carry.w[:n],
            by_client(upload, n),
            by_client(state, n),
            loss,
            finite[:n],
            by_client({name: logs.row(name, n, loss) for name in logs.values}, n),
            strict=True,
        )
        return [
            LocalResult(job.client, job.received, w, up, State(row), x, job.ctx, ok, logs=Logs(logs.names, logged))
            for job, w, up, row, x, ok, logged in per_client
        ]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Checks within it that hooks and net suit this engine, and use no global randomness; vmap has no cuDNN RNN.

        Raises:
            UserError: If they do not.
        """
        before = self._global_states()
        try:
            with plain_recurrence(self.objective.net):
                yield
        except (RuntimeError, TypeError) as error:
            if not any(sign in str(error) for sign in self.SIGNS):
                raise
            names = type(self.objective).__name__, type(self.objective.net).__name__
            reason, remedy = f"{str(error).splitlines()[0]:.100}", "use sequential"
            if "random operation" in reason:
                reason = "net or loss draws random numbers from torch's global generator"
                remedy = (
                    f"draw those of a loss in loss_constants, by ctx.randn_like(v) or ctx.draw(function), or {remedy}"
                )
            raise UserError(
                f"trainer.engine = {self.name}: {names[0]} with {names[1]} cannot be batched ({reason}); {remedy}"
            ) from None
        ensure(
            all(map(torch.equal, before, self._global_states())),
            f"trainer.engine = {self.name}: a hook of {type(self.objective).__name__} draws from torch's global "
            "generator; draw by ctx.randn_like(v) or ctx.draw(function), hooks of the server from a torch.Generator "
            "that they seed with ctx.t, or use sequential",
        )

    def _global_states(self) -> list[Tensor]:
        """Returns the states of torch's global generators."""
        return [global_generator(torch.device(device)).get_state() for device in {"cpu", str(self.net.device)}]

    def widened(self, clients: int) -> int:
        """Returns the width of blocks from now on: a narrower one is padded, so that shapes stay the same."""
        self._widest = max(self._widest, clients)
        return self._widest

    def _trained(self, rows: Sequence[Job], blocks: Iterable[Block]) -> tuple[Carry, Upload, State, Logs]:
        """Returns what local training ends with, uploads, states and logs; each has a row a client, or one for all."""
        like, width = rows[0].received.w, len(rows)
        settings = {
            n: to_device([[job.settings[n]] for job in rows], like.device, like.dtype) for n in rows[0].settings
        }
        received = _together([job.received for job in rows])
        state = State({name: torch.stack([job.state[name] for job in rows]) for name in rows[0].state})
        self.train_mode()
        with self.using(settings):
            ctx = self.together([self.context(job) for job in rows], like, self.draws(rows))
            carry, fixed = self.begin(state, received, ctx, received.w.expand(width, -1))
            for block in blocks:
                carry = self.steps(carry, block, fixed, settings)
            upload, state, logs = self.finish(carry, fixed)
        upload = {name: v if v.ndim > 1 else v.expand(width, -1) for name, v in upload.items()}
        return carry, upload, State({name: v.expand_as(carry.state[name]) for name, v in state.items()}), logs

    def together(self, contexts: Sequence[ClientContext], like: Tensor, draws: Draws) -> ClientContext:
        """Returns the clients' contexts as one; attributes that differ between clients are ``(clients, 1)``."""
        first = contexts[0]
        table = [[[getattr(ctx, name)] for ctx in contexts] for name in COLUMNS]
        columns: dict[str, Any] = dict(zip(COLUMNS, to_device(table, like.device, like.dtype).unbind(), strict=True))
        if counts := [ctx.class_counts for ctx in contexts if ctx.class_counts is not None]:
            columns["class_counts"] = torch.stack(counts)
        return ClientContext(first.t, first.rounds, first.m, first.flat, first.phase, **columns, draws=draws)

    def steps(self, carry: Carry, block: Block, fixed: Fixed, settings: Tensors = NOTHING) -> Carry:
        """Takes all local steps of a block.

        Args:
            carry: What the last block returned.
            block: The minibatches.
            fixed: The arguments of all steps.
            settings: The clients' own settings, ``(clients, 1)``.
        """
        current = replace(carry, loss=torch.zeros_like(carry.loss))
        for x, y, weight, active in block:
            current = self._masked(current, (x, y, weight), active, fixed, settings)
        return replace(current, loss=carry.loss + current.loss)

    def _masked(
        self, carry: Carry, batch: tuple[Tensor, ...], active: Tensor, fixed: Fixed, settings: Tensors
    ) -> Carry:
        """Takes one local step of every client; those that are not active do not change."""
        batch = (*batch, *(self._teach(teacher, batch[0]) for teacher in fixed.teachers), *fixed.constants)
        own_settings = {name: v[:, 0] for name, v in settings.items()}

        def evaluate(v: Tensor, losses: Losses | None) -> tuple[Tensor, Tensor]:
            with self.autocast():
                values: tuple[Tensor, Tensor] = vmap(grad_and_value(partial(self._loss, losses)))(
                    v.expand_as(carry.w), own_settings, *batch
                )
            return values

        new = self.step(carry, fixed, evaluate)
        pairs = ((name, new.state[name], old) for name, old in carry.state.items())
        state = State({name: torch.where(mask_of_rows(active, old), value, old) for name, value, old in pairs})
        loss = carry.loss + torch.where(active[:, 0], new.loss, 0)
        return Carry(torch.where(active, new.w, carry.w), state, loss)

    @cached_property
    def _places(self) -> list[tuple[str, str]]:
        """The names of the net's parameters, at each of their places."""
        return places(self.objective.net)

    def _output(self, v: Tensor, x: Tensor) -> Any:
        """Returns the net's output at the weights ``v`` on one client's minibatch."""
        return call_at(self.objective.net, self.net.spec.split(v), x, self._places)

    def _observed(self, v: Tensor, x: Tensor) -> Any:
        """Returns the same as the loss sees it."""
        with self.objective.observed():
            return self._output(v, x)

    def _loss(
        self,
        losses: Losses | None,
        v: Tensor,
        settings: Tensors,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        *teacher: Tensor,
    ) -> Tensor:
        forward = partial(self._output, v, x)
        with self.using(settings):  # a number of a loss is the client's own
            return self.objective.minibatch_loss(forward, y, *teacher, weight=weight, losses=losses)

    @torch.no_grad()
    def _teach(self, teacher: Tensor, x: Tensor) -> Any:
        """Returns a teacher's output on every client's minibatch, in eval mode."""
        with eval_mode(self.objective.net), self.autocast():
            mixed = torch.is_autocast_enabled(teacher.device.type)
            output = self._output_of_mixed if mixed else self._observed
            return vmap(output, in_dims=(None if teacher.ndim == 1 else 0, 0))(teacher, x)  # one is for all

    def _output_of_mixed(self, v: Tensor, x: Tensor) -> Any:
        """Returns `_observed` under autocast, which sees a convolution before vmap only within a derivative."""
        return vjp(partial(self._observed, x=x), v)[0]


def mask_of_rows(mask: Tensor, values: Tensor) -> Tensor:
    """Returns a mask of clients, ``(clients, 1)``, in the shape that acts on values ``(clients, ...)``."""
    return mask if values.ndim == 2 else mask.view(-1, *[1] * (values.ndim - 1))


def by_client(values: Mapping[str, Tensor], n: int) -> list[dict[str, Tensor]]:
    """Returns the rows of the first ``n`` clients."""
    columns = {name: v.unbind() for name, v in values.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory is out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _together(received: Sequence[State]) -> State:
    """Returns the states that clients received as one: a state that all share stays ``(d,)``, others are stacked."""
    first = received[0]
    if all(other is first for other in received):
        return first
    return State({name: torch.stack([state[name] for state in received]) for name in first})
