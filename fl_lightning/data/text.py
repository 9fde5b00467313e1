"""Text as tokens: AG News."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import Size
from fl_lightning.data.files import find_files, read_rows
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.streaming import Published

HOME = "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html (as CSV files by Zhang et al. 2015)"
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
        kept = [known.get(token, 0) for token in text[:length]]
        row[: len(kept)] = kept
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
            _read(path) for path in find_files("data.data_dir", self.data_dir, ("train.csv", "test.csv"), HOME)
        )
        self.vocabulary = vocabulary([*train[0], *test[0]])
        x_train, x_test = (numbered(part[0], self.vocabulary, self.max_length) for part in (train, test))
        return x_train, train[1], x_test, test[1]


def _read(path: Path) -> tuple[list[list[str]], NDArray[np.int64]]:
    """Returns tokens and label of each row."""
    form = "class (1 to 4), title, description"
    rows = read_rows(path, csv.reader, lambda row: len(row) >= 2 and row[0] in ("1", "2", "3", "4"), form, HOME)
    return [basic_english(" ".join(row[1:])) for row in rows], np.array([int(row[0]) - 1 for row in rows], np.int64)
