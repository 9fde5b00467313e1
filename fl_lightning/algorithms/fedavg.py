"""FedAvg, and methods that change only what the server makes of the updates."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import (
    Averaging,
    LastTwo,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
    check_fresh_momentum,
    effective_steps,
)
from fl_lightning.core import (
    ClientContext,
    Fraction,
    NonNegative,
    Positive,
    RoundContext,
    State,
    Upload,
    Uploads,
    Weighting,
    norm,
)

TINY = 1e-30
"""Least denominator of the step size, which is then 1 if nothing has moved and eps is 0."""


class FedAvg(LocalObjective):
    """Federated averaging: local SGD, then the average of the models."""

    paper = "McMahan et al., AISTATS 2017"


class FedAvgM(LocalObjective):
    """FedAvg with momentum on the server.

    Args:
        net: The network.
        beta: Server momentum.
        server_lr: Server learning rate.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Hsu et al., 2019"

    def __init__(self, net: nn.Module, beta: Fraction = 0.9, server_lr: Positive = 1.0, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerMomentum(beta, server_lr), **kwargs)


class FedAdam(LocalObjective):
    """FedAvg with ServerAdam on the server; its further options are those of ``server_update: ServerAdam``.

    Args:
        net: The network.
        server_lr: Server learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Added to the root of the second moment.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Reddi et al., ICLR 2021"
    update = ServerAdam

    def __init__(
        self,
        net: nn.Module,
        server_lr: Positive = 0.1,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, server_update=self.update(server_lr, beta1, beta2, tau), **kwargs)


class FedYogi(FedAdam):
    """FedAvg with ServerYogi on the server; options as for `FedAdam`."""

    update = ServerYogi


class FedAdagrad(LocalObjective):
    """FedAvg with ServerAdagrad on the server; its further options are those of ``server_update: ServerAdagrad``.

    Args:
        net: The network.
        server_lr: Server learning rate.
        beta1: Decay of the first moment.
        tau: Added to the root of the sum of squares.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Reddi et al., ICLR 2021"

    def __init__(
        self, net: nn.Module, server_lr: Positive = 0.1, beta1: Fraction = 0.0, tau: Positive = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(net, server_update=ServerAdagrad(server_lr, beta1, tau), **kwargs)


class FedExP(LocalObjective):
    """FedAvg with an extrapolated server step, ``max(1, mean ||Delta_i||^2 / (2 (||Delta||^2 + eps)))``.

    A client uploads ``||Delta_i||^2``, a scalar, with its model.

    Args:
        net: The network.
        eps: Added to the squared norm of the mean update.
        eps_scale: paper: eps itself; code: times the number of clients in the round, and times
            ``lr_decay^(2 (t + 1))``, as in the official code.
        averaging: As for `LocalObjective`; null: the mean of the last two models, as the authors evaluate.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Jhunjhunwala et al., ICLR 2023"
    up = ("w", "square")
    references = {}  # the squared norm must be that of what is sent, which a clip would change
    default_weighting: Weighting = "uniform"

    def __init__(
        self,
        net: nn.Module,
        eps: NonNegative = 1e-3,
        eps_scale: Literal["paper", "code"] = "paper",
        averaging: Averaging | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, averaging=averaging or LastTwo(), **kwargs)
        self.eps, self.eps_scale = eps, eps_scale

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Uploads the squared norm of the update, a scalar."""
        return {"w": w, "square": norm(w - client.start) ** 2}, client

    def step_size(self, delta: Tensor, uploads: Uploads, ctx: RoundContext) -> Tensor:
        """Returns the server's step along ``delta``, ``(1,)``."""
        code = uploads.n * self.optimizer.lr_decay ** (2 * (ctx.t + 1))
        eps = self.eps * (code if self.eps_scale == "code" else 1)
        return (uploads.weighted("square") / (2 * (norm(delta) ** 2 + eps)).clamp(min=TINY)).clamp(min=1.0)

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``w + step Delta``, one step size for the whole vector."""
        delta = sent.w - uploads.weighted("w")
        return self.server_update(server, self.step_size(delta, uploads, ctx) * delta, ctx)


class FedNova(LocalObjective):
    """Normalized averaging: each update is divided by its effective number of steps ``tau_i``, local momentum included.

    A client uploads the normalized update (one model) and ``tau_i`` (a scalar).

    Args:
        net: The network.
        **kwargs: As for `LocalObjective`; clients do not keep the momentum of their last round.
    """

    paper = "Wang et al., NeurIPS 2020"
    needs_sgd = "divides updates by SGD's effective number of steps"
    up = ("update", "tau")
    references = {}  # next to tau, a number of steps, the update would hardly count in a norm

    def __init__(self, net: nn.Module, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        check_fresh_momentum(self.optimizer, "FedNova")

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """``tau_i``, and ``(w_i - w) / tau_i``."""
        tau = w[..., :1] * 0 + effective_steps(ctx.K, self.optimizer.momentum)
        return {"update": (w - client.start) / tau, "tau": tau}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``w + (sum p_i tau_i) sum p_i (w_i - w) / tau_i``."""
        return self.server_update(server, -uploads.weighted("tau") * uploads.weighted("update"), ctx)
