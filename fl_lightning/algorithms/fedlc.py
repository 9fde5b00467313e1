"""FedLC: logits calibrated by the client's class counts."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ClientContext, NonNegative, State, ensure, not_true

OUT = -1e4
"""Logit of a class that takes no part: its probability is exactly 0, and no product with it is NaN."""


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
        """Returns the margins ``tau n_c^(-1/4)``, infinite for classes of which the client has no sample."""
        assert ctx.class_counts is not None
        return (self.tau * ctx.class_counts**-0.25,)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Returns the cross-entropy of the calibrated logits."""
        if self.tau == 0:
            return super().losses(logits, target)
        ensure(logits.ndim == 2, "model = FedLC: needs one class a sample, not one a pixel; choose another algorithm")
        margin = F.pad(teacher[0], (0, logits.shape[-1] - len(teacher[0])), value=torch.inf)
        z = torch.where(margin.isinf(), OUT, logits - margin)
        if self.denominator == "all":
            return super().losses(z, target)
        true = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return not_true(z, target).logsumexp(-1) - true
