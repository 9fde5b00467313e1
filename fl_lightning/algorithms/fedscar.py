"""FedScar: clients that start beyond the global model, seen from where they ended last, and duals of these pushes."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.hooks import Sum
from fl_lightning.algorithms.parts import LESAM, SAM, Gradient, Step
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    Positive,
    RoundContext,
    State,
    UnitInterval,
    Upload,
    Uploads,
    Weighting,
    norm,
)


def unit(v: Tensor) -> Tensor:
    """Scales ``v`` of shape ``(..., d)`` to length 1, however short it is; a zero vector stays zero."""
    length = norm(v)
    return v / torch.where(length > 0, length, 1)


class FedScar(LocalObjective):
    """Client i starts from ``w^t + b_i``; its bias b_i is a decayed sum of unit vectors from its last model to w^t.

    Its dual h_i is the sum of its own moves. The server keeps each client's last model and bias, and so needs no upload
    for the mean bias of all M clients that it sends. A round costs O(m d): the bias of a client that is absent decays
    when it is drawn again.

    Args:
        net: The network.
        alpha: Length of a push, in units of the weights; with ``strength: variance`` a factor of such a length.
        gamma: Decay of the biases in a round.
        beta: Factor of duals and biases, and twice the length of the force.
        rho: Radius of the clients' ascent; 0: none.
        tau: Factor of the mean bias minus the client's own, which enters the gradient.
        strength: Length of a push: alpha; or alpha times the mean distance of the clients' last moves from the last
            global update, summed up when the client last took part (one pass over all clients seen, in each round).
        ascent_to: Where: along the gradient (SAM), or against the last global update (FedScarle: one pass a step).
        force: Where the force of constant length beta/2 points: to the client's last model (FedScar), to where it has
            started (FedScar2, with alpha 0), or away from there (FedScars, with tau 0).
        **kwargs: As for `LocalObjective`.
    """

    paper = "FedScar, ICML 2026"
    client_state = {"h": "zeros", "b": "zeros", "z": "w", "last": 0.0}
    scratch_state = {"push": "zeros"}
    server_state = {"h_sum": "zeros", "b_sum": "zeros", "b_mean": "zeros", "last": 0.0}
    down, up = ("w", "b_mean"), ("w", "start_w", "push")
    recalled = ("start_w", "push")
    references = {"start_w": "w"}  # none of a push, whose length the server's sums must keep
    adds_updates = False

    def __init__(
        self,
        net: nn.Module,
        alpha: NonNegative = 0.1,
        gamma: UnitInterval = 0.9,
        beta: NonNegative = 0.06,
        rho: NonNegative = 0.1,
        tau: NonNegative = 1.0,
        strength: Literal["fixed", "variance"] = "fixed",
        ascent_to: Literal["gradient", "global_update"] = "gradient",
        force: Literal["last", "start", "from_start"] = "last",
        **kwargs: Any,
    ) -> None:
        ascent = SAM(rho, eps=1e-7) if ascent_to == "gradient" else LESAM(rho, "previous_round", eps=1e-7)
        super().__init__(net, ascent=ascent if rho else None, **kwargs)
        self.alpha, self.gamma, self.beta, self.tau = alpha, gamma, beta, tau
        self.strength, self.force = strength, force
        self.surveys = strength == "variance"
        if self.surveys:
            self.client_state = {**self.client_state, "move": "zeros", "a": 0.0}
            self.server_state = {**self.server_state, "update": "zeros", "a": 0.0}

    def pushed(self, client: State, w: Tensor) -> Tensor:
        """``alpha unit(w^t - z_i)``; zero at first contact, where z_i is w^t, and where it is w^t up to rounding."""
        length, way = client.a if self.surveys else self.alpha, self.way(client, w)
        return length * unit(way * (norm(way) > 8 * torch.finfo(w.dtype).eps * norm(w)))

    def way(self, client: State, w: Tensor) -> Tensor:
        """Returns the vector from the client's last model to the global one."""
        return w - client.z

    def decayed(self, b: Tensor, last: Tensor, ctx: RoundContext) -> Tensor:
        """Returns biases as of round ``last``, decayed until now."""
        return self.gamma ** (ctx.t - last) * b

    def round_start(self, server: State, total: Sum, ctx: RoundContext) -> State:
        """``bbar = (gamma sum b_j + sum_S of the pushes) / M``."""
        pushes = total(lambda client: self.pushed(client, server.w))
        return server.replace(b_mean=(self.decayed(server.b_sum, server.last, ctx) + pushes) / ctx.m)

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``b_i <- gamma^(t - s_i) b_i`` and the push; start from ``w^t + b_i``."""
        push = self.pushed(client, received.w)
        b = self.decayed(client.b, client.last, ctx) + push
        return received.w + b, client.replace(b=b, push=push, last=client.last * 0 + ctx.t)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``u + beta/2 unit(v - p_i) + beta (h_i + b_i) + tau (bbar - b_i)``."""
        u = self.local_gradient(w, grad, client, received, ctx)
        pull = {"last": w - client.z, "start": w - client.start, "from_start": client.start - w}[self.force]
        constant = self.beta * (client.h + client.b) + self.tau * (received.b_mean - client.b)
        return u + self.beta / 2 * unit(pull) + constant, client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """``h_i <- h_i + (v_K - v_0)``, ``z_i <- v_K``."""
        move = w - client.start
        kept = client.replace(h=client.h + move, z=w, **({"move": move} if "move" in client else {}))
        return {"w": w, "start_w": client.start, "push": client.push}, kept

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``w <- wbar + beta / M sum (h_j - b_j)`` over all clients; pushes of those who did not answer are undone."""
        h_sum = server.h_sum + uploads.n * (uploads.mean("w") - uploads.mean("start_w"))
        b_sum = self.decayed(server.b_sum, server.last, ctx) + uploads.n * uploads.mean("push")
        update = {"update": uploads.weighted("w") - sent.w} if self.surveys else {}
        server = super().server_step(server, sent, uploads, ctx)
        w = server.w + self.shift(h_sum / ctx.m, b_sum / ctx.m)
        return server.replace(w=w, h_sum=h_sum, b_sum=b_sum, last=server.last * 0 + ctx.t, **update)

    def shift(self, h: Tensor, b: Tensor) -> Tensor:
        """Returns what the server adds to the mean of the models, given the mean dual and the mean bias."""
        return self.beta * (h - b)

    def survey(self, server: State, total: Sum, ctx: RoundContext) -> State:
        """``a = alpha / M sum ||m_j - (wbar - w^t)||`` over all clients ever seen, m_j the last move of each."""
        return server.replace(a=self.alpha / ctx.m * total(lambda client: norm(client.move - server.update)))

    def client_round_end(self, client: State, server: State) -> State:
        """Only the cohort gets the new strength; it is used at the next contact."""
        return client.replace(a=server.a) if self.surveys else client


class FedScarl(FedScar):
    """FedScar without duals and force: biases alone, along the way that a client's own last move does not explain.

    Args:
        net: The network.
        alpha: As for `FedScar`.
        tau: As for `FedScar`.
        strength: As for `FedScar`.
        **kwargs: As for `FedScar`.
    """

    def __init__(
        self,
        net: nn.Module,
        alpha: NonNegative = 1.0,
        tau: NonNegative = 0.1,
        strength: Literal["fixed", "variance"] = "variance",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, alpha=alpha, beta=0.0, tau=tau, strength=strength, **kwargs)
        self.client_state = {**self.client_state, "move": "zeros"}

    def way(self, client: State, w: Tensor) -> Tensor:
        """``w^t - z_i - m_i``, with m_i its last own move; at first contact zero."""
        return w - client.z - client.move

    def shift(self, h: Tensor, b: Tensor) -> Tensor:
        """``w <- wbar - bbar``."""
        return -b


class FedScar4(FedDyn):
    """FedDyn with a force of constant length alpha/2 in place of the quadratic term, and FedInit's start.

    Args:
        net: The network.
        alpha: Factor of the duals, and twice the length of the force; 1/beta of `FedDyn`.
        beta: A client starts from ``w^t + beta (w^t - z_i)``, z_i its last model; at first contact from ``w^t``.
        **kwargs: As for `FedDyn`.
    """

    paper = FedScar.paper
    client_state = {**FedDyn.client_state, "z": "w"}
    up: tuple[str, ...] = ("w", "start_w")
    default_weighting: Weighting = "samples"

    def __init__(self, net: nn.Module, alpha: Positive = 0.01, beta: NonNegative = 0.1, **kwargs: Any) -> None:
        super().__init__(net, 1 / alpha, "unsquared", **kwargs)
        self.beyond = beta
        self.up = self.up if self.use_dual else ("w",)

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``w^t + beta (w^t - z_i)``."""
        w, client = super().local_start(client, received, ctx)
        return w + self.beyond * (w - client.z), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """FedDyn's, and ``z_i <- v_K``."""
        upload, client = super().local_end(w, client, received, ctx)
        return upload, client.replace(z=w)
