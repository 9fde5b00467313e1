"""FedACG and FedNSAM: clients start where the server's momentum leads, or take the gradient there."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import SAM, Ascent, Gradient, ServerMomentum, Step, prox_pull
from fl_lightning.core import ClientContext, Fraction, NonNegative, RoundContext, State, Weighting, to_radius


class LookAhead(LocalObjective):
    """Server momentum in Nesterov's form: the model that is sent is where the momentum leads.

    Args:
        net: The network.
        lam: Server momentum.
        **kwargs: As for `LocalObjective`.
    """

    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, lam: Fraction, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerMomentum(lam), **kwargs)
        self.lam = lam

    def broadcast(self, server: State, ctx: RoundContext) -> State:
        """``w + lam m``, where ``server_v`` is -m."""
        return server.replace(w=server.w - self.lam * server.server_v)


class FedACG(LookAhead):
    """Server momentum whose clients start at a look-ahead, ``w + lam m``, and are pulled towards it.

    Args:
        net: The network.
        lam: Server momentum.
        beta: Weight of the proximal term ``beta/2 ||v - (w + lam m)||^2``.
        prox: The proximal term: with the 1/2, or without it as in the official code (twice as strong).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Kim et al., CVPR 2024"
    refers_to_received = True

    def __init__(
        self,
        net: nn.Module,
        lam: Fraction = 0.85,
        beta: NonNegative = 1e-3,
        prox: Literal["half", "whole"] = "half",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lam, **kwargs)
        self.beta, self.prox = beta, prox

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g + beta (v - start)``, where training starts at the look-ahead."""
        pull = prox_pull(w, client.start, self.beta if self.prox == "half" else 2 * self.beta)
        return self.local_gradient(w, grad, client, received, ctx) + pull, client


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
