"""Averages of the global model, which evaluation and flatness use and clients never see; relaxed starts of clients."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.algorithms.parts.local_optimizer import in_cycle
from fl_lightning.core import (
    ClientContext,
    Fraction,
    Init,
    NonNegative,
    PositiveInt,
    RoundContext,
    State,
    Upload,
    require,
)


class Averaging(Part, key="model.averaging"):
    """Base class of the averages; by default the global model itself."""

    def model(self, server: State) -> Tensor:
        """Returns the weights to evaluate, ``(d,)``."""
        return server.w


class EMA(Averaging):
    """Exponential moving average ``alpha ema + (1 - alpha) w`` of the global model, from the initial one on.

    Args:
        alpha: Decay per round.
    """

    server_state: Mapping[str, Init] = {"ema_w": "w0"}

    def __init__(self, alpha: Fraction = 0.95) -> None:
        self.alpha = alpha

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        return server.replace(ema_w=self.alpha * server.ema_w + (1 - self.alpha) * server.w)

    def model(self, server: State) -> Tensor:
        return server.ema_w


class LastTwo(Averaging):
    """Mean of the last two global models, ``(w^t + w^(t-1)) / 2`` (FedExP); after one round, the only trained model."""

    server_state: Mapping[str, Init] = {"w_before": "w0", "trained": 0.0}

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        return server.replace(
            w_before=torch.where(before.trained > 0, before.w, server.w), trained=server.trained * 0 + 1
        )

    def model(self, server: State) -> Tensor:
        return (server.w + server.w_before) / 2


class SWA(Averaging):
    """Server-side stochastic weight averaging with a cyclic learning rate (FedASAM + SWA, ECCV 2022, Algorithm 1).

    Args:
        start: First round with averaging: a fraction of all rounds (below 1), or a round counted from 0.
        cycle: Rounds per collected model, c. Above 1 the clients' learning rate falls within each cycle.
        lr_min: Learning rate at the end of a cycle, gamma_2; gamma_1 is the local optimizer's.
        init_in_average: Whether the model at the start of the average counts in it (the paper), or the first collected
            model replaces it (the official code).
        collect: Whether models are collected after the first round of a cycle (the official code) or after its last.

    Raises:
        UserError: If ``start`` is negative or ``cycle`` is below 1.
    """

    server_state: Mapping[str, Init] = {"swa_w": "zeros", "swa_n": -1.0}

    def __init__(
        self,
        start: NonNegative = 0.75,
        cycle: PositiveInt = 1,
        lr_min: NonNegative = 1e-4,
        init_in_average: bool = False,
        collect: Literal["code", "cycle_end"] = "code",
    ) -> None:
        whole = start < 1 or start == int(start)
        require(whole, "model.averaging.start", start, "give a fraction below 1, or a round from 0")
        self.start, self.cycle, self.lr_min = start, cycle, lr_min
        self.init_in_average, self.collect = init_in_average, collect

    def start_round(self, rounds: int) -> int:
        """Returns the first round with averaging, t0."""
        return int(round(self.start * rounds, 9)) if self.start < 1 else int(self.start)  # 0.29 * 100 is below 29

    def local_lr(self, lr: float, ctx: RoundContext) -> float:
        """Cyclic from the start on: ``(1 - s) lr + s lr_min`` with ``s = ((t mod c) + 1) / c``."""
        if self.cycle == 1 or ctx.t < self.start_round(ctx.rounds):
            return lr
        return in_cycle(ctx.t, self.cycle, lr, self.lr_min)

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        past = ctx.t - self.start_round(ctx.rounds)
        if past < 0:  # again, if a run goes on with more rounds: a fraction of them then ends later
            return server.replace(swa_n=server.swa_n * 0 - 1)
        begins = server.swa_n < (math.inf if past == 0 else 0)  # nobody may have answered in its first round
        first = 1.0 if self.init_in_average else 0.0
        server = server.replace(
            swa_w=torch.where(begins, before.w, server.swa_w), swa_n=torch.where(begins, first, server.swa_n)
        )
        at_end = ctx.t % self.cycle == self.cycle - 1
        due = at_end if self.collect == "cycle_end" else past > 0 and past % self.cycle == 0
        if due:
            n = server.swa_n
            server = server.replace(swa_w=(n * server.swa_w + server.w) / (n + 1), swa_n=n + 1)
        return server

    def model(self, server: State) -> Tensor:
        """Returns the weights to evaluate, ``(d,)``: the average once it has begun, before that the global model."""
        return server.swa_w if float(server.swa_n) >= 0 else server.w


class RelaxedInit(Part, key="model.relaxed_init"):
    """``w_0 = w^t + b (w^t - its last local model)``.

    Args:
        b: The factor b.
        adds_updates: Whether the server adds the clients' updates to ``w^t``: a client then uploads ``w^t + w_i - w_0``
            in place of ``w_i``.
    """

    client_state: Mapping[str, Init] = {"w_last": "w0"}

    def __init__(self, b: float, adds_updates: bool) -> None:
        self.b, self.adds_updates = b, adds_updates

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        return w + self.b * (w - client.w_last), client

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        if self.adds_updates and "w" in upload:
            upload = {**upload, "w": upload["w"] - client.start + received.w}
        return upload, client.replace(w_last=w)
