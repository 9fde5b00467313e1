"""Checks of samples and labels against each other."""

from collections.abc import Iterator

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core import ensure
from fl_lightning.data.stream import Stream

LEAK = 0.01
"""Share of the test samples that may also be training samples without a warning."""


def check_pairs(x_train: Tensor | Stream, y_train: Tensor, x_test: Tensor | Stream, y_test: Tensor) -> None:
    """Checks that samples and labels, training and test data fit together.

    Raises:
        UserError: If counts, shapes or dtypes disagree.
    """
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        ensure(
            len(x) == len(y),
            f"x_{split}: {len(x)} samples, but y_{split} has {len(y)} labels; give one label per sample",
        )
        ensure(len(x) != 0, f"x_{split}: no samples; the {split} data must not be empty")
    for name, what, a, b in (
        ("x", "shape", tuple(x_train.shape[1:]), tuple(x_test.shape[1:])),
        ("x", "dtype", x_train.dtype, x_test.dtype),
        ("y", "shape", tuple(y_train.shape[1:]), tuple(y_test.shape[1:])),
    ):
        ensure(a == b, f"{name}_test: {what} {b} of a sample differs from {name}_train's {a}; prepare both alike")


def count_leaks(x_train: Tensor | Stream, x_test: Tensor | Stream) -> int | None:
    """Number of test samples that are also training samples, by a hash of their values; None for streamed samples.

    Published data sets have a few such twins; warns if there are more than `LEAK`.
    """
    if isinstance(x_train, Stream) or isinstance(x_test, Stream):
        return None
    seen = set(_hashes(x_train))
    leaked = sum(row in seen for row in _hashes(x_test))
    if leaked > LEAK * len(x_test):
        rank_zero_warn(
            f"x_test: {leaked} of {len(x_test)} samples occur in x_train as well, value for value; "
            "test accuracy will flatter, take them out of one of the two",
            stacklevel=4,
        )
    return leaked


def _hashes(x: Tensor) -> Iterator[int]:
    rows = x.permute(0, 2, 3, 1) if x.ndim == 4 else x  # as they lie in memory
    return (hash(row.tobytes()) for row in rows.numpy())
