"""Data sets in files of their own formats: AG News, and LEAF's FEMNIST and Shakespeare."""

import csv
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import Size, ensure
from fl_lightning.data.files import corrupt_file, find_files, read_json, read_rows, visible
from fl_lightning.data.module import CLIENTS, FederatedDataModule
from fl_lightning.data.partition import Partition
from fl_lightning.data.streaming import Published

AG_NEWS = "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html (as CSV files by Zhang et al. 2015)"
UNKNOWN = "<unk>"
MARKS = str.maketrans({**{mark: f" {mark} " for mark in ".,()!?"}, "'": " '  ", '"': "", ";": " ", ":": " "})


def basic_english(text: str) -> list[str]:
    """Splits into lower-case words and punctuation marks, as torchtext's tokeniser ``basic_english``."""
    return text.lower().replace("<br />", " ").translate(MARKS).split()


def vocabulary(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Numbers tokens: 0 is "<unk>", then by decreasing frequency; equally frequent ones alphabetically."""
    counts = Counter(token for text in texts for token in text)
    del counts[UNKNOWN]
    order = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: number for number, token in enumerate([UNKNOWN, *order])}


def numbered(texts: Sequence[Sequence[str]], known: Mapping[str, int], length: int) -> NDArray[np.int64]:
    """Returns tokens as numbers, ``(n, length)``: cut, padded with 0, and 0 where a token is unknown.

    Args:
        texts: Tokens of each text.
        known: Number of each token.
        length: Tokens that are kept.
    """
    x = np.zeros((len(texts), length), np.int64)
    for row, text in zip(x, texts, strict=True):
        numbers = [known.get(token, 0) for token in text[:length]]
        row[: len(numbers)] = numbers
    return x


class AGNews(FederatedDataModule):
    """AG News (Zhang et al. 2015): 120,000 training and 7,600 test texts of 4 classes, as tokens.

    ``train.csv`` and ``test.csv`` have rows ``class (1 to 4), title, description``; title and description are joined.
    The vocabulary covers training and test texts together, as in FL-SAM (98,635 tokens). A sample is
    ``(max_length,)`` int64; 0 is both padding and the unknown token.

    Args:
        data_dir: Folder with ``train.csv`` and ``test.csv``.
        max_length: Tokens of a sample; longer texts are cut.
        **kwargs: As for FederatedDataModule.

    Attributes:
        vocabulary: Number of each token (after loading).

    Raises:
        UserError: If a file is missing or corrupt (on loading), or max_length is not positive.
    """

    vocabulary: dict[str, int]

    def __init__(self, data_dir: str = "data/ag_news", max_length: Size = 200, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_dir, self.max_length = data_dir, max_length
        self.published = Published(120_000, 7_600, (max_length,), classes=4, tokens=98_635)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        train, test = (
            _read(path) for path in find_files("data.data_dir", self.data_dir, ("train.csv", "test.csv"), AG_NEWS)
        )
        self.vocabulary = vocabulary([*train[0], *test[0]])
        x_train, x_test = (numbered(part[0], self.vocabulary, self.max_length) for part in (train, test))
        return x_train, train[1], x_test, test[1]


def _read(path: Path) -> tuple[list[list[str]], NDArray[np.int64]]:
    """Returns tokens and label of each row."""
    form = "class (1 to 4), title, description"
    rows = read_rows(path, csv.reader, lambda row: len(row) >= 2 and row[0] in ("1", "2", "3", "4"), form, AG_NEWS)
    return [basic_english(" ".join(row[1:])) for row in rows], np.array([int(row[0]) - 1 for row in rows], np.int64)


LEAFS_HOME = "https://github.com/TalwalkarLab/leaf"
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's table: the number of a character is its position."""
LENGTH = 80
"""Characters of a sample of Shakespeare."""


class LEAF(FederatedDataModule):
    """Data in the format of LEAF (Caldas et al. 2018): users, each with samples to train on and samples to test on.

    ``train/*.json`` and ``test/*.json`` have ``users`` and ``user_data: {user: {x: [...], y: [...]}}``, as LEAF's
    ``preprocess.sh`` writes them. Each user of the training files is a client, whose own part of the test set holds the
    test samples of that user; with LEAF's ``-t user`` there are none.

    Args:
        data_dir: Folder with ``train`` and ``test``, in LEAF's repository ``data/<name>/data``.
        partition: Partition into ``num_clients`` that replaces the division by users; null makes each user a client.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If (on loading) a file is missing or not in this format.
    """

    def __init__(self, data_dir: str, partition: Partition | None = None, **kwargs: Any) -> None:
        super().__init__(partition=partition, **kwargs)
        self.data_dir, self._by_user = data_dir, partition is None

    @abstractmethod
    def read(self, x: Any, y: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Returns the samples and labels of one user.

        Args:
            x: Samples, as in the file.
            y: Labels, as in the file.

        Raises:
            UserError: If they are not in the format of this data set.
        """

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        folders = find_files("data.data_dir", self.data_dir, ("train", "test"), LEAFS_HOME)
        (users, x_train, y_train), (test_users, x_test, y_test) = map(self._part, folders)
        if self._by_user:
            self.set_clients(users, test_users, None if self.num_clients == CLIENTS else self.num_clients)
        return x_train, y_train, x_test, y_test

    def _part(self, folder: Path) -> tuple[list[str], NDArray[Any], NDArray[np.int64]]:
        """Returns each sample's user, the samples and the labels of a folder's files, in the order of their names."""
        parts = [part for path in visible(folder, "*.json") for part in read_json(path, self._users, LEAFS_HOME)]
        ensure(
            any(len(y) for _, _, y in parts),
            corrupt_file("data.data_dir", folder, "no JSON file with samples", LEAFS_HOME),
        )
        users = [user for user, _, y in parts for _ in range(len(y))]
        return users, np.concatenate([x for _, x, _ in parts]), np.concatenate([y for *_, y in parts])

    def _users(self, content: Any) -> list[tuple[str, NDArray[Any], NDArray[np.int64]]]:
        """Returns name, samples and labels of each user, from the content of a file."""
        data = {user: content["user_data"][user] for user in content["users"]}
        users = [(user, *self.read(part["x"], part["y"])) for user, part in data.items() if part["x"] or part["y"]]
        for user, x, y in users:
            ensure(len(x) == len(y), f"user {user} has {len(x)} samples and {len(y)} labels")
        return users


class FEMNIST(LEAF):
    """FEMNIST as LEAF writes it: 28x28 characters of 62 classes, by writer; values from 0 (ink) to 1.

    Args:
        data_dir: Folder with ``train`` and ``test``.
        **kwargs: As for LEAF.
    """

    classes = 62

    def __init__(self, data_dir: str = "data/femnist", **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)

    def read(self, x: Any, y: Any) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See :class:`LEAF`."""
        images, labels = np.asarray(x, np.float32), np.asarray(y)
        ensure(images.shape == (len(x), 784), f"a sample is not 784 numbers, but of shape {images.shape[1:]}")
        ensure(
            labels.ndim == 1 and labels.dtype.kind in "iu" and bool(((labels >= 0) & (labels < self.classes)).all()),
            f"a label is not one of 0 to {self.classes - 1}",
        )
        return images.reshape(-1, 1, 28, 28), labels.astype(np.int64)


class Shakespeare(LEAF):
    """Shakespeare as LEAF writes it: 80 characters of a role's lines, and as class the character that follows.

    Characters are numbered by LEAF's table of 80. A sample is ``(80,)`` int64.

    Args:
        data_dir: Folder with ``train`` and ``test``.
        **kwargs: As for LEAF.
    """

    classes = len(CHARACTERS)

    def __init__(self, data_dir: str = "data/shakespeare", **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)

    def read(self, x: Any, y: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See :class:`LEAF`."""
        length = next((len(text) for text in x if len(text) != LENGTH), None)
        ensure(length is None, f"a sample has {length} characters, not {LENGTH}")
        ensure(all(len(text) == 1 for text in y), "a label is not one character")
        return _numbers(x).reshape(-1, LENGTH), _numbers(y)


def _numbers(texts: Sequence[str]) -> NDArray[np.int64]:
    """Returns the position of each character in LEAF's table, ``(n,)``."""
    text = "".join(texts)
    table = np.full(256, -1)
    table[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    numbers: NDArray[np.int64] = table[np.where(codes < 256, codes, 0)]
    if (numbers < 0).any():
        raise ValueError(f"character {text[int(numbers.argmin())]!r} is not in LEAF's table of {len(CHARACTERS)}")
    return numbers
