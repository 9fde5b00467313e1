"""The partitions of FL-SAM, the code of FedGMT's authors."""

import math
from collections.abc import Sequence

import numpy as np

from fl_lightning.core import UserError, numpy_generator, require
from fl_lightning.data.partition.base import Indices, Partition, concentration, members, replay

GROUP = 10
"""Number of clients among which a chunk of the data is divided."""

TRIES = 100_000
"""Draws for one group, a few seconds, until a split counts as impossible."""


class FLSAMPath(Partition):
    """Path(r) of FedGMT: every class is cut into equal shards, and each client gets r of them.

    A class is cut in the order of its samples. The labels of all shards are shuffled, and a client gets a random shard
    of each of its r labels, so it has AT MOST r classes: a label may occur twice. The draws are our own.

    Args:
        shards: Shards of a client, the paper's r (10, 4, 2).

    Raises:
        UserError: If shards is below 1, or (on use) the classes cannot be cut into equally many shards.
    """

    def __init__(self, shards: int) -> None:
        require(shards >= 1, "data.partition.shards", shards, "use 1 or more")
        self.shards = shards

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        each, over = divmod(self.shards * num_clients, num_classes)
        if over:
            fit = num_classes // math.gcd(num_classes, num_clients)
            raise UserError(
                f"data.partition.shards = {self.shards}: {num_clients} clients need {self.shards * num_clients} shards,"
                f" which {num_classes} classes cannot give equally; use a multiple of {fit}, or other clients"
            )
        rng = numpy_generator(seed, "partition")
        order = rng.permutation(np.repeat(np.arange(num_classes), each)).reshape(num_clients, self.shards)
        piles = [np.array_split(pool, each) for pool in members(labels, num_classes)]
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

    def __init__(self, alpha: float, imbalance: float = 2.0) -> None:
        self.alpha = concentration("alpha", alpha)
        require(math.isfinite(imbalance) and imbalance >= 1, "data.partition.imbalance", imbalance, "use 1 or more")
        self.imbalance = imbalance

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        kept = self._long_tail(labels, num_classes, replay(seed))
        rng = replay(seed)
        rng.shuffle(kept)
        step = int(GROUP / num_clients * len(kept))
        lists: list[Indices] = []
        for first in range(0, num_clients, GROUP):
            width = min(GROUP, num_clients - first)
            start = first // GROUP * step
            stop = start + step if first + GROUP < num_clients else len(kept)
            chunk = kept[start:stop]
            pools = [chunk[labels[chunk] == c] for c in range(num_classes)]
            lists += self._divide(pools, width, rng)
        return np.array_split(np.concatenate(lists), num_clients)

    def _long_tail(self, labels: Indices, num_classes: int, rng: np.random.RandomState) -> Indices:
        kept = []
        for c, pool in enumerate(members(labels, num_classes)):
            rng.shuffle(pool)
            share = (1 / self.imbalance) ** (c / max(num_classes - 1, 1))
            kept.append(pool[: int(len(labels) / num_classes * share)])
        return np.concatenate(kept)

    def _divide(self, pools: list[Indices], width: int, rng: np.random.RandomState) -> list[Indices]:
        """Divides a chunk, given by class, among ``width`` clients."""
        share = sum(map(len, pools)) / width
        for _ in range(TRIES):
            held = np.zeros(width, np.int64)
            cuts = []
            for pool in pools:
                p = rng.dirichlet(np.full(width, self.alpha)) * (held < share)
                # if all are 0 (or NaN, for tiny alpha), 0/0 in the official code gives the class to the last client
                ends = (p / p.sum()).cumsum() * len(pool) if p.sum() > 0 else np.zeros(width)
                cut = ends[:-1].astype(np.int64)
                cuts.append(cut)
                held += np.diff(cut, prepend=0, append=len(pool))
            if held.min() >= int(0.5 * share):
                shares = [np.split(pool, at) for pool, at in zip(pools, cuts, strict=True)]
                return [np.concatenate(of_client) for of_client in zip(*shares, strict=True)]
        raise UserError(
            f"data.partition.alpha = {self.alpha}: {TRIES} draws gave no group of {width} clients in which each has "
            "half of its share of the samples; use a larger alpha, or data with more classes"
        )
