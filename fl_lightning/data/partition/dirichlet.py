"""Shuffled samples, the balanced Dirichlet split of Hsu et al., and Pachinko allocation."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fl_lightning.core import NonNegative, NonNegativeInt, Positive, ensure, numpy_generator, require
from fl_lightning.data.partition.base import Indices, Partition, cut, members, sizes

CIFAR100_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15,
    0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19,
    18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip
"""Coarse label of each of CIFAR-100's 100 classes, both numbered in the alphabetical order of their names."""


class IID(Partition):
    """Shuffled samples in parts of equal size (to within one), or sizes by a power law.

    Args:
        power: Client k has a share proportional to ``(k+1)**-power`` of the samples, and at least one; 0: equal shares.
        stratified: Whether each class is also distributed evenly (to within one sample), as FL-Simulator does for
            CIFAR-100.

    Raises:
        UserError: If power is negative or not finite, or given with stratified.
    """

    def __init__(self, power: NonNegative = 0.0, stratified: bool = False) -> None:
        self.power = power
        require(not (power and stratified), "data.partition.power", power, "stratified clients have equal sizes; use 0")
        self.stratified = self.by_class = stratified

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        order = numpy_generator(seed, "partition").permutation(len(labels))
        if self.stratified:
            order = order[labels[order].argsort(kind="stable")]
            return [order[client::num_clients] for client in range(num_clients)]
        return cut(order, sizes(len(labels), num_clients, self.power))


class Dirichlet(Partition):
    """Balanced Dirichlet split of Hsu et al. 2019: clients of equal size, class shares ~ Dir(alpha / num_classes).

    The generator of the published splits is not public; the rule here was inferred from them. Clients are filled in
    order. Each draws shares q of the classes that are left, and takes the differences of ``round(n * cumsum(q))`` from
    their pools as long as these last; a new draw distributes what is missing. So late clients get leftovers.

    Args:
        alpha: TOTAL concentration, alpha / num_classes for each class; some papers print the value per class (0.005 for
            0.05 with 10 classes). 0 gives every client one class, and each class as many clients (to within one),
            whatever its size. Large values approach equal shares.
        power: Sizes as in :class:`IID`; 0: equal.
        draws: How a client gets its samples by q: "rounded", as above; or "multinomial", class by class with q
            renormalised when a class is used up, as in Google's public generator, which gives different splits.

    Raises:
        UserError: If alpha or power is negative or not finite, or power is given with alpha = 0.
    """

    by_class = True

    def __init__(
        self, alpha: NonNegative = 0.0, power: NonNegative = 0.0, draws: Literal["rounded", "multinomial"] = "rounded"
    ) -> None:
        require(not power or alpha > 0, "data.partition.power", power, "with alpha = 0 classes set the sizes; use 0")
        self.alpha, self.power, self.draws = alpha, power, draws

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        share = self.alpha / num_classes
        require(
            share > 0 or self.alpha == 0,
            "data.partition.alpha",
            self.alpha,
            f"is 0 when it is divided by {num_classes} classes; use 0 for one class a client, or a larger one",
        )
        rng = numpy_generator(seed, "partition")
        pools = [rng.permutation(pool) for pool in members(labels, num_classes)]
        if self.alpha == 0:
            return self._one_class_each(pools, num_clients)
        left = np.array([len(pool) for pool in pools])
        count = self._rounded if self.draws == "rounded" else self._multinomial
        parts = []
        for size in sizes(len(labels), num_clients, self.power):
            counts = count(size, left, rng)
            left -= counts
            parts.append(np.concatenate([p[a : a + n] for p, a, n in zip(pools, left, counts, strict=True)]))
        return parts

    def _rounded(self, size: int, left: Indices, rng: np.random.Generator) -> Indices:
        """Draws how many samples of each class a client of ``size`` gets from pools of ``left``: ``(num_classes,)``."""
        counts = np.zeros_like(left)
        while missing := size - counts.sum():
            # A Dirichlet with used-up classes zeroed and renormalised is the Dirichlet over the others.
            classes = np.flatnonzero(left - counts)
            q = rng.dirichlet(np.full(len(classes), self.alpha / len(left)))
            wanted = np.diff(np.rint(missing * q.cumsum()).astype(np.int64), prepend=0)
            counts[classes] += np.minimum(wanted, (left - counts)[classes])
        return counts

    def _multinomial(self, size: int, left: Indices, rng: np.random.Generator) -> Indices:
        """Draws the same as `_rounded`, but sample by sample."""
        counts, q = np.zeros_like(left), np.zeros(len(left))
        while missing := size - counts.sum():
            remaining = counts < left
            q = q * remaining
            if not q.any():  # the first draw; or, by rounding, the remaining classes had no share
                q[remaining] = rng.dirichlet(np.full(remaining.sum(), self.alpha / len(left)))
            for c in rng.choice(len(left), missing, p=q / q.sum()):
                counts[c] += 1
                if counts[c] == left[c]:
                    break
        return counts

    def _one_class_each(self, pools: list[Indices], num_clients: int) -> list[Indices]:
        # If the classes do not divide the clients evenly, the largest classes get one more.
        pools = sorted((p for p in pools if len(p)), key=len, reverse=True)
        ensure(
            num_clients >= len(pools),
            f"data.partition.alpha = 0 gives every client one class, so {len(pools)} classes need at least "
            f"{len(pools)} clients, not num_clients = {num_clients}; use more clients or alpha > 0",
        )
        turns = [len(range(c, num_clients, len(pools))) for c in range(len(pools))]
        shares = [np.array_split(pool, n) for pool, n in zip(pools, turns, strict=True)]
        return [shares[k % len(pools)][k // len(pools)] for k in range(num_clients)]


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

    by_class = True

    def __init__(
        self, alpha: Positive = 0.1, beta: Positive = 10.0, coarse: list[NonNegativeInt] | None = None
    ) -> None:
        self.alpha, self.beta, self.coarse = alpha, beta, coarse

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        coarse = np.array(CIFAR100_COARSE if self.coarse is None else self.coarse)
        require(
            len(coarse) == num_classes,
            "data.partition.coarse",
            self.coarse,
            f"give the coarse label of each of the {num_classes} classes (null is for CIFAR-100 only)",
        )
        rng = numpy_generator(seed, "partition")
        pools = [rng.permutation(pool).tolist() for pool in members(labels, num_classes)]
        parts = []
        for size in sizes(len(labels), num_clients, 0.0):
            part: list[int] = []
            q, r = np.zeros(coarse.max() + 1), np.zeros(num_classes)
            while len(part) < size:
                left = np.array([bool(pool) for pool in pools])
                r = r * left
                totals = np.bincount(coarse, r)
                q = q * (totals > 0)
                if not q.any():  # the first draw; or, by rounding, the remaining classes had no share
                    q, r = self._draw(coarse, left, rng)
                    totals = np.bincount(coarse, r)
                p = (q / q.sum())[coarse] * r / np.where(totals > 0, totals, 1)[coarse]
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
