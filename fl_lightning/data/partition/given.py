"""Given partitions: from Python, from the papers' files, and by the user of each sample."""

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np

from fl_lightning.core import UserError, each_once, ensure, folded, grouped, require
from fl_lightning.data.files import read_cifar
from fl_lightning.data.partition.base import Indices, Partition, check, members


class Given(Partition):
    """Given indices of the training set, one list per client.

    Args:
        parts: Indices of each client's samples.
        replacement: Whether a sample may occur several times.
    """

    fixed = True

    def __init__(self, parts: list[list[int]], replacement: bool = False) -> None:
        self.parts, self.replacement = parts, replacement

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        return [np.asarray(part, np.int64) for part in self.parts]

    @classmethod
    def consecutive(cls, sizes: Iterable[int]) -> Self:
        """Returns the partition of samples that are sorted by client.

        Args:
            sizes: Number of samples of each client.
        """
        return cls([list(range(start, end)) for start, end in pairwise(accumulate(sizes, initial=0))])


class Natural(Partition):
    """One client for each user of the samples: sorted by number if all are integers, otherwise by first appearance.

    Args:
        users: The user of every training sample, in the order of the samples.

    Raises:
        UserError: If (on use) there are not as many users as samples, or not as many different users as clients.
    """

    fixed = True

    def __init__(self, users: list[int] | list[str]) -> None:
        self.users = [str(user) for user in users]

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        require(
            len(self.users) == len(labels),
            "data.partition.users",
            f"{len(self.users)} users",
            f"give one for each of {len(labels)} samples",
        )
        return members(self.clients(self.users), len({*self.users}))

    def clients(self, users: Iterable[int | str]) -> Indices:
        """Returns the client of each user, ``(n,)``, such as those of test samples; -1 for users without a client."""
        number = {user: client for client, user in enumerate(_ordered(dict.fromkeys(self.users)))}
        return np.array([next((number[n] for n in _names(user) if n in number), -1) for user in users], np.int64)


def _names(user: Any) -> Iterator[str]:
    """Yields the names of a user; one column of a table has whole numbers as 3, another as 3.0, beside missing ones."""
    yield str(user)
    if isinstance(user, Real) and (number := float(user)).is_integer():
        yield from (f"{number:.0f}", str(number))


class FromFile(Partition):
    """A published split, or one of your own, read from a file; its labels are checked against the data.

    Args:
        path: One of: JSON ``{"0": [indices], ...}`` or a list of lists; JSON of the fedsam and fedgloss repositories
            (``users``, and ``user_data`` or ``users_data``) with names ``img_<index>_label_<label>.png`` or those of
            CIFAR-100; CSV with columns ``user_id,image_id,class`` (federated_vision_datasets, FedGF), image_id being
            the index of the sample. Clients are sorted by number.
        names: For the JSON files of CIFAR-100, its own file ``cifar-100-python/train``, which contains the images'
            names. It is a pickle; nothing but arrays, text, numbers, lists and mappings is made from it.
        replacement: Whether a sample may occur several times.

    Raises:
        UserError: If a file is missing, malformed or does not fit the data (on use).
    """

    fixed = True

    def __init__(self, path: str, names: str | None = None, replacement: bool = False) -> None:
        self.path, self.names, self.replacement = path, names, replacement

    def split(self, labels: Indices, num_clients: int, num_classes: int, seed: int) -> Sequence[Indices]:
        """See :meth:`Partition.__call__`."""
        index = _numbered if self.names is None else _lookup(self.names, labels)
        try:
            rows = self._read(index)
            if not rows:
                raise ValueError("no client")
            users = _ordered(rows)
            parts = [np.array([index for index, _ in rows[user]], np.int64) for user in users]
        except OSError as error:
            raise UserError(
                f"data.partition.path = '{self.path}': cannot read it ({error.strerror}); give an existing split file"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
            raise UserError(
                f"data.partition.path = '{self.path}' is not a split in a known format "
                f"({folded(repr(error), 120)}); use JSON {{client: [indices]}} or CSV user_id,image_id,class"
            ) from None
        check(parts, len(labels), num_clients, f"'{self.path}'", self.replacement)
        for user, part in zip(users, parts, strict=True):
            for sample, (_, label) in zip(part, rows[user], strict=True):
                ensure(
                    label is None or label == labels[sample],
                    f"'{self.path}': client {user} has sample {sample} as class {label}, but in the data it"
                    f" is class {labels[sample]}; use the split made for this data set",
                )
        return parts

    def _read(self, index: Callable[[str, int], int]) -> dict[str, list[tuple[int, int | None]]]:
        """Returns ``{client: [(index, label or None), ...]}``."""
        if Path(self.path).suffix.lower() == ".csv":
            with open(self.path, newline="", encoding="utf-8-sig") as file:  # a spreadsheet puts a mark before the text
                rows = csv.DictReader(file)
                return grouped((row["user_id"], (int(row["image_id"]), int(row["class"]))) for row in rows)
        content: Any = json.loads(Path(self.path).read_text("utf-8-sig"), object_pairs_hook=each_once)
        users = content.get("user_data") or content.get("users_data") if isinstance(content, dict) else None
        if users:
            return {
                user: [(index(name, label), label) for name, label in zip(data["x"], data["y"], strict=True)]
                for user, data in users.items()
            }
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        return {str(user): [(_integer(index), None) for index in part] for user, part in entries}


def _ordered(rows: Collection[str]) -> list[str]:
    return sorted(rows, key=int) if all(re.fullmatch(r"-?\d+", user, re.ASCII) for user in rows) else list(rows)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"index {value!r:.40} is not an integer of 64 bits")
    return value


def _numbered(name: str, label: int) -> int:
    """Returns the index in ``img_<index>_label_<label>.png``."""
    match = re.fullmatch(r"img_(\d+)_label_(\d+)\.\w+", name)
    if match is None or int(match[2]) != label:
        raise ValueError(f"image name {name!r} is not img_<index>_label_{label}.png; for CIFAR-100 give names")
    return int(match[1])


def _lookup(path: str, labels: Indices) -> Callable[[str, int], int]:
    """Returns a function that finds an image by label and name in CIFAR-100's file: two images share one name."""
    try:
        names = [name.decode() for name in read_cifar(path)["filenames"]]
    except Exception as error:  # a pickle can fail in any way
        raise UserError(
            f"data.partition.names = '{path}': no image names there ({folded(repr(error), 120)}); give CIFAR-100's "
            "file 'train'"
        ) from None
    require(
        len(names) == len(labels),
        "data.partition.names",
        f"{len(names)} names",
        f"the training set has {len(labels)} samples",
    )
    known = {pair: index for index, pair in enumerate(zip(names, labels.tolist(), strict=True))}
    require(len(known) == len(names), "data.partition.names", path, "two images share both name and label")

    def index(name: str, label: int) -> int:
        if (name, label) not in known:
            raise ValueError(f"no image {name!r} of class {label} in {path!r}")
        return known[name, label]

    return index
