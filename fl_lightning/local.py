"""The local loop of a client, and its engines: the only place where gradients are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.flat import FlatNet
from fl_lightning.objective import LocalObjective
from fl_lightning.rng import seeded
from fl_lightning.state import ClientContext, Slots

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LocalResult:
    """What one client's local training gave.

    Attributes:
        client: Its id.
        w: Local weights after the last step, ``(d,)``.
        upload: What it sends, by name.
        slots: Its state after the round.
        loss: Mean over the steps of the local objective where a step first asks for a gradient, a scalar tensor: at the
            unperturbed weights, but for LESAM and S~AM at the ascent point.
        ctx: The context it trained in.
    """

    client: int
    w: Tensor
    upload: dict[str, Tensor]
    slots: Slots
    loss: Tensor
    ctx: ClientContext

    def parts(self, keep: Iterable[str]) -> dict[str, Tensor]:
        """All its numbers as named vectors, of the slots those in ``keep``: what processes exchange."""
        return {
            "loss": self.loss.reshape(1),
            "w": self.w,
            **{f"upload.{name}": self.upload[name] for name in sorted(self.upload)},
            **{f"slot.{name}": self.slots[name] for name in keep},
        }

    @classmethod
    def of_parts(cls, client: int, parts: Mapping[str, Tensor], ctx: ClientContext) -> LocalResult:
        """The inverse of `parts`."""
        upload, slots = (
            {name.removeprefix(prefix): v for name, v in parts.items() if name.startswith(prefix)}
            for prefix in ("upload.", "slot.")
        )
        slots = {
            name: v.clone() for name, v in slots.items()
        }  # kept over rounds; a view would keep all that it came with
        return cls(client, parts["w"], upload, Slots(slots), parts["loss"][0], ctx)


class SequentialEngine:
    """One client after another in one net, whose weights and gradients are views of flat buffers.

    Args:
        objective: The local objective, on its device and in its precision.
        autocast: Context for forward passes (``fabric.autocast``).

    Attributes:
        net: The flat view of the objective's net; hold it for nothing but reading after a round: it is scratch.
        forwards: Forward passes made so far.
        backwards: Backward passes made so far.
    """

    def __init__(self, objective: LocalObjective, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self.objective, self.autocast = objective, autocast
        self.net = FlatNet(objective.net)
        self.forwards = self.backwards = 0

    def train(
        self, client: int, state: Slots, sent: Slots, batches: Iterable[Batch], ctx: ClientContext, seed: int
    ) -> LocalResult:
        """Local training of one client.

        Args:
            client: Its id.
            state: Its slots.
            sent: What it received.
            batches: Its minibatches, one a step.
            ctx: Where the round stands.
            seed: For what the net draws itself, such as dropout.
        """
        objective, losses = self.objective, []
        objective.train()
        with seeded(self.net.w.device, seed, "net", ctx.t, ctx.exchange, client):
            w, slots = objective.local_start(state, sent, ctx)
            teacher, start = objective.teacher(slots, sent), sent.replace(w=w)
            buffer = None
            for step, batch in enumerate(batches):
                values: list[Tensor] = []
                grad = self._gradient(batch, teacher, step, values)
                direction, slots = objective.local_step(w, grad, slots, start, ctx)
                w, buffer = objective.optimizer.step(w, direction, buffer, ctx.lr)
                losses.append(values[0])
        upload, slots = objective.finish_local(w, slots, sent, start, ctx)
        return LocalResult(client, w, upload, slots, torch.stack(losses).mean(), ctx)

    def _gradient(
        self, batch: Batch, teacher: Tensor | None, step: int, values: list[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """The closure ``grad(v)`` on one minibatch; the loss of each call is appended to ``values``."""
        data: tuple[Tensor, ...] = batch
        if teacher is not None:
            data = (*batch, self.logits(teacher, batch[0]))

        def grad(v: Tensor) -> Tensor:
            self.net.w.copy_(v)
            self.net.g.zero_()
            with self.autocast():
                loss = self.objective.training_step(data, step)
            loss.backward()  # type: ignore[no-untyped-call]
            self.forwards += 1
            self.backwards += 1
            values.append(loss.detach())
            return self.net.g.clone()

        return grad

    @torch.no_grad()
    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """The net's output at weights ``w`` in eval mode; the mode is restored."""
        training = self.objective.net.training
        self.net.w.copy_(w)
        self.objective.net.eval()
        with self.autocast():
            out: Tensor = self.objective.net(x)
        self.objective.net.train(training)
        self.forwards += 1
        return out
