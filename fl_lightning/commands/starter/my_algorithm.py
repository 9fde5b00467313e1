"""An algorithm of your own: override the hooks in which it differs from FedAvg."""

from typing import Any

from torch import Tensor, nn

from fl_lightning import LocalObjective


class MyProx(LocalObjective):
    """FedAvg with a term that pulls the local model towards the received one: mu/2 ||w - w_t||^2.

    Args:
        net: The network.
        mu: Weight of the term.
        **kwargs: As for LocalObjective: optimizer, ascent, averaging, ...
    """

    def __init__(self, net: nn.Module, mu: float = 0.1, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        """Returns the direction of a local step, and the client's state: flat vectors, (d,) or (clients, d)."""
        return self.local_gradient(w, grad, client, received, ctx) + self.mu * (w - client.start), client
