"""FedDyn, in ADMM form; base class of the methods with its duals. A-FedPD, which moves those of absent clients, too."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import Direction, Gradient, Step, admm_dual, admm_pull
from fl_lightning.core import (
    ClientContext,
    Positive,
    RoundContext,
    State,
    Upload,
    Uploads,
    Weighting,
    ensure,
    to_radius,
)


class FedDyn(LocalObjective):
    """Dynamic regularization: every client's dual ``lam_i`` tracks its gradient at the fixed point.

    The server's ``lam`` is the mean of all M duals; those of clients never seen are zero, or
    the server's ``lam_unseen`` with ``absent: virtual``.

    Args:
        net: The network.
        beta: Inverse of FedDyn's alpha.
        prox: The proximal term: squared (the paper); unsquared (FL-SAM's code); fl_simulator: squared, without clipping
            of its part in w (FL-Simulator and Acar's own code).
        use_dual: Whether there are duals and a proximal term. Without them FedDyn is FedAvg; subclasses keep their own
            additions.
        absent: Duals of absent clients: kept, or moved like the cohort's mean (virtual, A-FedPD).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Acar et al., ICLR 2021"
    client_state = {"lam": "zeros"}
    server_state = {"lam": "zeros"}
    references = {"w": "w", "start_w": "w"}
    default_weighting: Weighting = "uniform"
    adds_updates = False

    def __init__(
        self,
        net: nn.Module,
        beta: Positive = 10.0,
        prox: Literal["squared", "unsquared", "fl_simulator"] = "squared",
        use_dual: bool = True,
        absent: Literal["kept", "virtual"] = "kept",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.beta, self.prox, self.use_dual, self.absent = beta, prox, use_dual, absent
        self.virtual = absent == "virtual"
        ensure(use_dual or not self.virtual, "model.absent = virtual: without duals (use_dual: false) use kept")
        if self.virtual:
            self.client_state = {**self.client_state, "lam_seen": "zeros"}
            self.server_state = {**self.server_state, "lam_unseen": "zeros"}
            self.down = (*self.down, "lam_unseen")
        if not use_dual:
            self.client_state, self.server_state = (
                {name: init for name, init in state.items() if name != "lam"}
                for state in (self.client_state, self.server_state)
            )
            self.adds_updates = True
        elif self.relaxed_init and "start_w" not in self.up:
            self.up = (*self.up, "start_w")

    def corrected(self, g: Tensor, w: Tensor, client: State) -> Direction:
        """Returns ``g - lam_i + (w - w^t) / beta``, or a variant of it."""
        if not self.use_dual:
            return g
        if self.prox == "fl_simulator":
            return g - client.lam - client.start / self.beta, w / self.beta
        if self.prox == "unsquared":
            return g - client.lam + to_radius(w - client.start, 0.5 / self.beta)
        return g + admm_pull(client.lam, w, client.start, self.beta)

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``lam_i <- lam_i - sum (mean w_j - w^t) / beta`` over the rounds since the client last took part."""
        if self.virtual:
            client = client.replace(lam=client.lam + (received.lam_unseen - client.lam_seen))
        return super().local_start(client, received, ctx)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Descend along the corrected gradient."""
        return self.corrected(self.local_gradient(w, grad, client, received, ctx), w, client), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """``lam_i <- lam_i - (w_i - w^t) / beta``."""
        if not self.use_dual:
            return super().local_end(w, client, received, ctx)
        start = {"start_w": client.start} if "start_w" in self.up else {}
        return {"w": w, **start}, client.replace(lam=admm_dual(client.lam, w, client.start, self.beta))

    def client_round_end(self, client: State, server: State) -> State:
        """Keeps the sum of the moves so far."""
        return client.replace(lam_seen=server.lam_unseen) if self.virtual else client

    def server_dual(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> Tensor:
        """``lam <- lam - sum_S (w_i - w^t) / (beta M)``; of all M clients with virtual."""
        start, beta = self.mean_start(sent, uploads), self.beta
        if not self.virtual:
            beta = beta * ctx.m / uploads.n
        elif start is not sent.w:  # those who are absent move from w^t
            start = sent.w + uploads.n / ctx.m * (start - sent.w)
        return admm_dual(server.lam, uploads.mean("w"), start, beta)

    def move_unseen(self, server: State, sent: State, uploads: Uploads) -> State:
        """``lam_unseen <- lam_unseen - (mean w_i - w^t) / beta``, the move of the duals of all who are absent."""
        if not self.virtual:
            return server
        end = uploads.mean("end_w" if "end_w" in self.up else "w")
        return server.replace(lam_unseen=admm_dual(server.lam_unseen, end, sent.w, self.beta))

    def mean_start(self, sent: State, uploads: Uploads) -> Tensor:
        """Returns the cohort's mean of the weights where local training started, ``(d,)``."""
        return uploads.mean("start_w") if "start_w" in self.up else sent.w

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """The dual first; then ``w <- mean w_i - beta lam``."""
        if not self.use_dual:
            return super().server_step(server, sent, uploads, ctx)
        lam, server = self.server_dual(server, sent, uploads, ctx), self.move_unseen(server, sent, uploads)
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(w=server.w - self.beta * lam, lam=lam)


class AFedPD(FedDyn):
    """FedDyn in which the dual of an absent client moves like the cohort's mean.

    Args:
        net: The network.
        absent: As for `FedDyn`; kept is FedDyn.
        **kwargs: As for `FedDyn`.
    """

    paper = "Sun et al., NeurIPS 2024"

    def __init__(self, net: nn.Module, absent: Literal["kept", "virtual"] = "virtual", **kwargs: Any) -> None:
        super().__init__(net, absent=absent, **kwargs)
