"""How the training samples are divided among the clients."""

from __future__ import annotations

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError
from fl_lightning.rng import numpy_generator

Indices = NDArray[np.int64]


class Partition(ABC):
    """Base class: subclasses implement :meth:`split`; calling the object also checks the result."""

    fixed: ClassVar[bool] = False
    """Whether the indices are given from outside, so that they refer to the whole training set."""

    def __call__(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> list[Indices]:
        """Divide the samples.

        Args:
            labels: Class of every training sample, ``(N,)``, in ``0..num_classes-1``.
            num_clients: Number of clients.
            num_classes: Number of classes.
            seed: Seed of the split.

        Returns:
            One index array per client; no index occurs twice, no client is empty.

        Raises:
            UserError: If the split is impossible or wrong.
        """
        parts = [np.asarray(p, np.int64) for p in self.split(labels, num_clients, num_classes, seed)]
        _check(parts, len(labels), num_clients, type(self).__name__)
        return parts

    @abstractmethod
    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """The split itself; arguments and result as in :meth:`__call__`."""


def _check(parts: Sequence[Indices], num_samples: int, num_clients: int, source: str) -> None:
    if len(parts) != num_clients:
        m = len(parts)
        raise UserError(f"data.num_clients = {num_clients}, but {source} has {m} clients; set it to {m}")
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(
                f"data.num_clients = {num_clients} leaves client {client} without data ({num_samples} samples, "
                f"{source}); use fewer clients, a larger alpha or more data"
            )
        if part.min() < 0 or part.max() >= num_samples:
            bad = part[(part < 0) | (part >= num_samples)][0]
            raise UserError(
                f"{source}: client {client} has index {bad}, but the training set has {num_samples} samples"
                "; use the split made for this data set"
            )
    values, counts = np.unique(np.concatenate(parts), return_counts=True)
    if counts.max() > 1:
        raise UserError(
            f"{source}: index {values[counts.argmax()]} occurs {counts.max()} times; "
            "give every sample to one client only"
        )


class IID(Partition):
    """Shuffled samples in equal parts (sizes differ by at most one)."""

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        return np.array_split(numpy_generator(seed, "partition").permutation(len(labels)), num_clients)


class Dirichlet(Partition):
    """Balanced Dirichlet split of Hsu et al. 2019: clients of equal size, class shares ~ Dir(alpha / num_classes).

    The generator of the published splits is not public; the rule here was inferred from them. Clients are filled in
    order. Each draws shares q of the classes that are left, and takes the differences of ``round(n * cumsum(q))`` from
    their pools as far as these last; a fresh draw shares out what is missing. So late clients get leftovers.

    Args:
        alpha: TOTAL concentration, alpha / num_classes for each class; some papers print the value per class (0.005 for
            0.05 with 10 classes). 0 gives every client one class. Large values approach equal shares.

    Raises:
        UserError: If alpha is negative or not finite.
    """

    def __init__(self, alpha: float = 0.0) -> None:
        if not (math.isfinite(alpha) and alpha >= 0):
            raise UserError(
                f"data.partition.alpha = {alpha} is no concentration; use a finite number >= 0 "
                "(0: one class per client; for equal shares use IID)"
            )
        self.alpha = alpha

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        rng = numpy_generator(seed, "partition")
        pools = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
        if self.alpha == 0:
            return self._one_class_each(pools, num_clients)
        left = np.array([len(pool) for pool in pools])
        parts = []
        for client in range(num_clients):
            size = len(labels) // num_clients + (client < len(labels) % num_clients)
            counts = self._counts(size, left, rng)
            left -= counts
            parts.append(np.concatenate([p[a : a + n] for p, a, n in zip(pools, left, counts, strict=True)]))
        return parts

    def _counts(self, size: int, left: Indices, rng: np.random.Generator) -> Indices:
        """Samples of each class for one client of ``size`` samples when the pools hold ``left``: ``(num_classes,)``."""
        counts = np.zeros_like(left)
        while missing := size - counts.sum():
            # A Dirichlet with used-up classes zeroed and renormalised is the Dirichlet over the others.
            classes = np.flatnonzero(left - counts)
            q = rng.dirichlet(np.full(len(classes), self.alpha / len(left)))
            want = np.diff(np.rint(missing * q.cumsum()).astype(np.int64), prepend=0)
            counts[classes] += np.minimum(want, (left - counts)[classes])
        return counts

    def _one_class_each(self, pools: list[Indices], num_clients: int) -> list[Indices]:
        # Where clients do not divide evenly, the largest classes get one more.
        pools = sorted((p for p in pools if len(p)), key=len, reverse=True)
        if num_clients < len(pools):
            raise UserError(
                f"data.partition.alpha = 0 gives every client one class, so {len(pools)} classes need at least "
                f"{len(pools)} clients, not num_clients = {num_clients}; use more clients or alpha > 0"
            )
        turns = [len(range(c, num_clients, len(pools))) for c in range(len(pools))]
        shares = [np.array_split(pool, n) for pool, n in zip(pools, turns, strict=True)]
        return [shares[k % len(pools)][k // len(pools)] for k in range(num_clients)]


class Given(Partition):
    """Given indices of the training set, one list per client.

    Args:
        parts: Indices of each client's samples.
    """

    fixed = True

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        return [np.asarray(part, np.int64) for part in self.parts]


class FromFile(Partition):
    """A published or own split, read from a file; labels in it are checked against the data.

    Args:
        path: One of: JSON ``{"0": [indices], ...}`` or a list of lists; JSON of the fedsam and fedgloss repositories
            (``users``, ``user_data`` or ``users_data`` with names ``img_<index>_label_<label>.png``); CSV with columns
            ``user_id,image_id,class`` (federated_vision_datasets), image_id being the index of the sample. Clients
            come in the order of their numbers.

    Raises:
        UserError: If the file is missing, malformed or does not fit the data (on use).
    """

    fixed = True

    def __init__(self, path: str) -> None:
        self.path = path

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        try:
            rows = self._read()
        except OSError as error:
            raise UserError(
                f"data.partition.path = '{self.path}': cannot read it ({error.strerror}); give an existing split file"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"data.partition.path = '{self.path}' is no split in a known format ({error!r}); use JSON "
                "{client: [indices]} or CSV user_id,image_id,class"
            ) from None
        users = sorted(rows, key=int) if all(user.lstrip("-").isdigit() for user in rows) else list(rows)
        parts = [np.array([index for index, _ in rows[user]], np.int64) for user in users]
        _check(parts, len(labels), num_clients, f"'{self.path}'")
        for user, part in zip(users, parts, strict=True):
            for index, (_, told) in zip(part, rows[user], strict=True):
                if told is not None and told != labels[index]:
                    raise UserError(
                        f"'{self.path}': client {user} has sample {index} as class {told}, but in the data it"
                        f" is class {labels[index]}; use the split made for this data set"
                    )
        return parts

    def _read(self) -> dict[str, list[tuple[int, int | None]]]:
        """``{client: [(index, label or None), ...]}``."""
        if Path(self.path).suffix.lower() == ".csv":
            with open(self.path, newline="") as file:
                table: dict[str, list[tuple[int, int | None]]] = {}
                for row in csv.DictReader(file):
                    table.setdefault(row["user_id"], []).append((int(row["image_id"]), int(row["class"])))
                return table
        content: Any = json.loads(Path(self.path).read_text())
        users = content.get("user_data") or content.get("users_data") if isinstance(content, dict) else None
        if users:
            return {user: [*_named(data["x"], data["y"])] for user, data in users.items()}
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {str(user): [(_integer(index), None) for index in part] for user, part in items}


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"index {value!r} is not an integer")
    return value


def _named(names: Iterable[str], labels: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Index and label of ``img_<index>_label_<label>.png``."""
    for name, label in zip(names, labels, strict=True):
        found = re.fullmatch(r"img_(\d+)_label_(\d+)\.\w+", name)
        if found is None or int(found[2]) != label:
            raise ValueError(f"image name {name!r} is not img_<index>_label_{label}.png")
        yield int(found[1]), label
