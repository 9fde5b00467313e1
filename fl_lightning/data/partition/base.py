"""The base class of all partitions, the check of their result, and the samples of each client."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import Checked, UserError, ensure, numpy_generator, require

Indices = NDArray[np.int64]


class Partition(Checked, ABC, key="data.partition"):
    """Base class: subclasses implement :meth:`split`; calling the object also checks the result.

    A split is a function of labels, seed and parameters. Random numbers come from
    ``fl_lightning.core.rng.numpy_generator(seed, "partition")``, or, to reproduce the draws of an official program,
    from :func:`replay`; never from a global generator.
    """

    fixed: ClassVar[bool] = False
    """Whether the indices are given, and so refer to the whole training set."""

    by_class: bool = False
    """Whether the partition needs the class of each sample. Without classes, ``labels`` are targets ``(N, k)``."""

    replacement: bool = False
    """Whether a sample may occur several times, at one client or at several."""

    def __call__(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> list[Indices]:
        """Divides the samples.

        Args:
            labels: Class of every training sample, ``(N,)``, in ``0..num_classes-1``.
            num_clients: Number of clients.
            num_classes: Number of classes.
            seed: Seed of the split.

        Returns:
            One index array per client, none empty; no index occurs twice, unless :attr:`replacement` is set.

        Raises:
            UserError: If the split is impossible or wrong.
        """
        name, parts = type(self).__name__, self._parts(labels, num_clients, num_classes, seed)
        check(parts, len(labels), num_clients, name, self.replacement)
        if not type(self).__module__.startswith("fl_lightning."):  # of a user's, the next process may get another one
            repeated = self._parts(labels, num_clients, num_classes, seed)
            ensure(
                len(parts) == len(repeated) and all(map(np.array_equal, parts, repeated)),
                f"{name}.split: gives another split when it is called again; draw from "
                'fl_lightning.core.numpy_generator(seed, "partition")',
            )
        return parts

    def _parts(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> list[Indices]:
        parts: Any = self.split(labels, num_clients, num_classes, seed)  # that of a user's may be anything
        listed = isinstance(parts, Sequence | np.ndarray)
        arrays = [np.asarray(p) for p in parts] if listed else []
        good = listed and all(p.ndim == 1 and (p.dtype.kind in "iu" or not p.size) for p in arrays)
        ensure(good, f"{type(self).__name__}.split: give a list of index arrays, whole numbers, one for each client")
        return [p.astype(np.int64, copy=False) for p in arrays]

    @abstractmethod
    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """Computes the split; arguments and result as in :meth:`__call__`."""


def check(parts: Sequence[Indices], num_samples: int, num_clients: int, source: str, replacement: bool) -> None:
    """Checks a split.

    Args:
        parts: Indices by client.
        num_samples: Size of the training set.
        num_clients: Expected number of clients.
        source: Name of the partition or file, for the message.
        replacement: Whether a sample may occur several times.

    Raises:
        UserError: If the number of clients differs, a client is empty, or an index is out of range or occurs twice.
    """
    m = len(parts)
    ensure(m == num_clients, f"data.num_clients = {num_clients}, but {source} has {m} clients; set it to {m}")
    lengths = np.array([len(part) for part in parts])  # there may be a million clients: no further call for each
    ensure(
        bool(lengths.all()),
        f"data.num_clients = {num_clients} leaves client {lengths.argmin()} without data ({num_samples} samples, "
        f"{source}); use fewer clients, a larger alpha or more data, or leave an empty client out of what is given",
    )
    indices = np.concatenate(parts)
    wrong = np.flatnonzero((indices < 0) | (indices >= num_samples))
    if len(wrong):
        client = np.searchsorted(lengths.cumsum(), wrong[0], side="right")
        raise UserError(
            f"{source}: client {client} has index {indices[wrong[0]]}, but the training set has {num_samples} samples"
            "; use the split made for this data set"
        )
    counts = np.bincount(indices)
    ensure(
        replacement or counts.max() <= 1,
        f"{source}: index {counts.argmax()} occurs {counts.max()} times; give every sample to one client only",
    )


def cut(samples: Indices, lengths: Indices) -> list[Indices]:
    """Cuts samples into consecutive parts of these lengths, as views; a million parts take ``np.split`` seconds."""
    return [samples[start:end] for start, end in pairwise([0, *lengths.cumsum().tolist()])]


def members(labels: Indices, num_classes: int) -> list[Indices]:
    """Returns the indices of the samples of each class (or client), in order."""
    return cut(labels.argsort(kind="stable"), np.bincount(labels, minlength=num_classes))


def stratified(y: Indices, n: int, rng: np.random.Generator) -> Indices:
    """Draws ``n`` sorted positions of labels ``y``, with the class shares of the whole to within one sample."""
    order, quantile = rng.permutation(len(y)), np.empty(len(y))
    counts = np.unique(y, return_counts=True)[1]
    quantile[order[y[order].argsort(kind="stable")]] = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    return np.sort(order[np.argsort(quantile[order], kind="stable")[:n]])


def replay(seed: int) -> np.random.RandomState:
    """Returns NumPy's legacy generator in the state that ``np.random.seed(seed)`` gives the global one.

    Raises:
        UserError: If the seed is out of its range.
    """
    require(0 <= seed < 2**32, "data.seed", seed, "this partition uses NumPy's legacy generator; use 0 to 2**32 - 1")
    return np.random.RandomState(seed)


def sizes(num_samples: int, num_clients: int, power: float) -> Indices:
    """Returns the number of samples of each client, ``(num_clients,)``, proportional to ``(k+1)**-power`` for client k.

    Every client gets one sample, if there are enough; largest remainders distribute the others.

    Args:
        num_samples: Number of samples of all clients.
        num_clients: Number of clients.
        power: 0 for equal sizes (the first clients get the remainder).
    """
    least = min(1, num_samples // num_clients)
    weights = np.arange(1.0, num_clients + 1) ** -power
    quota = (num_samples - least * num_clients) * weights / weights.sum()
    counts: Indices = np.floor(quota).astype(np.int64)
    counts[np.argsort(counts - quota, kind="stable")[: (num_samples - least * num_clients - counts.sum())]] += 1
    return counts + least


class ClientIndices(Sequence[Tensor]):
    """Each client's indices, as views of one tensor: a million clients are cheap.

    Args:
        parts: Indices by client.

    Attributes:
        indices: All of them, client after client.
        sizes: Number of samples of each client, ``(clients,)``.
    """

    def __init__(self, parts: Sequence[NDArray[np.int64]]) -> None:
        self.indices = torch.from_numpy(np.concatenate(parts))
        self.sizes = torch.tensor([len(part) for part in parts])
        self._ends = self.sizes.cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, client: int) -> Tensor:  # type: ignore[override]  # no slices
        return self.indices[self._of(client)]

    def _of(self, client: int) -> slice:
        return slice(self._ends[client - 1] if client else 0, self._ends[client])

    def arrays(self, clients: Sequence[int]) -> list[NDArray[np.int64]]:
        """Returns the indices of several clients."""
        indices = self.indices.numpy()
        return [indices[self._of(client)] for client in clients]


def divide(
    y: NDArray[Any],
    strata: NDArray[np.int64],
    partition: Partition,
    num_clients: int,
    num_classes: int,
    val_fraction: float,
    seed: int,
) -> tuple[Tensor, ClientIndices]:
    """Holds out the validation part, and divides the rest among the clients.

    Args:
        y: Training labels, ``(N,)``, or targets ``(N, k)``.
        strata: Class of each sample, ``(N,)``; zeros if they have none.
        partition: Divides the rest. A fixed partition refers to all N samples, and loses the samples that are held out.
        num_clients: Number of clients.
        num_classes: Number of classes.
        val_fraction: Share of the samples that is held out, stratified by class.
        seed: Seed of the validation part and of the partition.

    Returns:
        Indices of the samples that are held out, ``(n_val,)``, and indices of each client's samples.

    Raises:
        UserError: If nothing would be held out, or a client is left without samples.
    """
    n_val = round(val_fraction * len(y))
    require(n_val > 0 or not val_fraction, "data.val_fraction", val_fraction, "holds out nothing; use for example 0.1")
    val = stratified(strata, n_val, numpy_generator(seed, "validation"))
    remaining = np.delete(np.arange(len(y)), val)
    require(len(remaining) > 0, "data.val_fraction", val_fraction, "leaves nothing to train on; use a smaller one")
    if partition.fixed:
        parts = [part[~np.isin(part, val)] for part in partition(y, num_clients, num_classes, seed)]
    else:
        parts = [remaining[part] for part in partition(y[remaining], num_clients, num_classes, seed)]
    clients = ClientIndices(parts)
    require(
        bool(clients.sizes.all()),
        "data.val_fraction",
        val_fraction,
        f"takes all data of client {int(clients.sizes.argmin())}; use a smaller one",
    )
    return torch.from_numpy(val), clients
