"""FedExP: a server step that grows as the clients' updates disagree."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.server import Averaging, LastTwo
from fl_lightning.core import ClientContext, NonNegative, RoundContext, State, Upload, Uploads, Weighting, norm

TINY = 1e-30
"""Least denominator of the step size, which is then 1 if nothing has moved and eps is 0."""


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
