"""FedNova."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.drift import check_fresh_momentum, effective_steps
from fl_lightning.core import ClientContext, RoundContext, State, Upload, Uploads


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
