"""MOON: model-contrastive learning."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ClientContext, NonNegative, Positive, State, Upload


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
        """Returns the received model, and the client's last local one."""
        return received.w, client.w_local

    def losses(self, logits: Any, target: Tensor, *teacher: Any) -> Tensor:
        """``CE - mu log(e^(cos(z, z_glob)/tau) / (e^(cos(z, z_glob)/tau) + e^(cos(z, z_prev)/tau)))``."""
        (logits, z), (_, z_glob), (_, z_prev) = logits, *teacher
        near, far = (F.cosine_similarity(z, other, dim=-1) for other in (z_glob, z_prev))
        return super().losses(logits, target) - self.mu * F.logsigmoid((near - far) / self.tau)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Keeps the local model."""
        return {"w": w}, client.replace(w_local=w)
