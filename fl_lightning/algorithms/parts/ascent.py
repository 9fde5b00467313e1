"""Where the gradient is taken: displacements ``(..., d)`` from the local iterate to the ascent point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from fl_lightning.core.errors import require
from fl_lightning.core.flat import EPS, to_radius
from fl_lightning.core.state import ClientContext, Init, State

Gradient = Callable[[Tensor], Tensor]
"""Gradient of the local objective on this step's minibatch: a point ``(..., d)`` to a gradient ``(..., d)``."""


class Ascent:
    """Base of the ascent steps; a subclass says where to go in ``__call__``.

    Attributes:
        client_state: State of its own that a client keeps, as in `LocalObjective`.
        server_state: The same for the server.
        down: Those of its server slots that are sent to a client.
        passes: Gradients per local step, the one at the ascent point included.
    """

    client_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ()
    passes: ClassVar[int] = 2

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        """The displacement from ``w``, of the same shape ``(..., d)``."""
        raise TypeError(f"{type(self).__name__} must define __call__")

    def local_end(self, client: State, received: State, ctx: ClientContext) -> State:
        """What the client keeps after its last step; its own slots are the only ones to change."""
        return client

    def server_end(self, server: State, before: State) -> State:
        """What the server keeps after its step from ``before``; its own slots are the only ones to change."""
        return server


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

    def __init__(self, rho: float = 0.05, warmup: int = 0, rho0: float = 1e-3, eps: float = EPS) -> None:
        for name, value in (("rho", rho), ("warmup", warmup), ("rho0", rho0), ("eps", eps)):
            require(value >= 0, f"model.ascent.{name}", value, "0 or more")
        self.rho, self.warmup, self.rho0, self.eps = rho, warmup, rho0, eps

    def radius(self, t: int) -> float:
        """Radius of round ``t``, counted from 0."""
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
        self, rho: float = 0.5, eta: float = 0.2, warmup: int = 0, rho0: float = 1e-3, eps: float = EPS
    ) -> None:
        super().__init__(rho, warmup, rho0, eps)
        require(eta >= 0, "model.ascent.eta", eta, "0 or more")
        self.eta = eta

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        T = ctx.flat.adaptive_scale(w, self.eta)
        return T * to_radius(T * grad(w), self.radius(ctx.t), self.eps)


class LESAM(Ascent):
    """FedLESAM's ascent: uphill along the last global update, for nothing, and the same for all steps of a round.

    ``rho * (w_old - w^t) / ||w_old - w^t||``; a client that has not taken part before makes no ascent.

    Args:
        rho: Radius of the ascent.
        ref: Which ``w_old``: the model the client received when it last took part (the paper), or the previous round's,
            which the server then sends as well (the official code).
        eps: Added to the norm.
    """

    passes = 1

    def __init__(
        self,
        rho: float = 0.1,
        ref: Literal["own_last_active", "previous_round"] = "own_last_active",
        eps: float = EPS,
    ) -> None:
        require(rho >= 0, "model.ascent.rho", rho, "0 or more")
        self.rho, self.ref, self.eps = rho, ref, eps
        if ref == "previous_round":
            self.server_state, self.down = {"w_previous": "w0"}, ("w_previous",)
        else:
            self.client_state = {"w_old": "w"}

    def __call__(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Tensor:
        w_old = received.w_previous if self.ref == "previous_round" else client.w_old
        return to_radius(w_old - received.w, self.rho, self.eps)

    def local_end(self, client: State, received: State, ctx: ClientContext) -> State:
        return client.replace(w_old=received.w) if "w_old" in client else client

    def server_end(self, server: State, before: State) -> State:
        return server.replace(w_previous=before.w) if "w_previous" in server else server
