"""Arrays from anywhere, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core.errors import UserError

if TYPE_CHECKING:
    from fl_lightning.data.stream import Stream


def inputs(name: str, array: Any, rows: Sequence[int] | None = None) -> Tensor:
    """A tensor of samples: images ``(N, C, H, W)`` or features ``(N, ...)``.

    uint8 arrays are images: ``(N, H, W)`` gets a channel, ``(N, H, W, 1 or 3)`` is turned to ``(N, C, H, W)``. Floats
    keep their dtype, int32 and int64 (tokens) become int64. They lie in memory as `layout` says.

    Args:
        name: What they are called in errors.
        array: The samples.
        rows: Their numbers, ``(N,)``, if these are not all.

    Raises:
        UserError: If the dtype is none of these, or a value is not finite.
    """
    x = _tensor(name, array)
    if x.dtype == torch.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.movedim(-1, 1)
    elif x.is_floating_point():
        if not x.isfinite().all():
            row = int((~x.isfinite()).nonzero()[0, 0])
            raise UserError(
                f"{name}: row {row if rows is None else rows[row]} holds NaN or infinity; clean or drop such rows"
            )
    elif x.dtype in (torch.int32, torch.int64):
        x = x.long()
    else:
        raise UserError(f"{name}: dtype {x.dtype} is not supported; use uint8 (images), float or int64 (tokens)")
    return x.contiguous(memory_format=layout(x.ndim))


def layout(ndim: int) -> torch.memory_format:
    """How samples lie in memory: images with the channels last, with which convolutions are quicker."""
    return torch.channels_last if ndim == 4 else torch.contiguous_format


def labels(name: str, array: Any) -> Tensor:
    """Class labels as int64, ``(N,)``.

    Raises:
        UserError: If they are not integers >= 0 in one dimension.
    """
    y = _tensor(name, array)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UserError(f"{name}: labels are {y.dtype}; convert them to integers 0, 1, ...")
    if y.ndim != 1:
        raise UserError(f"{name}: shape {tuple(y.shape)} is not (N,); give one label per sample")
    y = y.long()
    if len(y) and y.min() < 0:
        raise UserError(f"{name}: label {int(y.min())} at row {int(y.argmin())} is negative; number the classes from 0")
    return y


def check_pairs(x_train: Tensor | Stream, y_train: Tensor, x_test: Tensor | Stream, y_test: Tensor) -> None:
    """Check that samples and labels, training and test data fit together.

    Raises:
        UserError: If counts, shapes, dtypes or classes disagree.
    """
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y):
            raise UserError(
                f"x_{split}: {len(x)} samples, but y_{split} has {len(y)} labels; give one label per sample"
            )
        if len(x) == 0:
            raise UserError(f"x_{split}: no samples; the {split} data must not be empty")
    for what, a, b in (
        ("shape", tuple(x_train.shape[1:]), tuple(x_test.shape[1:])),
        ("dtype", x_train.dtype, x_test.dtype),
    ):
        if a != b:
            raise UserError(f"x_test: {what} {b} of a sample differs from x_train's {a}; prepare both alike")
    if y_test.max() > y_train.max():
        row, top = int(y_test.argmax()), int(y_train.max())
        raise UserError(
            f"y_test: label {int(y_test[row])} at row {row} exceeds y_train's largest, {top}; "
            "number the classes of both alike"
        )


def copies(x_train: Tensor, x_test: Tensor) -> int:
    """How many test samples occur among the training samples, value for value, by a hash of each."""
    seen = set(_hashes(x_train))
    return sum(row in seen for row in _hashes(x_test))


def _hashes(x: Tensor) -> Iterator[int]:
    rows = x.permute(0, 2, 3, 1) if x.ndim == 4 else x  # as they lie in memory
    return (hash(row.tobytes()) for row in rows.numpy())


def stratified(y: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of ``n`` of the labels ``y``, sorted, with the class shares of the whole (to within one sample)."""
    order = rng.permutation(len(y))
    quantile = np.empty(len(y))
    for label in np.unique(y):
        members = order[y[order] == label]
        quantile[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.sort(order[np.argsort(quantile[order], kind="stable")[:n]])


def _tensor(name: str, array: Any) -> Tensor:
    try:
        return array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError):
        raise UserError(
            f"{name}: {type(array).__name__} of {np.asarray(array).dtype} is no numeric array; "
            "give a numpy array or tensor"
        ) from None
