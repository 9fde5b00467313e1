"""The partitions of two official codes: FL-SAM (FedGMT), and FL-Simulator (FedSMOO, appendix B.3) draw by draw."""

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import Interval, Positive, PositiveInt, UserError, ensure, numpy_generator, require
from fl_lightning.data.partition.base import Indices, Partition, members, replay

Floats = NDArray[np.float64]

GROUP = 10
"""Number of clients among which a chunk of the data is divided."""

TRIES = 100_000
"""Draws for one group, a few seconds, until a split of up to a hundred classes counts as impossible."""

AT_ONCE = 10**6
"""Random numbers that are drawn and looked at together."""


class FLSAMPath(Partition):
    """Path(r) of FedGMT: every class is cut into equal shards, and each client gets r of them.

    A class is cut in the order of its samples. The labels of all shards are shuffled, and a client gets a random shard
    of each of its r labels, so it has AT MOST r classes: a label may occur twice. The draws are our own.

    Args:
        shards: Shards of a client, the paper's r (10, 4, 2).

    Raises:
        UserError: If shards is below 1, or (on use) the classes cannot be cut into equally many shards.
    """

    by_class = True

    def __init__(self, shards: PositiveInt) -> None:
        self.shards = shards

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        require(
            self.shards * num_clients <= len(labels),
            "data.partition.shards", self.shards, f"{num_clients} clients and {len(labels)} samples; give fewer",
        )  # fmt: skip
        per_class, rest = divmod(self.shards * num_clients, num_classes)
        fit = num_classes // math.gcd(num_classes, num_clients)
        ensure(
            rest == 0,
            f"data.partition.shards = {self.shards}: {num_clients} clients need {self.shards * num_clients} shards,"
            f" which {num_classes} classes cannot give equally; use a multiple of {fit}, or other clients",
        )
        rng = numpy_generator(seed, "partition")
        order = rng.permutation(np.repeat(np.arange(num_classes), per_class)).reshape(num_clients, self.shards)
        piles = [np.array_split(pool, per_class) for pool in members(labels, num_classes)]
        return [np.concatenate([piles[c].pop(rng.integers(len(piles[c]))) for c in row]) for row in order]


class FLSAMDirichlet(Partition):
    """Dirichlet split of FedGMT with a long tail: each class is shared out over clients ~ Dir(alpha).

    Class j keeps ``int(N / C * imbalance**(-j / (C - 1)))`` random samples. These are shuffled and cut into a chunk for
    every ten clients. Within a chunk each class is divided by p ~ Dir(alpha) over the ten, 0 for those that already
    have their share of samples; all is drawn again until none has less than half of its share. Finally, all clients'
    lists are concatenated and cut into equal parts, so a client may have the end of one list and the start of another.

    The draws follow the official program (``data.seed``, 1 by default there). Its known class counts by client agree;
    which samples of a class are kept was not compared.

    Args:
        alpha: Concentration of every client, the paper's r (1, 0.1, 0.01).
        imbalance: Size of the first class over that of the last one, 1 for no long tail; its inverse is the code's
            ``-if`` (0.5, so 2).

    Raises:
        UserError: If alpha is not above 0 or imbalance below 1; on use, if no split is found.
    """

    by_class = True

    def __init__(self, alpha: Positive, imbalance: Annotated[float, Interval("[1, inf)")] = 2.0) -> None:
        self.alpha, self.imbalance = alpha, imbalance

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        kept = self._long_tail(labels, num_classes, replay(seed))
        rng = replay(seed)
        rng.shuffle(kept)
        step, groups = int(GROUP / num_clients * len(kept)), math.ceil(num_clients / GROUP)
        lists: list[Indices] = []
        for group, chunk in enumerate(np.split(kept, step * np.arange(1, groups))):  # the last one has the remainder
            pools = [chunk[positions] for positions in members(labels[chunk], num_classes)]
            lists += self._divide(pools, min(GROUP, num_clients - group * GROUP), rng)
        return np.array_split(np.concatenate(lists), num_clients)

    def _long_tail(self, labels: Indices, num_classes: int, rng: np.random.RandomState) -> Indices:
        selected = []
        for c, pool in enumerate(members(labels, num_classes)):
            rng.shuffle(pool)
            share = (1 / self.imbalance) ** (c / max(num_classes - 1, 1))
            selected.append(pool[: int(len(labels) / num_classes * share)])
        return np.concatenate(selected)

    def _divide(self, pools: list[Indices], width: int, rng: np.random.RandomState) -> list[Indices]:
        """Divides a chunk, given by class, among ``width`` clients."""
        lengths, alpha = [len(pool) for pool in pools], np.full(width, self.alpha)
        # the more classes, the less the sums differ from draw to draw: fewer draws tell that none will do
        tries, done = min(TRIES, max(30, int(TRIES * (100 / len(pools)) ** 2))), 0
        while done < tries:
            n = min(2 * done + 1, tries - done, max(1, AT_ONCE // (width * len(pools))))
            before, done = rng.get_state(), done + n
            cuts, held = _cuts(rng.dirichlet(alpha, (n, len(pools))), lengths)
            valid = np.flatnonzero(held.min(1) >= int(0.5 * (sum(lengths) / width)))
            if len(valid):
                rng.set_state(before)
                rng.dirichlet(alpha, (int(valid[0]) + 1, len(pools)))  # as the official program, which stops there
                shares = [np.split(pool, cut[valid[0]]) for pool, cut in zip(pools, cuts, strict=True)]
                return [np.concatenate(parts) for parts in zip(*shares, strict=True)]
        few = sum(lengths) < width * len(pools)  # whole samples: the last client gets what is cut off of the others
        remedy = "fewer clients or Dirichlet" if few else "a larger alpha, or data with more classes"
        raise UserError(
            f"data.partition.alpha = {self.alpha}: {tries} draws gave no group of {width} clients in which each has "
            f"half of its share of the samples; use {remedy}"
        )


def _cuts(draws: Floats, lengths: list[int]) -> tuple[list[Indices], Indices]:
    """Returns where each of ``n`` draws cuts each class, ``(n, width - 1)``, and what clients hold, ``(n, width)``.

    Args:
        draws: Each class's shares of the clients, ``(n, classes, width)``.
        lengths: Samples of each class.
    """
    n, _, width = draws.shape
    share, held, cuts = sum(lengths) / width, np.zeros((n, width), np.int64), list[Indices]()
    with np.errstate(invalid="ignore", divide="ignore"):
        for shares, length in zip(draws.swapaxes(0, 1), lengths, strict=True):
            p = shares * (held < share)
            total = p.sum(1, keepdims=True)
            # if all are 0 (or NaN, for tiny alpha), 0/0 in the official code gives the class to the last client
            ends = np.where(total > 0, (p / total).cumsum(1) * length, 0.0)
            cuts.append(ends[:, :-1].astype(np.int64))
            held += np.diff(cuts[-1], prepend=0, append=length)
    return cuts, held


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

    by_class = True

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement

    @abstractmethod
    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """Returns each client's distribution over the classes, and cumulative sums, ``(num_clients, num_classes)``."""

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        rng = replay(seed)
        order = rng.permutation(len(labels))
        pools = [order[positions].tolist() for positions in members(labels[order], num_classes)]
        if self.replacement and [] in pools:
            remedy = "number the classes without gaps, or set data.partition.replacement to false"
            require(False, "data", f"no sample of class {pools.index([])}", remedy)
        left = np.array([len(pool) for pool in pools])
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
                    c = _draw_left(rng, shares[k], left)
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

    def __init__(self, alpha: Positive, replacement: bool = True) -> None:
        super().__init__(replacement)
        self.alpha = alpha

    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """See :class:`FLSimulator`."""
        shares = rng.dirichlet([self.alpha] * num_classes, size=num_clients)
        require(
            not np.isnan(shares).any(),
            "data.partition.alpha",
            self.alpha,
            "too small for NumPy's legacy generator, which gave a client no class; use a larger one",
        )
        return shares, shares.cumsum(1)


class FLSimPathological(FLSimulator):
    """Pathological split of FL-Simulator (FedSMOO): each client draws evenly from a few random classes.

    Args:
        classes: Classes of a client, the paper's c (3, 6).
        replacement: As for :class:`FLSimulator`. Without it, a client whose classes are used up gets others.

    Raises:
        UserError: If classes is below 1, or (on use) above the number of classes; on use also if a class is empty.
    """

    def __init__(self, classes: PositiveInt, replacement: bool = True) -> None:
        super().__init__(replacement)
        self.classes = classes

    def distributions(self, rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[Floats, Floats]:
        """See :class:`FLSimulator`."""
        require(
            self.classes <= num_classes,
            "data.partition.classes",
            self.classes,
            f"use at most the number of classes, {num_classes}",
        )
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
