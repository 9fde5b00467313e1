"""Where the gradient is taken: displacements ``(..., d)`` from the local iterate to the ascent point."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.flat import EPS, to_radius
from fl_lightning.state import ClientContext, Rule, Slots

Gradient = Callable[[Tensor], Tensor]
"""Gradient of the local objective on this step's minibatch: a point ``(..., d)`` to a gradient ``(..., d)``."""


class Ascent:
    """Base of the ascent steps; a subclass says where to go in ``__call__``.

    Attributes:
        client_slots: State of its own that a client keeps, as in `LocalObjective`.
        passes: Gradients per local step, the one at the ascent point included.
    """

    client_slots: ClassVar[dict[str, Rule]] = {}
    passes: ClassVar[int] = 2

    def __call__(self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext) -> Tensor:
        """The displacement from ``w``, of the same shape ``(..., d)``."""
        raise TypeError(f"{type(self).__name__} must define __call__")

    def local_end(self, client: Slots, sent: Slots, ctx: ClientContext) -> Slots:
        """What the client keeps after its last step; its own slots are the only ones to change."""
        return client


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
        if rho < 0 or rho0 < 0:
            raise UserError(f"model.ascent.rho = {rho}, rho0 = {rho0}: a radius is 0 or more")
        self.rho, self.warmup, self.rho0, self.eps = rho, warmup, rho0, eps

    def radius(self, t: int) -> float:
        """Radius of round ``t``, counted from 0 (FedGloSS, section 5: rho(t) = rho0 + (rho - rho0) t / T_s)."""
        return self.rho if t >= self.warmup else self.rho0 + (self.rho - self.rho0) * t / self.warmup

    def __call__(self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext) -> Tensor:
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
        self.eta = eta

    def __call__(self, w: Tensor, grad: Gradient, client: Slots, sent: Slots, ctx: ClientContext) -> Tensor:
        T = torch.where(ctx.flat.mask("weight", w.device), w.abs() + self.eta, 1.0)
        return T * to_radius(T * grad(w), self.radius(ctx.t), self.eps)
