"""The workloads: W1, W2 and the two nets of W3, the same numbers for every contestant.

W1 and W2 have random but fixed uint8 images of CIFAR's shape with a mean for each class, W3 the digits of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

METHODS = ("FedAvg", "FedSAM", "FedSMOO", "FedGMT")
RHO, BETA = 0.05, 10.0
TAU, EMA = 3.0, 0.95


def _block(channels: int, out: int, kernel: int, padding: int = 0) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)


def hsu_cnn() -> nn.Module:
    return nn.Sequential(
        *_block(3, 64, 5), *_block(64, 64, 5), nn.Flatten(),
        nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10),
    )  # fmt: skip


def flsam_cnn() -> nn.Module:
    return nn.Sequential(
        *_block(3, 32, 5, 2), *_block(32, 64, 5, 2), nn.Flatten(),
        nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def digits_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits_cnn() -> nn.Module:
    return nn.Sequential(*_block(1, 8, 3, 1), *_block(8, 16, 3, 1), nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Work:
    """One workload.

    Attributes:
        ours: Name of the net in fl_lightning, which rectifies after pooling.
        net: The same net as the papers' repositories write it: convolution, ReLU, pooling.
        clients: Their number.
        cohort: How many of them take part in a round.
        samples: Of a client, on average.
        steps: Local steps of a client.
        scale: Value of a pixel that becomes 1.
        augment: Crop and flip.
    """

    name: str
    ours: str
    net: Callable[[], nn.Module]
    clients: int
    cohort: int
    samples: float
    batch: int
    steps: int
    lr: float
    momentum: float
    threads: int
    scale: float
    augment: bool

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Returns all uint8 images ``(n, C, H, W)`` and labels."""
        return _digits() if self.name.startswith("W3") else _images(50_000)

    def parts(self, n: int) -> tuple[Tensor, ...]:
        """Returns each client's indices."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tensor_split(self.clients)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each client's images and labels."""
        x, y = self.arrays()
        return [(x[part], y[part]) for part in self.parts(len(y))]

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a client's batches of a round, as a plain loop makes them: one crop and one flip for a whole batch."""
        x, order = x.float().div_(self.scale), torch.empty(0, dtype=torch.int64)
        per_epoch = -(-len(y) // self.batch)
        for step in range(self.steps):
            if step % per_epoch == 0:
                order = torch.randperm(len(y), device=y.device)
            indices = order[step % per_epoch * self.batch :][: self.batch]
            yield self._augmented(x[indices]) if self.augment else x[indices], y[indices]

    @staticmethod
    def _augmented(x: Tensor) -> Tensor:
        top, left = torch.randint(9, (2,)).tolist()
        height, width = x.shape[-2:]
        x = F.pad(x, [4] * 4)[..., top : top + height, left : left + width]
        return x.flip(-1) if torch.rand(()) < 0.5 else x


@cache
def _images(n: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    means = rng.integers(0, 128, (10, 3, 32, 32), dtype=np.uint8)
    y = np.arange(n) % 10
    return torch.from_numpy(means[y] + rng.integers(0, 128, (n, 3, 32, 32), dtype=np.uint8)), torch.from_numpy(y)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1), torch.from_numpy(digits.target).long()


_W3: dict[str, Any] = {
    "clients": 50, "cohort": 10, "samples": 1797 / 50, "batch": 16, "steps": 3, "lr": 0.01, "momentum": 0.0,
    "threads": 1, "scale": 16.0, "augment": False,
}  # fmt: skip
_IMAGES: dict[str, Any] = {"clients": 100, "samples": 500, "threads": 2, "scale": 255.0, "augment": True}
WORKS = {
    work.name: work
    for work in (
        Work("W1", "HsuCNN", hsu_cnn, cohort=5, batch=64, steps=8, lr=0.01, momentum=0.0, **_IMAGES),
        Work("W2", "FLSAMCNN", flsam_cnn, cohort=10, batch=50, steps=50, lr=0.01, momentum=0.9, **_IMAGES),
        Work("W3-MLP", "DigitsMLP", digits_mlp, **_W3),
        Work("W3-CNN", "DigitsCNN", digits_cnn, **_W3),
    )
}


def work(settings: dict[str, Any]) -> Work:
    """Returns the workload of a contestant, with the changes of its settings."""
    names = {field.name for field in fields(Work)} - {"name"}
    return replace(WORKS[settings["work"]], **{key: value for key, value in settings.items() if key in names})
