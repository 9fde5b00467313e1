"""Differential privacy whose clipping norm follows a quantile of the uploads' norms."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.core import Init, Interval, NonNegativeInt, Positive, Probability, State, Uploads, require
from fl_lightning.trainer.aggregation.accountant import Method
from fl_lightning.trainer.aggregation.base import Received
from fl_lightning.trainer.aggregation.privacy import KEY, LARGEST, SMALLEST, GaussianPrivacy, Noise, Norm


class AdaptivePrivacy(GaussianPrivacy):
    """`GaussianPrivacy` whose clipping norm follows a quantile of the norms (Andrew et al., NeurIPS 2021).

    Each phase also releases, with noise, the share of clients with a norm of at most C. The sums get more noise, so
    that both releases together have ``noise_multiplier``. Then ``C <- C exp(-clip_lr (share - quantile))``.

    Args:
        clip: Initial value of C.
        noise_multiplier: As for `GaussianPrivacy`.
        epsilon: As for `GaussianPrivacy`.
        delta: As for `GaussianPrivacy`.
        accountant: As for `GaussianPrivacy`.
        quantile: Target share of clients whose norm is at most C.
        clip_lr: Learning rate of C.
        count_noise: Standard deviation of the noise in the number of these clients; null: a twentieth of a cohort, but
            at least ``noise_multiplier``.
        noise_seed: As for `GaussianPrivacy`.
    """

    released = {"privacy_below": [1]}

    def __init__(
        self,
        clip: Norm = 0.1,
        noise_multiplier: Noise | None = None,
        epsilon: Positive | None = None,
        delta: Probability = 1e-5,
        accountant: Method = "RDP",
        quantile: Probability = 0.5,
        clip_lr: Annotated[float, Interval("[0, 10]")] = 0.2,
        count_noise: Noise | None = None,
        noise_seed: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(clip, noise_multiplier, epsilon, delta, accountant, noise_seed=noise_seed)
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
        """Standard deviation of the count's noise."""
        return max(self.accountant.size / 20, self.accountant.noise) if self.count_noise is None else self.count_noise

    @property
    def identity(self) -> str:
        return f"{super().identity}, quantile={self.quantile}, clip_lr={self.clip_lr}, count_noise={self.count_noise}"

    def bound_of(self, server: State) -> float:
        return float(server.privacy_clip)

    def noise_std(self, clip: float) -> float:
        """Returns ``(z^-2 - (2 sigma_b)^-2)^(-1/2) C``, the paper's Theorem 1."""
        z = self.accountant.noise
        return clip * z / math.sqrt(1 - (z / (2 * self.count_std)) ** 2) if z else 0.0

    def sums(self, received: Received) -> dict[str, tuple[Tensor, float]]:
        clip = self.bound_of(received.server)
        sums, norms = self.clipped(received, clip)
        below = ((norms <= clip).to(norms) - 0.5).sum(0, keepdim=True)  # from -1/2 to 1/2 for each client
        found = {name: (total, self.noise_std(clip)) for name, total in sums.items()}
        return found | {"privacy_below": (below, self.count_std if self.accountant.noise else 0.0)}

    def phase_end(self, server: State, uploads: Uploads) -> State:
        clip = server.privacy_clip * torch.exp(-self.clip_lr * ((uploads.mean("privacy_below") + 0.5) - self.quantile))
        return server.replace(privacy_clip=clip.clamp(SMALLEST, LARGEST))

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        return {**super().metrics(uploads, known, server), "privacy/clip": self.bound_of(server)}
