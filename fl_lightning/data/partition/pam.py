"""Pachinko allocation over coarse and fine labels."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.core import numpy_generator, require
from fl_lightning.data.partition.base import Indices, Partition, concentration, members, sizes

CIFAR100_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15,
    0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19,
    18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip
"""Coarse label of each of CIFAR-100's 100 classes, both numbered in the alphabetical order of their names."""


class PAM(Partition):
    """CIFAR100-PAM: pachinko allocation of Reddi et al. 2021 (there 500 clients of 100 samples each).

    Clients are filled one after another. Each draws q ~ Dir(alpha) over the coarse labels and, for each of them,
    r ~ Dir(beta) over its classes; then sample by sample a coarse label by q, a class by r, and an unused sample of it.
    A class that is used up leaves r, and a coarse label without classes leaves q; the rest is renormalised. A new
    client draws over what is left. The generator of the published split is not public: this follows its description.

    Args:
        alpha: Concentration of every coarse label.
        beta: Concentration of every class within its coarse label.
        coarse: Coarse label of each class, from 0; null for CIFAR-100's.

    Raises:
        UserError: If alpha or beta is not above 0, coarse has negative labels, or (on use) not one for every class.
    """

    def __init__(self, alpha: float = 0.1, beta: float = 10.0, coarse: list[int] | None = None) -> None:
        self.alpha = concentration("alpha", alpha)
        self.beta = concentration("beta", beta)
        self.coarse = coarse
        require(coarse is None or min(coarse, default=0) >= 0, "data.partition.coarse", coarse, "number them from 0")

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        coarse = np.array(CIFAR100_COARSE if self.coarse is None else self.coarse)
        need = f"give the coarse label of each of the {num_classes} classes (null is for CIFAR-100 only)"
        require(len(coarse) == num_classes, "data.partition.coarse", self.coarse, need)
        rng = numpy_generator(seed, "partition")
        pools = [rng.permutation(pool).tolist() for pool in members(labels, num_classes)]
        parts = []
        for size in sizes(len(labels), num_clients, 0.0):
            part: list[int] = []
            q = r = np.zeros(0)
            while len(part) < size:
                left = np.array([bool(pool) for pool in pools])
                if not part:
                    q, r = self._draw(coarse, left, rng)
                r = r * left
                within = np.bincount(coarse, r)
                q = q * (within > 0)
                if not q.any():  # by rounding, the remaining classes had no share
                    q, r = self._draw(coarse, left, rng)
                    within = np.bincount(coarse, r)
                p = (q / q.sum())[coarse] * r / np.where(within > 0, within, 1)[coarse]
                for c in rng.choice(num_classes, size - len(part), p=p):
                    part.append(pools[c].pop())
                    if not pools[c]:  # from here on the probabilities differ
                        break
            parts.append(np.array(part, np.int64))
        return parts

    def _draw(
        self, coarse: Indices, left: np.ndarray[tuple[int], np.dtype[np.bool_]], rng: np.random.Generator
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Draws shares of the coarse labels and, within these, of the classes: 0 for those that are used up."""
        q, r = np.zeros(coarse.max() + 1), np.zeros(len(coarse))
        alive = np.unique(coarse[left])
        q[alive] = rng.dirichlet(np.full(len(alive), self.alpha))
        for label in alive:
            classes = np.flatnonzero((coarse == label) & left)
            r[classes] = rng.dirichlet(np.full(len(classes), self.beta))
        return q, r
