"""Published data sets: their numbers and shapes, and random samples in their place where an estimate needs no more."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.data.streaming import IndexedSamples


@dataclass(frozen=True)
class Published:
    """What is known of a published data set.

    Attributes:
        train: Number of training samples.
        test: Number of test samples.
        shape: Shape of a sample, as stored.
        classes: Number of classes.
        tokens: Number of tokens; None: samples are images, uint8.
    """

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    tokens: int | None = None

    def random(self, stream: bool) -> tuple[Any, Any, Any, Any]:
        """Returns random data of this form, as `FederatedDataModule.load` does; streamed, all samples are equal."""
        draw, kind = np.random.default_rng(0), np.uint8 if self.tokens is None else np.int64
        found = list[Any]()
        for n in (self.train, self.test):
            x = draw.integers(0, self.tokens or 256, self.shape if stream else (n, *self.shape), dtype=kind)
            found += [_same(x, n) if stream else x, np.arange(n) % self.classes]
        x_train, y_train, x_test, y_test = found
        return x_train, y_train, x_test, y_test


def _same(sample: Any, count: int) -> IndexedSamples:
    return IndexedSamples("data", count, lambda _: sample, sample)
