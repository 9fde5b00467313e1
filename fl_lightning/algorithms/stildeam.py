"""S~AM: SAM along the previous gradient."""

from typing import Any

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import ClientContext, NonNegative, State, to_radius


class STildeAM(LocalObjective):
    """The centralized reference of FedGloSS, Table 6: FedGloSS's cheap ascent in a single optimizer, one pass per step.

    ``g_i = grad(w + rho g_(i-1) / ||g_(i-1)||)``; the first step has no ascent. The paper has no box; this is our
    interpretation. In a federation every round starts without a previous gradient.

    Args:
        net: The network.
        rho: Radius of the ascent.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Caldarola et al., CVPR 2025, Table 6"
    scratch_state = {"g": "zeros"}

    def __init__(self, net: nn.Module, rho: NonNegative = 0.05, **kwargs: Any) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho = rho

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """Returns the gradient at the ascent point, and keeps it for the next one."""
        g = grad(w + to_radius(client.g, self.rho))
        return g, client.replace(g=g)
