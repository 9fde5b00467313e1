"""Ascent steps: displacements ``(..., d)`` from the local iterate to the point where the gradient is taken."""

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from fl_lightning.algorithms.parts.base import Gradient, Part
from fl_lightning.core import EPS, ClientContext, NonNegative, NonNegativeInt, RoundContext, State, Upload, to_radius


class Ascent(Part, ABC, key="model.ascent"):
    """Base class of the ascent steps; a subclass defines ``__call__``."""

    @abstractmethod
    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        """Returns the displacement from ``w``, of the same shape ``(..., d)``."""


def warm_up(rho: float, rho0: float, warmup: int, t: int) -> float:
    """FedGloSS, section 5: ``rho0 + (rho - rho0) t / T_s`` up to round T_s, then ``rho``; ``t`` from 0."""
    return rho if t >= warmup else rho0 + (rho - rho0) * t / warmup


class SAM(Ascent):
    """Sharpness-aware minimisation: ``rho * g / ||g||`` (Foret et al., ICLR 2021).

    Args:
        rho: Radius of the ascent.
        warmup: Rounds over which the radius grows linearly from ``rho0`` (T_s of FedGloSS); 0: none.
        rho0: Radius of round 0 when there is a warm-up.
        eps: Added to the norm.

    Raises:
        UserError: If a radius is negative.
    """

    def __init__(
        self, rho: NonNegative = 0.05, warmup: NonNegativeInt = 0, rho0: NonNegative = 1e-3, eps: NonNegative = EPS
    ) -> None:
        self.rho, self.warmup, self.rho0, self.eps = rho, warmup, rho0, eps

    def radius(self, t: int) -> float:
        """Returns the radius of round ``t``, counted from 0."""
        return warm_up(self.rho, self.rho0, self.warmup, t)

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        return to_radius(grad(w), self.radius(ctx.t), self.eps)


class ASAM(SAM):
    """Adaptive SAM: ``rho * T^2 g / ||T g||``, scaled by the weights (Kwon et al., ICML 2021; FedASAM, ECCV 2022).

    ``T = |w| + eta`` for parameters with "weight" in their name, and 1 for the rest, as in the official code.

    Args:
        rho: Radius of the ascent.
        eta: Added to the absolute weights.
        warmup: As for `SAM`.
        rho0: As for `SAM`.
        eps: Added to the norm.
    """

    def __init__(
        self,
        rho: NonNegative = 0.5,
        eta: NonNegative = 0.2,
        warmup: NonNegativeInt = 0,
        rho0: NonNegative = 1e-3,
        eps: NonNegative = EPS,
    ) -> None:
        super().__init__(rho, warmup, rho0, eps)
        self.eta = eta

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        T = ctx.flat.adaptive_scale(w, self.eta)
        return T * to_radius(T * grad(w), self.radius(ctx.t), self.eps)


class LESAM(Ascent):
    """FedLESAM's ascent: against the last global update, without a gradient, the same for all steps of a round.

    ``rho * (w_old - w^t) / ||w_old - w^t||`` with ``w^t`` the received model. When a client takes part for the first
    time, there is no ascent.

    Args:
        rho: Radius of the ascent.
        ref: Which ``w_old``: the model that the client received when it last took part (the paper), or that of the
            previous round, which the server then sends as well (the official code).
        eps: Added to the norm.
    """

    def __init__(
        self,
        rho: NonNegative = 0.1,
        ref: Literal["own_last_active", "previous_round"] = "own_last_active",
        eps: NonNegative = EPS,
    ) -> None:
        self.rho, self.ref, self.eps = rho, ref, eps
        if ref == "previous_round":
            self.server_state, self.down = {"w_previous": "w0"}, ("w_previous",)
        else:
            self.client_state = {"w_old": "w"}

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        w_old = received.w_previous if self.ref == "previous_round" else client.w_old
        return to_radius(w_old - received.w, self.rho, self.eps)

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        return upload, client.replace(w_old=received.w) if "w_old" in self.client_state else client

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        return server.replace(w_previous=before.w) if "w_previous" in self.server_state else server
