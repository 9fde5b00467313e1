"""FedNSAM: SAM at a look-ahead, or an ascent along the server's momentum."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.fedacg import LookAhead
from fl_lightning.algorithms.parts import SAM, Ascent, Gradient
from fl_lightning.core import ClientContext, Fraction, NonNegative, RoundContext, State, to_radius


class AlongMomentum(Ascent):
    """Look-ahead and ascent as one displacement ``gamma m - rho m / ||m||``, the same in all steps of a round.

    Args:
        gamma: Factor of the look-ahead.
        rho: Radius of the ascent.
        eps: Added to the norm.
    """

    down = ("server_v",)

    def __init__(self, gamma: Fraction, rho: NonNegative, eps: NonNegative = 1e-7) -> None:
        self.gamma, self.rho, self.eps = gamma, rho, eps

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        uphill = received.server_v  # -m
        return to_radius(uphill, self.rho, self.eps) - self.gamma * uphill


class FedNSAM(LookAhead):
    """Nesterov's look-ahead for SAM.

    Args:
        net: The network.
        gamma: Server momentum.
        rho: Radius of the ascent.
        along: The ascent: along the local gradient at the look-ahead, where clients start (the authors' present
            program); or along the momentum, with clients that start at w (the abstract, and their first program).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., 2026 (arXiv:2602.23827)"

    def __init__(
        self,
        net: nn.Module,
        gamma: Fraction = 0.85,
        rho: NonNegative = 0.05,
        along: Literal["gradient", "momentum"] = "gradient",
        **kwargs: Any,
    ) -> None:
        ascent = SAM(rho) if along == "gradient" else AlongMomentum(gamma, rho)
        super().__init__(net, gamma, ascent=ascent, **kwargs)
        self.along = along

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """``w + gamma m``; along the momentum w itself, and m."""
        return super().broadcast(server, ctx) if self.along == "gradient" else server
