"""FedSOL: the gradient of the loss where the distillation loss is higher."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import ClientContext, NonNegative, Positive, State, kl_to_teacher, norm, to_radius


class FedSOL(LocalObjective):
    """FedAvg whose ascent follows the KL from the received model's output, not the loss.

    Args:
        net: The network.
        rho: Radius of the ascent.
        tau: Temperature of the KL.
        radius: adaptive: each weight's radius grows with its distance from the received model; fixed: one for all.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Lee et al., CVPR 2024"
    needs_classes = True
    refers_to_received = True

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 1.0,
        tau: Positive = 3.0,
        radius: Literal["adaptive", "fixed"] = "adaptive",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.tau, self.radius = rho, tau, radius

    def teacher(self, client: State, received: State) -> Tensor:
        """Returns the received model, w^t."""
        return received.w

    def divergence(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """``KL(teacher || student)`` of the softened outputs, the loss of the ascent."""
        return kl_to_teacher(logits, teacher[0], self.tau, tau2=False)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Returns the loss of the descent: the teacher has no part in it."""
        return super().losses(logits, target)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g(w + r g_p / ||g_p||)`` with the KL's gradient ``g_p``."""
        moved = w - received.w
        # at w^t the KL has no gradient, only rounding noise
        scale = ctx.flat.normalize_by_filter(moved.abs()) if self.radius == "adaptive" else norm(moved) > 0
        return grad(w + scale * to_radius(grad(w, self.divergence), self.rho)), client
