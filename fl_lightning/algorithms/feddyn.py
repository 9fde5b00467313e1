"""FedDyn, in ADMM form, and methods with its duals: A-FedPD, FedSpeed, A-FedPDSAM, FedSMOO and FedTOGA."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import Direction, Gradient, Step, admm_dual, admm_pull, warm_up
from fl_lightning.core import (
    EPS,
    ClientContext,
    NonNegative,
    NonNegativeInt,
    Positive,
    RoundContext,
    State,
    UnitInterval,
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
        """Mean over the cohort of the weights where local training started, ``(d,)``."""
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


class FedSpeed(FedDyn):
    """FedDyn with a mix of the gradients at the weights and at SAM's ascent point.

    Args:
        net: The network.
        rho: Radius of the ascent.
        alpha: Weight of the gradient at the ascent point; 1 in the official code.
        dual_agg: Duals that correct the global model: those of all clients (the official code), or of the active ones
            (the paper).
        eps: Added to the norm.
        **kwargs: As for `FedDyn`.
    """

    paper = "Sun et al., ICLR 2023"
    references = {**FedDyn.references, "end_w": "w"}

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        alpha: UnitInterval = 1.0,
        dual_agg: Literal["all", "active"] = "all",
        eps: NonNegative = EPS,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.alpha, self.eps = rho, alpha, eps
        self.dual_agg = dual_agg if self.use_dual else "all"
        if self.dual_agg == "active":
            self.server_state = {name: init for name, init in self.server_state.items() if name != "lam"}
            self.up = ("w", "end_w") if self.virtual else ("w",)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``(1 - alpha) g(w) + alpha g(w + rho g / ||g||)``, corrected."""
        g1 = grad(w)
        g2 = grad(w + to_radius(g1, self.rho, self.eps))
        return self.corrected((1 - self.alpha) * g1 + self.alpha * g2, w, client), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """FedDyn's; the paper's clients upload ``w_i - beta lam_i``."""
        upload, client = super().local_end(w, client, received, ctx)
        if self.dual_agg == "active":
            upload = {"w": w - self.beta * client.lam, **({"end_w": w} if self.virtual else {})}
        return upload, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """FedDyn's step, or the mean of the active clients' uploads."""
        if self.dual_agg == "all":
            return super().server_step(server, sent, uploads, ctx)
        return LocalObjective.server_step(self, self.move_unseen(server, sent, uploads), sent, uploads, ctx)


class AFedPDSAM(FedSpeed):
    """FedSpeed with A-FedPD's duals: the clients of A-FedPD run SAM.

    Args:
        net: The network.
        absent: As for `AFedPD`; kept is FedSpeed.
        eps: As for `FedSpeed`.
        **kwargs: As for `FedSpeed`.
    """

    paper = AFedPD.paper

    def __init__(
        self,
        net: nn.Module,
        absent: Literal["kept", "virtual"] = "virtual",
        eps: NonNegative = 1e-7,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, absent=absent, eps=eps, **kwargs)


class FedSMOO(FedDyn):
    """Sun et al., ICML 2023, Algorithm 1: FedDyn's duals for the weights, further duals for the perturbation.

    Args:
        net: The network.
        rho: Radius of the perturbation.
        s_agg: The mean that gives the global perturbation: of mu minus the last perturbation (the paper), or of mu
            (FL-Simulator).
        warmup: Rounds over which the radius grows linearly from ``rho0``; 0: none. FedGloSS's FedSMOO+wp has it.
        rho0: Its first radius.
        **kwargs: As for `FedDyn`; with ``use_dual: false`` it is "FedSMOO w/o Reg" of the FedGF paper.
    """

    paper = "Sun et al., ICML 2023"
    client_state = {**FedDyn.client_state, "mu": "zeros"}
    server_state = {**FedDyn.server_state, "s": "zeros"}
    scratch_state = {"s_hat": "zeros"}
    down, up = ("w", "s"), ("w", "s")
    references = {**FedDyn.references, "s": "zeros"}

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        s_agg: Literal["mu_minus_shat", "mu_only"] = "mu_minus_shat",
        warmup: NonNegativeInt = 0,
        rho0: NonNegative = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.s_agg, self.warmup, self.rho0 = rho, s_agg, warmup, rho0

    def radius(self, t: int) -> float:
        """Returns the radius of round ``t``, counted from 0."""
        return warm_up(self.rho, self.rho0, self.warmup, t)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Lines 7 to 11."""
        s_hat = to_radius(grad(w) - client.mu - received.s, self.radius(ctx.t))  # 7, 8
        mu = client.mu + s_hat - received.s  # 9
        g_hat = grad(w + s_hat)  # 10
        return self.corrected(g_hat, w, client), client.replace(mu=mu, s_hat=s_hat)  # 11

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Lines 13 to 15."""
        upload, client = super().local_end(w, client, received, ctx)  # 14
        s = client.mu if self.s_agg == "mu_only" else client.mu - client.s_hat  # 13
        return {**upload, "s": s}, client  # 15

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 17 to 19."""
        s = to_radius(uploads.mean("s"), self.radius(ctx.t))  # 17
        return super().server_step(server.replace(s=s), sent, uploads, ctx)  # 18, 19


class FedTOGA(FedDyn):
    """FedDyn whose clients ascend and step along the last global update, too.

    Args:
        net: The network.
        rho: Radius of the ascent.
        b1: Weight of the global update in a step.
        kappa: Its weight in the ascent.
        last_g: What the ascent adds: of the step before the gradient at the ascent point (perturbed), or the whole
            direction but for ``w / beta`` (corrected: the ports with torch 2); the present gradient once more (present:
            the ports with older versions); or nothing (none).
        **kwargs: As for `FedDyn`.
    """

    paper = "Li et al., 2024 (arXiv:2408.14144)"
    server_state = {**FedDyn.server_state, "delta": "zeros"}
    scratch_state = {"r": "zeros"}
    down: tuple[str, ...] = ("w", "delta")

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        b1: NonNegative = 0.9,
        kappa: NonNegative = 1.0,
        last_g: Literal["perturbed", "corrected", "present", "none"] = "perturbed",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.b1, self.kappa, self.last_g = rho, b1, kappa, last_g

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``u = g(w + rho a / ||a||)`` with ``a = g(w) + kappa delta + r``; the step is ``u + b1 delta``, corrected."""
        g = grad(w)
        a = g + self.kappa * received.delta + (g if self.last_g == "present" else client.r)
        u = grad(w + to_radius(a, self.rho, 1e-7))
        step = u + self.b1 * received.delta
        if self.last_g == "perturbed":
            client = client.replace(r=u)
        elif self.last_g == "corrected":
            linear = step - client.lam - client.start / self.beta if self.use_dual else step
            client = client.replace(r=self.optimizer.clipped(linear))
        return self.corrected(step, w, client), client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``delta <- (mean start_i - mean w_i) / K``; FedDyn's step."""
        steps = uploads.mean("k_lr") / self.lr(ctx)
        delta = (self.mean_start(sent, uploads) - uploads.mean("w")) / steps
        return super().server_step(server.replace(delta=delta), sent, uploads, ctx)
