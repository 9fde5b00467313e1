"""SCAFFOLD, option II, FedGAMMA and FedMoSWA, which have its variates; FedSWA; AdaBest, whose clients have biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import (
    SAM,
    Gradient,
    ServerUpdate,
    Step,
    check_fresh_momentum,
    control_variate,
    effective_steps,
)
from fl_lightning.core import (
    ClientContext,
    Fraction,
    Interval,
    NonNegative,
    Positive,
    RoundContext,
    State,
    UnitInterval,
    Upload,
    Uploads,
    Weighting,
)


class SCAFFOLD(LocalObjective):
    """Control variates against client drift.

    Args:
        net: The network.
        cv_scale: Factor of the correction; FedLESAM's official code has 0.1.
        momentum_aware: Take the local momentum into account when a displacement is converted to a gradient; otherwise
            the gradient is about 1/(1 - momentum) times too large (the paper's box has no momentum).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Karimireddy et al., ICML 2020"
    needs_sgd = "divides a displacement by the sum of SGD's learning rates to get a gradient"
    client_state = {"c": "zeros"}
    server_state = {"c": "zeros"}
    down: tuple[str, ...] = ("w", "c")
    up: tuple[str, ...] = ("w", "delta_c")
    references: Mapping[str, str | float] = {"w": "w", "delta_c": "zeros"}
    sums = {"delta_c": "c"}
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, cv_scale: float = 1.0, momentum_aware: bool = False, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.cv_scale, self.momentum_aware = cv_scale, momentum_aware
        if momentum_aware:
            check_fresh_momentum(self.optimizer, "momentum_aware")

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Line 10: ``g - c_i + c``."""
        return self.local_gradient(w, grad, client, received, ctx) + self.cv_scale * (received.c - client.c), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Lines 12 to 14."""
        steps = effective_steps(ctx.K, self.optimizer.momentum) if self.momentum_aware else ctx.K
        c = control_variate(client.c, received.c, w, client.start, ctx.k_lr * steps / ctx.K)
        return {"w": w, "delta_c": c - client.c}, client.replace(c=c)

    def variate_share(self, n: float, m: int) -> float:
        """Returns the server's factor of the cohort's mean change: S/M, so that c stays the mean of all c_i."""
        return n / m

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 16 and 17."""
        c = server.c + self.variate_share(uploads.n, ctx.m) * uploads.mean("delta_c")
        return super().server_step(server.replace(c=c), sent, uploads, ctx)


class FedGAMMA(SCAFFOLD):
    """SCAFFOLD whose clients run SAM.

    Args:
        net: The network.
        rho: Radius of the ascent.
        c_scale: The server's variate takes the sum of the changes over M, as SCAFFOLD's, or their mean (FedGF's code:
            S times slower).
        **kwargs: As for `SCAFFOLD`.
    """

    paper = "Dai et al., TNNLS 2023"

    def __init__(
        self, net: nn.Module, rho: NonNegative = 0.1, c_scale: Literal["sum", "mean"] = "sum", **kwargs: Any
    ) -> None:
        super().__init__(net, ascent=SAM(rho), **kwargs)
        self.c_scale = c_scale

    def variate_share(self, n: float, m: int) -> float:
        """S/M, or 1/M."""
        return super().variate_share(1 if self.c_scale == "mean" else n, m)


class FedSWA(LocalObjective):
    """Within a round the learning rate falls linearly from lr towards ``rho lr``; the server steps by alpha.

    Args:
        net: The network.
        rho: Learning rate that a step after the last one would have, as a fraction of the first; 1: constant.
        alpha: Factor of the server's step along the mean update.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., ICML 2025"
    scratch_state = {"step": 0.0}
    default_weighting: Weighting = "uniform"
    refers_to_received = True  # its learning rate starts again with each received model

    def __init__(self, net: nn.Module, rho: UnitInterval = 0.1, alpha: Positive = 1.5, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerUpdate(alpha), **kwargs)
        self.rho = rho

    def step_lr(self, client: State, ctx: ClientContext) -> Tensor:
        """``lr ((1 - k/K) + (k/K) rho)`` in step k, from 0, where K counts the steps that a late client misses, too."""
        return ctx.lr * (1 - (1 - self.rho) * client.step / (ctx.K + ctx.K_missed))

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Counts the steps."""
        direction, client = super().local_step(w, grad, client, received, ctx)
        return direction, client.replace(step=client.step + 1)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """The sum of the learning rates is ``lr (K (1 + rho) + (1 - rho)) / 2``, and more if the client is late."""
        missed = (1 - self.rho) * (ctx.K - 1) * (1 - ctx.K / (ctx.K + ctx.K_missed))
        k_lr = ctx.lr * (ctx.K * (1 + self.rho) + (1 - self.rho) + missed) / 2
        return super().local_end(w, client, received, replace(ctx, k_lr=k_lr))


class FedMoSWA(FedSWA, SCAFFOLD):
    """FedSWA with control variates around an exponential mean of the newest ones.

    Args:
        net: The network.
        gamma: The server's variate becomes ``(1 - gamma) c + gamma mean c_i``.
        **kwargs: As for `FedSWA` and `SCAFFOLD`.
    """

    paper = "Liu et al., ICML 2025"

    def __init__(self, net: nn.Module, gamma: Annotated[float, Interval("(0, 1]")] = 0.2, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.gamma = gamma

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """SCAFFOLD's new variate; uploads its difference from c, not from the client's old one."""
        upload, client = super().local_end(w, client, received, ctx)
        return {**upload, "delta_c": client.c - received.c}, client

    def variate_share(self, n: float, m: int) -> float:
        """Gamma."""
        return self.gamma


class AdaBest(LocalObjective):
    """Client biases that decay with the rounds since a client last took part, and a server that extrapolates.

    For clients of unequal size the correction is scaled by mean size / own size, as in the authors' code.

    Args:
        net: The network.
        mu: Fraction of a round's drift that enters the bias.
        beta: Extrapolation of the server.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Varno et al., ECCV 2022"
    client_state = {"h": "zeros", "last": 0.0}
    server_state = {"w_bar": "w0"}
    references = {}  # every upload depends on the numbers of samples of all clients, and no clip bounds that
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, mu: NonNegative = 0.02, beta: Fraction = 0.98, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu, self.beta = mu, beta

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g - n_mean / n_i h_i``; with clients of equal size ``g - h_i``."""
        return self.local_gradient(w, grad, client, received, ctx) - ctx.n_mean / ctx.n_k * client.h, client

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """``h_i <- h_i / (t - t_i) + mu (w^t - w_i)``, rounds counted from 1."""
        now = ctx.t + 1
        h = client.h / (now - client.last) + self.mu * (client.start - w)
        return {"w": w}, client.replace(h=h, last=client.last * 0 + now)

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``w <- w_bar - beta (w_bar_old - w_bar)``, with w_bar the mean of the local models."""
        w_bar = uploads.weighted("w")
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(w=server.w - self.beta * (server.w_bar - w_bar), w_bar=w_bar)
