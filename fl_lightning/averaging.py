"""Averages of the global model over rounds; clients never see them, evaluation and flatness do."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.state import RoundContext, Rule, Slots


class SWA:
    """Server-side stochastic weight averaging with a cyclic learning rate (FedASAM + SWA, ECCV 2022, Algorithm 1).

    The first collected model replaces the copy taken at the start, as in the official code.

    Args:
        start: First round with averaging: a fraction of all rounds (below 1), or a round counted from 0.
        cycle: Rounds per collected model, c. Above 1 the clients' learning rate falls within each cycle.
        lr_min: Learning rate at the end of a cycle, gamma_2; gamma_1 is the local optimizer's.

    Raises:
        UserError: If ``start`` is negative or ``cycle`` is below 1.
    """

    slots: ClassVar[dict[str, Rule]] = {"swa_w": "zeros", "swa_n": -1.0}

    def __init__(self, start: float = 0.75, cycle: int = 1, lr_min: float = 1e-4) -> None:
        if start < 0:
            raise UserError(f"model.averaging.start = {start}: give a fraction below 1, or a round from 0")
        if cycle < 1:
            raise UserError(f"model.averaging.cycle = {cycle}: at least 1 round")
        self.start, self.cycle, self.lr_min = start, cycle, lr_min

    def start_round(self, rounds: int) -> int:
        """The first round with averaging, t0."""
        return int(self.start * rounds) if self.start < 1 else int(self.start)

    def lr(self, base: float, ctx: RoundContext) -> float:
        """The clients' learning rate in this round: ``(1 - s) base + s lr_min`` with ``s = ((t mod c) + 1) / c``."""
        if self.cycle == 1 or ctx.t < self.start_round(ctx.rounds):
            return base
        s = (ctx.t % self.cycle + 1) / self.cycle
        return (1 - s) * base + s * self.lr_min

    def update(self, server: Slots, before: Tensor, ctx: RoundContext) -> Slots:
        """Called after the round's aggregation; ``before`` is the global model at its start, ``(d,)``."""
        past = ctx.t - self.start_round(ctx.rounds)
        if past == 0:
            return server.replace(swa_w=before.clone(), swa_n=server.swa_n * 0)
        if past > 0 and past % self.cycle == 0:
            n = server.swa_n
            return server.replace(swa_w=(n * server.swa_w + server.w) / (n + 1), swa_n=n + 1)
        return server

    def model(self, server: Slots) -> Tensor:
        """The weights to evaluate, ``(d,)``: the average once it has begun, before that the global model."""
        return server.swa_w if float(server.swa_n) >= 0 else server.w
