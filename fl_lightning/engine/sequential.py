"""One client after another in one net, also with a check at every step."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.algorithms.parts.base import Gradient
from fl_lightning.core import (
    Autocast,
    DivergenceError,
    FlatNet,
    State,
    is_finite,
    logits,
    seeded,
    unchanged,
    variance_needed,
)
from fl_lightning.engine.base import Engine, Job, LocalResult


class SequentialEngine(Engine):
    """One client after another in one net, whose weights are views of the point where the gradient is evaluated.

    Attributes:
        forwards: Number of forward passes so far.
        backwards: Number of backward passes so far.
    """

    def __init__(self, objective: LocalObjective, net: FlatNet, autocast: Autocast) -> None:
        super().__init__(objective, net, autocast)
        self.forwards = self.backwards = 0

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        for job in jobs:
            with self.using(job.settings), variance_needed(ALONE.format(job.client)):
                result = self._train(job)
            yield result

    def _train(self, job: Job) -> LocalResult:
        objective, ctx, losses = self.objective, self.context(job), []
        buffers = objective.net_buffers
        self.train_mode()
        with seeded(self.net.device, job.seed, "net", ctx.t, ctx.phase, job.client):
            w, client = objective.begin_local(job.state, job.received, ctx)
            if buffers is not None:
                buffers.load(objective.net, client.buffers)
            teachers = objective.teachers(client, job.received)
            constants = objective.loss_constants(client, job.received, ctx)
            memory = objective.optimizer.begin(objective.flat, client)
            for step, batch in enumerate(job.minibatches):
                values: list[Tensor] = []
                grad = self._gradient(batch, teachers, constants, job, step, values)
                lr = objective.step_lr(client, ctx)
                direction, client = objective.local_step(w, grad, client, job.received, ctx)
                w, memory = objective.optimizer.step(w, direction, memory, lr)
                self._check("the weights after it", w, job, step)
                losses.append(values[0])
        after = None
        if buffers is not None:
            client |= {"buffers": (after := buffers.vector(objective.net))}
        client |= objective.optimizer.end(memory)
        upload, client = objective.finish_local(w, client, job.received, ctx)
        client = client.only(objective.client_inits())
        finite = State(upload).finite() & client.finite()
        loss = torch.stack(losses).mean()
        return LocalResult(job.client, job.received, w, upload, client, loss, ctx, finite, after)

    def _gradient(
        self,
        batch: tuple[Tensor, Tensor],
        teachers: tuple[Tensor, ...],
        constants: tuple[Tensor, ...],
        job: Job,
        step: int,
        values: list[Tensor],
    ) -> Gradient:
        """Returns the closure ``grad(v)`` on one minibatch, which appends the objective's loss to ``values``.

        Running statistics change in its first call only. A teacher normalizes by the batch, as the net in training.
        """
        objective, first = self.objective, True
        net, keeps = objective.net, objective.net_buffers is not None
        with objective.observed():
            outputs = [logits(self.net, net, w, batch[0], self.autocast, by_batch=keeps) for w in teachers]
        self.forwards += len(outputs)
        data = (*batch, *outputs, *constants)

        def grad(v: Tensor, losses: Losses | None = None) -> Tensor:
            nonlocal first
            self.net.move_to(v)
            with nullcontext() if first or not keeps else unchanged(net):
                with self.autocast():
                    if losses is None:
                        loss = objective.training_step(data, step)
                    else:
                        with objective.observed():
                            loss = objective.batch_loss(net(data[0]), *data[1:], losses=losses)
                self._check("the loss", loss, job, step)
                g = self.net.gradient(loss)
            self._check("the gradient", g, job, step)
            self.forwards += 1
            self.backwards += 1
            first = False
            if losses is None:
                values.append(loss.detach())
            return g

        return grad

    def _check(self, what: str, value: Tensor, job: Job, step: int) -> None:
        """For `DebugEngine`."""


ALONE = (
    "data.batch_size: client {} has a minibatch of one sample, in which BatchNorm has no variance; choose one that "
    "leaves more for the end of an epoch, or set data.drop_last: true"
)


class DebugEngine(SequentialEngine):
    """The sequential engine with an error at the first value that is not finite, which names client, round and step."""

    def _check(self, what: str, value: Tensor, job: Job, step: int) -> None:
        if not bool(is_finite(value)):
            raise DivergenceError(
                f"round {job.ctx.t + 1}, client {job.client}, local step {step + 1} of {job.ctx.K}: {what} is not "
                f"finite{self._culprit(what, value)}; lower model.optimizer.lr or set model.optimizer.clip"
            )

    def _culprit(self, what: str, value: Tensor) -> str:
        if value.numel() == 1:
            return ""
        parts = self.objective.flat.split(value)
        return f" (first in {next(name for name, v in parts.items() if not bool(torch.isfinite(v).all()))})"
