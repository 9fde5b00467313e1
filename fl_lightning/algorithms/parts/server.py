"""The server's steps along a pseudo-gradient, averages of the global model, relaxed starts, and averages of products.

The pseudo-gradient ``delta``, ``(d,)``, points uphill: the model that was sent minus the average of the local models.
Evaluation and flatness use the average; clients never see it.
"""

import math
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.algorithms.parts.local_optimizer import in_cycle
from fl_lightning.core import (
    ClientContext,
    FlatSpec,
    Fraction,
    Init,
    NonNegative,
    Positive,
    PositiveInt,
    RoundContext,
    State,
    Upload,
    Uploads,
    ensure,
    require,
)


class ServerUpdate(Part, key="model.server_update"):
    """Plain averaging: ``w - lr * delta``; with lr 1 the average of the local models (FedAvg).

    Args:
        lr: Server learning rate eta_g.
    """

    def __init__(self, lr: Positive = 1.0) -> None:
        self.lr = lr

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        """Returns the server's state after the step."""
        return server.replace(w=server.w - self.lr * delta)


class ServerMomentum(ServerUpdate):
    """``v = beta v + delta; w - lr v`` (FedAvgM; Hsu et al., 2019).

    Args:
        beta: Momentum.
        lr: Server learning rate.
    """

    server_state: Mapping[str, Init] = {"server_v": "zeros"}

    def __init__(self, beta: Fraction = 0.9, lr: Positive = 1.0) -> None:
        super().__init__(lr)
        self.beta = beta

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        v = self.beta * server.server_v + delta
        return server.replace(w=server.w - self.lr * v, server_v=v)


class ServerAdam(ServerUpdate):
    """``w - lr m / (sqrt(v) + tau)`` (FedAdam; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment m.
        beta2: Decay of the second moment v.
        tau: Added to the root.
        v0: Initial value of v: 0 (as run by FL-Simulator and by Google) or tau^2 (as in the paper's box).
        bias_correction: Correct both moments, as Google's experiments did.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 0.01,
        v0: Literal["0", "tau2"] = "0",
        bias_correction: bool = False,
    ) -> None:
        super().__init__(lr)
        self.beta1, self.beta2, self.tau, self.v0, self.bias_correction = beta1, beta2, tau, v0, bias_correction
        first = partial(torch.full_like, fill_value=0.0 if v0 == "0" else tau**2)
        self.server_state = {"server_m": "zeros", "server_v": first, **({"server_n": 0.0} if bias_correction else {})}

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Returns the next v; FedYogi and FedAdagrad have their own."""
        return self.beta2 * v + (1 - self.beta2) * delta * delta

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        m = self.beta1 * server.server_m + (1 - self.beta1) * delta
        v = self.second_moment(server.server_v, delta)
        lr = self.lr
        if self.bias_correction:
            n = int(server.server_n) + 1  # updates, not rounds: in some of them nobody may have answered
            lr = lr * (1 - self.beta2**n) ** 0.5 / (1 - self.beta1**n)
            server = server.replace(server_n=server.server_n + 1)
        return server.replace(w=server.w - lr * m / (v.sqrt() + self.tau), server_m=m, server_v=v)


class ServerYogi(ServerAdam):
    """ServerAdam with ``v - (1 - beta2) delta^2 sign(v - delta^2)`` (FedYogi; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: As for `ServerAdam`.
        beta1: As for `ServerAdam`.
        beta2: As for `ServerAdam`.
        tau: As for `ServerAdam`.
        v0: As for `ServerAdam`.
        bias_correction: As for `ServerAdam`.
    """

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        square = delta * delta
        return v - (1 - self.beta2) * square * torch.sign(v - square)


class ServerAdagrad(ServerAdam):
    """ServerAdam with ``v + delta^2`` (FedAdagrad; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: As for `ServerAdam`.
        beta1: As for `ServerAdam`; their runs have none.
        tau: As for `ServerAdam`.
        v0: As for `ServerAdam`.
    """

    def __init__(
        self, lr: Positive = 0.1, beta1: Fraction = 0.0, tau: Positive = 0.01, v0: Literal["0", "tau2"] = "0"
    ) -> None:
        super().__init__(lr, beta1, 0.0, tau, v0)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta * delta


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
        valid = start < 1 or start == int(start)
        require(valid, "model.averaging.start", start, "give a fraction below 1, or a round from 0")
        self.start, self.cycle, self.lr_min = start, cycle, lr_min
        self.init_in_average, self.collect = init_in_average, collect

    def start_round(self, rounds: int) -> int:
        """Returns the first round with averaging, t0."""
        return int(round(self.start * rounds, 9)) if self.start < 1 else int(self.start)  # 0.29 * 100 is below 29

    def local_lr(self, lr: float, ctx: RoundContext) -> float:
        """Falls in cycles from the start on: ``(1 - s) lr + s lr_min`` with ``s = ((t mod c) + 1) / c``."""
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


class FlexLoRA(Part):
    """FlexLoRA (Bai et al., NeurIPS 2024): the server averages the products ``B A`` of the clients' LoRA factors.

    It splits each mean again, ``B = U S^(1/2)`` and ``A = S^(1/2) V^T``, by the largest singular values, as many as the
    rank of the adapter: the best approximation of that rank. Here all clients have one rank. A client sends its
    factors, from which the server has the product: this is what the bits count.

    Raises:
        UserError: If the net has no adapters of linear layers, or the algorithm's server does more than average.
    """

    up = ("products",)

    def bind(self, flat: FlatSpec) -> Part:
        """Returns a part that knows the factors."""
        bound, shapes = copy(self), dict(zip(flat.names, flat.shapes, strict=True))
        bound.flat, bound.pairs = flat, [(n, n.replace("lora_A", "lora_B")) for n in flat.names if "lora_A" in n]
        linear = all(b in shapes and len(shapes[a]) == len(shapes[b]) == 2 for a, b in bound.pairs)
        ensure(
            bool(bound.pairs) and linear, "model.parts: FlexLoRA needs a LoRA net that trains A and B of linear layers"
        )
        return bound

    flat: FlatSpec
    pairs: list[tuple[str, str]]

    def attach(self, objective: Any) -> None:
        alone = objective.only_averages and len(objective.parts) == 1 and not objective.relaxed_init
        needs = (
            "the server averages models, and nothing else; take FedAvg or FedSAM, without server_update, relaxed_init "
            "and other parts"
        )
        ensure(alone, f"model.parts: FlexLoRA: {needs}")

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        parts = self.flat.split(w)
        return {**upload, "products": torch.cat([(parts[b] @ parts[a]).flatten(-2) for a, b in self.pairs], -1)}, client

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        return {name: count for name, count in bits.items() if name != "products"}

    def phase_end(self, server: State, uploads: Uploads) -> State:
        factors, offset, products = dict(self.flat.split(server.w)), 0, uploads.weighted("products")
        for a, b in self.pairs:
            rank, (rows, columns) = len(factors[a]), (len(factors[b]), factors[a].shape[1])
            U, S, V = torch.linalg.svd(
                products[offset : offset + rows * columns].view(rows, columns), full_matrices=False
            )
            U, V, root = U[:, :rank], V[:rank], S[:rank].sqrt()
            sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()  # of two equal decompositions, always one
            padding = rank - len(root)  # a rank above the shorter side has no more singular values
            factors[a], factors[b] = pad((sign * root).T * V, (0, 0, 0, padding)), pad(U * (sign * root), (0, padding))
            offset += rows * columns
        return server.replace(w=torch.cat([value.reshape(-1) for value in factors.values()]))
