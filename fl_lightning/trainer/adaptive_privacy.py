"""Differential privacy with a clip that follows a quantile of the norms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.core import Init, State, Uploads, require
from fl_lightning.trainer.accountant import Method
from fl_lightning.trainer.aggregation import Received
from fl_lightning.trainer.privacy import KEY, GaussianPrivacy


class AdaptivePrivacy(GaussianPrivacy):
    """`GaussianPrivacy` whose clip follows a quantile of the norms (Andrew et al., NeurIPS 2021).

    In every phase the share of clients with a norm of at most C is released, too, with noise; the sums get so much more
    noise that both together have ``noise_multiplier``. Then ``C <- C exp(-clip_lr (share - quantile))``.

    Args:
        clip: The first C.
        noise_multiplier: As for `GaussianPrivacy`.
        epsilon: As for `GaussianPrivacy`.
        delta: As for `GaussianPrivacy`.
        accountant: As for `GaussianPrivacy`.
        quantile: Share of the clients that C leaves as they are.
        clip_lr: Learning rate of C.
        count_noise: Standard deviation of the noise of the number of these clients; null: a twentieth of a cohort, at
            least ``noise_multiplier``.
    """

    released = {"privacy_below": [1]}

    def __init__(
        self,
        clip: float = 0.1,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        accountant: Method = "RDP",
        quantile: float = 0.5,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
    ) -> None:
        super().__init__(clip, noise_multiplier, epsilon, delta, accountant)
        require(0 < quantile < 1, f"{KEY}.quantile", quantile, "above 0 and below 1")
        require(0 <= clip_lr < math.inf, f"{KEY}.clip_lr", clip_lr, "0 or more")
        self.quantile, self.clip_lr, self.count_noise = quantile, clip_lr, count_noise
        self.server_state: Mapping[str, Init] = {"privacy_clip": clip}

    def check_round(self) -> None:
        super().check_round()
        z = self.accountant.noise
        require(
            2 * self.count_std > z or not z,
            f"{KEY}.count_noise",
            self.count_noise,
            f"above half of {z:.4g}, the multiplier",
        )

    @property
    def count_std(self) -> float:
        """The standard deviation of the count's noise."""
        least = max(self.accountant.size / 20, self.accountant.noise)
        return least if self.count_noise is None else self.count_noise

    @property
    def identity(self) -> str:
        return f"{super().identity}, quantile={self.quantile}, clip_lr={self.clip_lr}, count_noise={self.count_noise}"

    def bound_of(self, server: State) -> float:
        return float(server.privacy_clip)

    def noise_std(self, clip: float) -> float:
        """The paper's Theorem 1: ``(z^-2 - (2 sigma_b)^-2)^(-1/2) C``."""
        z = self.accountant.noise
        return clip * z / math.sqrt(1 - (z / (2 * self.count_std)) ** 2) if z else 0.0

    def sums(self, received: Received) -> dict[str, tuple[Tensor, float]]:
        clip = self.bound_of(received.server)
        sums, norms = self.clipped(received, clip)
        below = ((norms <= clip).to(norms) - 0.5).sum(0, keepdim=True)  # from -1/2 to 1/2 for each client
        found = {name: (total, self.noise_std(clip)) for name, total in sums.items()}
        return found | {"privacy_below": (below, self.count_std if self.accountant.noise else 0.0)}

    def phase_end(self, server: State, uploads: Uploads) -> State:
        share = uploads.mean("privacy_below") + 0.5
        return server.replace(privacy_clip=server.privacy_clip * torch.exp(-self.clip_lr * (share - self.quantile)))

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        return {**super().metrics(uploads, known, server), "privacy/clip": self.bound_of(server)}
