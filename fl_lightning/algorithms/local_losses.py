"""FedProx, FedNTD, FedLC, MOON and FedDecorr, which change the clients' loss; FedSOL, whose ascent follows another."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.algorithms.parts import Gradient, Step, prox_pull
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    Positive,
    State,
    Upload,
    ensure,
    kl_to_teacher,
    norm,
    not_true,
    to_radius,
)

OUT = -1e4
"""Logit of a class that takes no part: its probability is exactly 0, and no product with it is NaN."""
EPS = 1e-8
"""Added to the variances, under the root: a dead feature has no correlation, and no infinite gradient."""


class FedProx(LocalObjective):
    """FedAvg with ``mu/2 ||w - w^t||^2`` in the local objective; an ascent follows the loss alone.

    Args:
        net: The network.
        mu: Weight of the proximal term.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Li et al., MLSys 2020"
    refers_to_received = True

    def __init__(self, net: nn.Module, mu: NonNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g + mu (w - w^t)``."""
        return self.local_gradient(w, grad, client, received, ctx) + prox_pull(w, client.start, self.mu), client


class FedNTD(LocalObjective):
    """Not-true distillation: cross-entropy + gamma KL to the received model over all classes except the true one.

    Args:
        net: The network.
        gamma: Weight of the KL term.
        tau: Its temperature.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Lee et al., NeurIPS 2022"
    needs_classes = True
    refers_to_received = True

    def __init__(self, net: nn.Module, gamma: NonNegative = 1.0, tau: Positive = 1.0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.gamma, self.tau = gamma, tau

    def teacher(self, client: State, received: State) -> Tensor:
        """The received model, w^t."""
        return received.w

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """``CE(z, y) + gamma tau^2 KL(teacher || student)`` without the true class."""
        kl = kl_to_teacher(not_true(logits, target), not_true(teacher[0], target), self.tau)
        return super().losses(logits, target) + self.gamma * kl


class FedLC(LocalObjective):
    """Local training with logits ``z_c - tau n_c^(-1/4)``, where the client has n_c samples of class c.

    Classes of which the client has no sample are left out; for them label smoothing is not defined, so it is refused.
    Evaluation uses the logits themselves.

    Args:
        net: The network.
        tau: Scale of the margins; 0 is FedAvg.
        denominator: Classes of the softmax's denominator: all (the public programs), or all but the true one (the
            paper): this loss has no lower bound, and training can diverge.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Zhang et al., ICML 2022"
    needs_classes = uses_class_counts = True

    def __init__(
        self, net: nn.Module, tau: NonNegative = 1.0, denominator: Literal["all", "others"] = "all", **kwargs: Any
    ) -> None:
        super().__init__(net, **kwargs)
        self.tau, self.denominator = tau, denominator
        smoothing = getattr(self.loss, "label_smoothing", 0)
        infinite = "FedLC gives classes that a client lacks probability 0, whose share of a smoothed loss is infinite"
        ensure(not (tau and smoothing), f"model.loss.label_smoothing = {smoothing}: {infinite}; set it to 0")

    def loss_constants(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, ...]:
        """The margins ``tau n_c^(-1/4)``, infinite for classes of which the client has no sample."""
        assert ctx.class_counts is not None
        return (self.tau * ctx.class_counts**-0.25,)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Cross-entropy of the calibrated logits."""
        if self.tau == 0:
            return super().losses(logits, target)
        ensure(logits.ndim == 2, "model = FedLC: needs one class a sample, not one a pixel; choose another algorithm")
        margin = F.pad(teacher[0], (0, logits.shape[-1] - len(teacher[0])), value=torch.inf)
        z = torch.where(margin.isinf(), OUT, logits - margin)
        if self.denominator == "all":
            return super().losses(z, target)
        true = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return not_true(z, target).logsumexp(-1) - true


class MOON(LocalObjective):
    """Features are pulled towards the received model's, and away from those of the client's last local model.

    Features are the input of the last linear layer: see `fl_lightning.algorithms.module.with_features`.

    Args:
        net: The network.
        mu: Weight of the contrastive term.
        tau: Its temperature.
        unseen: The model that stands for the last local one when a client takes part for the first time: the received
            model, so that there is no term; or the initial model (the official code).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Li et al., CVPR 2021"
    uses_features = True

    def __init__(
        self,
        net: nn.Module,
        mu: NonNegative = 1.0,
        tau: Positive = 0.5,
        unseen: Literal["received", "initial"] = "received",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.mu, self.tau = mu, tau
        self.client_state = {"w_local": "w" if unseen == "received" else "w0"}

    def teacher(self, client: State, received: State) -> tuple[Tensor, Tensor]:
        """The received model, and the client's last local one."""
        return received.w, client.w_local

    def losses(self, logits: Any, target: Tensor, *teacher: Any) -> Tensor:
        """``CE - mu log(e^(cos(z, z_glob)/tau) / (e^(cos(z, z_glob)/tau) + e^(cos(z, z_prev)/tau)))``."""
        (logits, z), (_, z_glob), (_, z_prev) = logits, *teacher
        near, far = (F.cosine_similarity(z, other, dim=-1) for other in (z_glob, z_prev))
        return super().losses(logits, target) - self.mu * F.logsigmoid((near - far) / self.tau)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Keeps the local model."""
        return {"w": w}, client.replace(w_local=w)


class FedDecorr(LocalObjective):
    """FedAvg with the squared correlations of the features, over each minibatch, in the local objective.

    Features are the input of the last linear layer: see `fl_lightning.algorithms.module.with_features`. The diagonal
    is left out: it is constant, except for a feature that is almost dead.

    Args:
        net: The network.
        beta: Weight of the term.
        scale: The term of d features and N samples: the sum of the squared correlations over d^2 (the paper); or their
            mean times ``(N - 1)^2 / N`` (the official code), about N times as much.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Shi et al., ICLR 2023"
    uses_features = True

    def __init__(
        self, net: nn.Module, beta: NonNegative = 0.1, scale: Literal["paper", "code"] = "paper", **kwargs: Any
    ) -> None:
        super().__init__(net, **kwargs)
        self.beta, self.scale = beta, scale

    def losses(self, logits: Any, target: Tensor, *teacher: Any) -> Tensor:
        """The loss alone: the term belongs to the minibatch as a whole."""
        return super().losses(logits[0], target)

    def batch_loss(
        self, output: Any, target: Tensor, *teacher: Any, weight: Tensor | None = None, losses: Losses | None = None
    ) -> Tensor:
        """``CE + beta`` times the term."""
        loss = super().batch_loss(output, target, *teacher, weight=weight, losses=losses)
        return loss + self.beta * self.correlation(output[1], weight)

    def correlation(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns the term of a minibatch, a scalar.

        Args:
            z: Features, ``(n, d)``.
            weight: As for `batch_loss`.
        """
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        n, d = z.shape
        real = z.new_ones(n) if weight is None else (weight > 0).to(z)
        N = real.sum().clamp(min=2)  # a single sample has no correlation: its deviation is 0
        centred = (z - real @ z / real.sum().clamp(min=1)) * real.unsqueeze(-1)
        scaled = centred * (EPS + centred.square().sum(0) / (N - 1)).rsqrt()
        M = scaled.T @ scaled
        squares = (M * (1 - torch.eye(d, dtype=M.dtype, device=M.device))).square().sum()
        return squares / (N - 1) ** 2 / d**2 if self.scale == "paper" else squares / N / max(d * (d - 1), 1)


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
        """The received model, w^t."""
        return received.w

    def divergence(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """``KL(teacher || student)`` of the softened outputs, the loss of the ascent."""
        return kl_to_teacher(logits, teacher[0], self.tau, tau2=False)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """The loss of the descent: the teacher has no part in it."""
        return super().losses(logits, target)

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``g(w + r g_p / ||g_p||)`` with the KL's gradient ``g_p``."""
        moved = w - received.w
        # at w^t the KL has no gradient, only rounding noise
        scale = ctx.flat.normalize_by_filter(moved.abs()) if self.radius == "adaptive" else norm(moved) > 0
        return grad(w + scale * to_radius(grad(w, self.divergence), self.rho)), client
