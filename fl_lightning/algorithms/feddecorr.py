"""FedDecorr: features that are not correlated."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.module import Losses
from fl_lightning.core import NonNegative

EPS = 1e-8
"""What is added to the variances, under the root: a dead feature has no correlation, and no infinite gradient."""


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
        """Returns the loss alone: the term belongs to the minibatch as a whole."""
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
