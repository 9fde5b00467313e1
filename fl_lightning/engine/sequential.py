"""One client after another in one net, also with a check at every step."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fl_lightning.algorithms.module import Losses
from fl_lightning.core import DivergenceError, State, forward_at, is_finite, seeded, unchanged, variance_needed
from fl_lightning.engine.base import Engine, Evaluation, Fixed, Job, LocalResult


class SequentialEngine(Engine):
    """One client after another in one net, whose weights are views of the point where the gradient is evaluated."""

    name = "sequential"

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        waiting = deque(jobs)
        del jobs  # the state from which a client has trained is free for the next one
        while waiting:
            job = waiting.popleft()
            with self.using(job.settings), variance_needed(_alone(job)):
                result = self._train(job)
            yield result

    def _train(self, job: Job) -> LocalResult:
        objective, losses, buffers = self.objective, list[Tensor](), None
        ctx = replace(self.context(job), draws=self.draws([job]))
        self.train_mode()
        with seeded(self.net.device, job.seed, "net", ctx.stream, ctx.phase, job.client):
            carry, fixed = self.begin(job.state, job.received, ctx, job.received.w)
            if objective.net_buffers is not None:
                objective.net_buffers.load(objective.net, carry.state.buffers)
            for number, batch in enumerate(job.minibatches):
                carry = self.step(carry, fixed, self._evaluation(batch, fixed, job, number))
                self._check("the weights after it", carry.w, job, number)
                losses.append(carry.loss)
            if objective.net_buffers is not None and objective.alone(ctx) is None:
                buffers = objective.net_buffers.vector(objective.net)
                carry = replace(carry, state=carry.state | {"buffers": buffers})
            upload, client, logs = self.finish(carry, fixed)
        finite = State(upload).finite() & client.finite()
        loss = torch.stack(losses).mean()
        return LocalResult(job.client, job.received, carry.w, upload, client, loss, job.ctx, finite, buffers, logs)

    def _evaluation(self, batch: tuple[Tensor, Tensor], fixed: Fixed, job: Job, number: int) -> Evaluation:
        """Returns the function of a point that evaluates gradient and loss on one minibatch.

        Running statistics change in its first call only. Teachers normalize by the batch, as the net does in training.
        """
        objective, first = self.objective, True
        net, keeps = objective.net, objective.net_buffers is not None
        with objective.observed():
            outputs = [forward_at(self.net, net, w, batch[0], self.autocast, by_batch=keeps) for w in fixed.teachers]
        data = (*batch, *outputs, *fixed.constants)

        def evaluate(v: Tensor, losses: Losses | None) -> tuple[Tensor, Tensor]:
            nonlocal first
            self.net.move_to(v)
            with nullcontext() if first or not keeps else unchanged(net):
                with self.autocast():
                    if losses is None:
                        loss = objective.training_step(data, number)
                    else:
                        loss = objective.minibatch_loss(partial(net, data[0]), *data[1:], losses=losses)
                self._check("the loss", loss, job, number)
                g = self.net.gradient(loss)
            self._check("the gradient", g, job, number)
            first = False
            return g, loss

        return evaluate

    def _check(self, quantity: str, value: Tensor, job: Job, step: int) -> None:
        """Does nothing; `DebugEngine` checks a value here."""


def _alone(job: Job) -> str:
    """Returns the message for a minibatch in which BatchNorm has no variance."""
    remedy = "choose one that leaves more for the end of an epoch, or set data.drop_last: true"
    if max(job.minibatches.sizes) == 1:
        remedy = "choose a larger one; for a client of one sample GroupNorm, or leave the client out"
    return (
        f"data.batch_size: client {job.client} has a minibatch of one sample, in which BatchNorm has no variance; "
        f"{remedy}"
    )


class DebugEngine(SequentialEngine):
    """The sequential engine, which stops at the first value that is not finite, and names round, client and step."""

    name = "debug"

    def _check(self, quantity: str, value: Tensor, job: Job, step: int) -> None:
        if not bool(is_finite(value)):
            where = "" if value.numel() == 1 else f" (first in {self.objective.flat.not_finite(value)})"
            raise DivergenceError(
                f"round {job.ctx.t + 1}, client {job.client}, local step {step + 1} of {job.ctx.K}: {quantity} is not "
                f"finite{where}; lower model.optimizer.lr or set model.optimizer.clip"
            )
