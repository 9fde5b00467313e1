"""AdaBest."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import ClientContext, Fraction, NonNegative, RoundContext, State, Upload, Uploads, Weighting


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
        t = ctx.t + 1
        h = client.h / (t - client.last) + self.mu * (client.start - w)
        return {"w": w}, client.replace(h=h, last=client.last * 0 + t)

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``w <- w_bar - beta (w_bar_old - w_bar)``, with w_bar the mean of the local models."""
        w_bar = uploads.weighted("w")
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(w=server.w - self.beta * (server.w_bar - w_bar), w_bar=w_bar)
