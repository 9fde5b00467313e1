"""The partitions of FL-Simulator (FedSMOO, appendix B.3), draw by draw."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import require
from fl_lightning.data.partition.base import Indices, Partition, concentration, members, replay

Floats = NDArray[np.float64]


class FLSimulator(Partition):
    """Base class: each client has its own distribution over the classes, and clients draw in random order.

    All clients have floor(N / clients) samples, the first one also the remainder. Until all are full, a client and
    one of its classes are drawn, and the client gets the next unused sample of that class. With replacement, the same
    labels and the seed of the official program (``data.seed``, 20 by default there), the draws are those of its code:
    ``np.random.seed``, ``permutation``, the distributions, ``randint``, ``uniform``.

    Args:
        replacement: Whether a class that is used up starts again (as in the paper and its code: some samples then
            occur several times, and others never); or is left out, so that every sample is held once.
    """

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement

    @abstractmethod
    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """Each client's distribution over the classes and its cumulative sums, ``(num_clients, num_classes)``."""

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        rng = replay(seed)
        order = rng.permutation(len(labels))
        pools = [order[positions].tolist() for positions in members(labels[order], num_classes)]
        if self.replacement and [] in pools:
            require(False, "data", f"no sample of class {pools.index([])}", "number the classes without gaps")
        left = [len(pool) for pool in pools]
        shares, sums = self.distributions(rng, num_clients, num_classes)
        bounds: list[list[float]] = sums.tolist()
        room = [len(labels) // num_clients] * num_clients
        room[0] += len(labels) % num_clients
        parts: list[list[int]] = [[] for _ in room]
        missing = len(labels)
        while missing:
            k = rng.randint(num_clients)
            if not room[k]:
                continue
            room[k] -= 1
            missing -= 1
            c = _draw(rng, bounds[k])
            while not left[c]:
                if self.replacement:
                    left[c] = len(pools[c])
                    c = _draw(rng, bounds[k])
                else:
                    c = _draw_left(rng, shares[k], np.array(left))
            left[c] -= 1
            parts[k].append(pools[c][left[c]])
        return [np.array(part, np.int64) for part in parts]


class FLSimDirichlet(FLSimulator):
    """Dirichlet split of FL-Simulator (FedSMOO): each client's class distribution ~ Dir(alpha) with alpha per CLASS.

    Args:
        alpha: Concentration of every class, the paper's u (0.1, 0.6): that of :class:`Dirichlet` divided by the number
            of classes.
        replacement: As for :class:`FLSimulator`.

    Raises:
        UserError: If alpha is not above 0; on use also if it is too small, or if a class is empty with replacement.
    """

    def __init__(self, alpha: float, replacement: bool = True) -> None:
        super().__init__(replacement)
        self.alpha = concentration("alpha", alpha)

    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """See :class:`FLSimulator`."""
        shares = rng.dirichlet([self.alpha] * num_classes, size=num_clients)
        small = "too small for NumPy's legacy generator, which gave a client no class; use a larger one"
        require(not np.isnan(shares).any(), "data.partition.alpha", self.alpha, small)
        return shares, shares.cumsum(1)


class FLSimPathological(FLSimulator):
    """Pathological split of FL-Simulator (FedSMOO): each client draws evenly from a few random classes.

    Args:
        classes: Classes of a client, the paper's c (3, 6).
        replacement: As for :class:`FLSimulator`. Without it, a client whose classes are used up gets others.

    Raises:
        UserError: If classes is below 1, or (on use) above the number of classes; on use also if a class is empty.
    """

    def __init__(self, classes: int, replacement: bool = True) -> None:
        super().__init__(replacement)
        require(classes >= 1, "data.partition.classes", classes, "use 1 or more")
        self.classes = classes

    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """See :class:`FLSimulator`."""
        most = f"use at most the number of classes, {num_classes}"
        require(self.classes <= num_classes, "data.partition.classes", self.classes, most)
        chosen = np.zeros((num_clients, num_classes))
        chosen[:, : self.classes] = 1
        for row in chosen:
            rng.shuffle(row)
        return chosen / self.classes, chosen.cumsum(1) / self.classes


def _draw(rng: np.random.RandomState, bounds: list[float]) -> int:
    """Draws a class by inverse CDF; the first one if rounding leaves the last bound below the draw, as in the code."""
    return bisect_left(bounds, rng.uniform()) % len(bounds)


def _draw_left(rng: np.random.RandomState, shares: Floats, left: NDArray[Any]) -> int:
    """Draws a class that is not used up: by the client's shares of those, or any if it has none of them."""
    weights = np.where(left, shares, 0.0)
    bounds = (weights if weights.any() else np.where(left, 1.0, 0.0)).cumsum()
    return int(np.argmax(rng.uniform() * bounds[-1] < bounds))
