"""The interface of the engines, jobs in and local results out, and the order of a client's hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.algorithms.parts import Take
from fl_lightning.core import (
    Autocast,
    ClientContext,
    Draws,
    FlatNet,
    Logs,
    State,
    Upload,
    UserError,
    below,
    prefixed,
    without_gradients,
)
from fl_lightning.data.minibatches import Minibatches

COLUMNS = ("lr", "K", "K_missed", "k_lr", "n_k", "n_mean")
"""Attributes in which the contexts of a cohort's clients differ."""


@dataclass(frozen=True)
class Job:
    """One client's local training in one phase.

    Attributes:
        client: Its id.
        state: Its state.
        received: The state that the server sent.
        ctx: Its context.
        minibatches: Its data, one minibatch per step.
        seed: Seed for what the net itself draws, such as dropout.
        settings: Settings that replace those of the engine's objective, by name; those of a part as ``ascent.rho``.
    """

    client: int
    state: State
    received: State
    ctx: ClientContext
    minibatches: Minibatches
    seed: int
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's local training.

    Attributes:
        client: Its id.
        received: The state that the server sent.
        w: Local weights after the last step, ``(d,)``.
        upload: Its upload, by name.
        state: The state that it keeps.
        loss: Mean over the steps of the local objective at the first point where a step evaluates its gradient, a
            scalar tensor. That point is the weights; if the ascent needs no gradient, it is the ascent point.
        ctx: Its context.
        finite: Whether all that it uploads and keeps is finite, a scalar tensor.
        buffers: The net's buffers after the last step, ``(b,)``, if it has any.
        logs: The numbers that its hooks have logged.
    """

    client: int
    received: State
    w: Tensor
    upload: Upload
    state: State
    loss: Tensor
    ctx: ClientContext
    finite: Tensor
    buffers: Tensor | None = None
    logs: Logs = field(default_factory=Logs)


@dataclass(frozen=True)
class Carry:
    """Tensors that a local step changes, of one client or of several at once.

    Attributes:
        w: Weights, ``(..., d)``.
        state: The client's state, with that of the optimizer.
        loss: The loss of the last step, or in the batched engine the sum of the losses so far, ``(...)``.
    """

    w: Tensor
    state: State
    loss: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        return {"w": self.w, "loss": self.loss, **prefixed("state", self.state)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Carry":
        """Returns the carry whose `tensors` these are; other names are ignored."""
        return cls(tensors["w"], State(below("state", tensors)), tensors["loss"])


@dataclass(frozen=True)
class Fixed:
    """Arguments that stay the same over the local steps of a round.

    Attributes:
        received: The state that the server sent; ``(d,)`` where it is the same for all clients.
        start: Weights where local training starts.
        teachers: The teachers' weights.
        constants: The client's own further arguments of the loss, ``(..., any)``.
        ctx: The client's context.
        take: Takes a step of the local optimizer.
    """

    received: State
    start: Tensor
    teachers: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    ctx: ClientContext
    take: Take

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        columns = {name: getattr(self.ctx, name) for name in (*COLUMNS, "class_counts")}
        return {
            **prefixed("received", self.received),
            **{f"teacher.{i}": v for i, v in enumerate(self.teachers)},
            **{f"constant.{i}": v for i, v in enumerate(self.constants)},
            **({} if self.start is self.received.w else {"start": self.start}),
            **prefixed("ctx", {name: v for name, v in columns.items() if v is not None}),
        }


Evaluation = Callable[[Tensor, Losses | None], tuple[Tensor, Tensor]]
"""Gradient and loss at a point on this step's minibatch, of the objective or of other losses per sample."""


def changed(objective: LocalObjective, settings: Mapping[str, float | Tensor]) -> LocalObjective:
    """Returns a copy of an objective with other settings, by name as in `Job`; the copy shares everything else."""
    copies: dict[str, Any] = {"": copy(objective)}

    def copied(path: str) -> Any:
        if path not in copies:
            above, _, name = path.rpartition(".")
            owner = copied(above)
            copies[path] = copy(getattr(owner, name))
            object.__setattr__(owner, name, copies[path])  # that of nn.Module would change a dict which both share
        return copies[path]

    for name, value in settings.items():
        path, _, attribute = name.rpartition(".")
        object.__setattr__(copied(path), attribute, value)
    return copies[""]  # type: ignore[no-any-return]


class Engine:
    """Runs local training. All engines run the same hooks and give the same numbers, up to rounding.

    This class alone calls the hooks of a local training: in `begin`, in `step` for each minibatch, and in `finish`. A
    subclass provides the minibatches and the gradients; if it trains several clients at once, also the mask.

    Args:
        objective: The local objective, on its device and in its precision.
        net: The flat view of the objective's net; training leaves it at other weights.
        autocast: Context for forward passes.
        width: Clients that are trained at once, for engines that train several; null: all of a cohort. If they do not
            fit into memory, it is halved.
        compile: Whether the graphed engine compiles the record to machine code, with all steps of a round if they are
            few.

    Raises:
        UserError: If the engine cannot run this objective.

    Attributes:
        name: Its name in ``trainer.engine``.
        trains_several: Whether it trains several clients at once.
    """

    name: ClassVar[str]
    trains_several: ClassVar[bool] = False

    def __init__(
        self,
        objective: LocalObjective,
        net: FlatNet,
        autocast: Autocast,
        width: int | None = None,
        compile: bool = False,
    ) -> None:
        self.objective, self.net, self.autocast = objective, net, autocast
        self.width, self.compile = width, compile
        self.check_objective()

    def check_objective(self) -> None:
        """Checks that the engine can run its objective.

        Raises:
            UserError: If it cannot.
        """

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        """Trains each client; yields the results one by one, in the order of ``jobs``."""
        raise NotImplementedError

    def begin(self, state: State, received: State, ctx: ClientContext, like: Tensor) -> tuple[Carry, Fixed]:
        """Calls the hooks before the first step.

        Args:
            state: The state of the client, or of several.
            received: The state that the server sent.
            ctx: The context.
            like: A tensor of the shape of the weights, ``(..., d)``.
        """
        objective, optimizer = self.objective, self.objective.optimizer
        fresh = {} if optimizer.keeps_state else optimizer.named_state
        if fresh:
            state = state | State.initial(fresh, like, like)
        start, client = objective.begin_local(state, received, ctx)
        if fresh and start is not received.w:
            first = start.expand_as(like)
            initial = State.initial(fresh, first, first)
            client |= {name: value for name, value in initial.items() if client.get(name) is state[name]}
        seen = objective.seen_state(start, client, received)
        teachers, constants = objective.teachers(*seen), objective.loss_constants(*seen, ctx)
        constants = tuple(  # the same for all
            v.expand((*like.shape[:-1], *v.shape)) if v.ndim < 2 else v for v in constants
        )
        fixed = Fixed(received, start, teachers, constants, ctx, optimizer.begin(objective.flat, start))
        state = State({name: value.expand_as(state[name]) for name, value in client.only(state).items()})
        return Carry(start.expand_as(like), state, like.new_zeros(like.shape[:-1])), fixed

    def step(self, carry: Carry, fixed: Fixed, evaluate: Evaluation) -> Carry:
        """Takes one local step.

        Args:
            carry: What the last step returned.
            fixed: The arguments of all steps.
            evaluate: Gradient and loss on this step's minibatch.

        Raises:
            UserError: If the step evaluates no gradient of the local objective.
        """
        objective, ctx, losses = self.objective, fixed.ctx, list[Tensor]()

        def grad(v: Tensor, other: Losses | None = None) -> Tensor:
            g, loss = evaluate(v, other)
            if other is None:
                losses.append(loss.detach())
            return g

        if ctx.draws is not None:
            ctx.draws.next_step()
        client, received = objective.seen_state(carry.w, carry.state | {"start": fixed.start}, fixed.received)
        alone, moving = objective.alone(ctx), objective.moving(carry.w, ctx)
        if alone is None:
            lr = objective.step_lr(client, ctx)
            direction, client = objective.local_step(carry.w, grad, client, received, ctx)
        else:
            lr, direction = ctx.lr, objective.direction_alone(alone, carry.w, grad, client, received, ctx)
        if moving is not None:
            pair = direction if isinstance(direction, tuple) else (direction, torch.zeros_like(carry.w))
            direction = torch.where(moving, pair[0], 0), torch.where(moving, pair[1], 0)
        w, client = fixed.take(carry.w, direction, client, lr, ctx)
        if alone is None:
            w = objective.after_step(w, client, received, ctx)
        if not losses:
            raise UserError(
                f"{type(objective).__name__}.local_step: it does not evaluate the local objective, whose loss is "
                "logged; call grad(v) once, without other losses"
            )
        if moving is not None:  # nor do decay and momentum move the others
            w = torch.where(moving, w, carry.w)
        return Carry(w.detach() if w.requires_grad else w, client.only(carry.state), losses[0])

    def finish(self, carry: Carry, fixed: Fixed) -> tuple[Upload, State, Logs]:
        """Calls the hooks after the last step; returns the upload, what the client keeps, and what is logged."""
        objective, client, logs = self.objective, carry.state | {"start": fixed.start}, Logs(self.objective.all_logs)
        if fixed.ctx.draws is not None:
            fixed.ctx.draws.move_to(Draws.END)
        upload, client = objective.finish_local(carry.w, client, fixed.received, replace(fixed.ctx, logs=logs))
        return without_gradients(upload), client.only(objective.client_inits()), logs

    def context(self, job: Job) -> ClientContext:
        """Returns the context that the hooks see: with the client's class counts if the objective uses them."""
        if not self.objective.uses_class_counts:
            return job.ctx
        counts = job.minibatches.source.class_counts(job.client)
        return replace(job.ctx, class_counts=counts.to(job.received.w))

    def draws(self, jobs: Sequence[Job]) -> Draws:
        """Returns the source of the random numbers that the hooks of some clients draw."""
        keys = [(job.seed, job.ctx.stream, job.ctx.phase, job.client) for job in jobs]
        return Draws(keys, jobs[0].received.w.device, self.trains_several)

    def train_mode(self) -> None:
        """Puts a net that is in eval mode into train mode; of another net, submodules may stay in eval mode."""
        if not self.objective.net.training:
            self.objective.net.train()

    def without_autocast(self) -> "Engine":
        """Returns a new engine of the same objective whose forward passes are in the precision of the weights."""
        return type(self)(self.objective, self.net, nullcontext, self.width)

    @contextmanager
    def using(self, settings: Mapping[str, float | Tensor]) -> Iterator[None]:
        """Overrides settings of the objective for a while; values are floats, or ``(clients, 1)``."""
        objective = self.objective
        try:
            if settings:
                self.objective = changed(objective, settings)
            yield
        finally:
            self.objective = objective
