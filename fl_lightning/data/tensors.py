"""Arrays and tensors of samples and labels, checked and converted to one form."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import UserError, ensure


def inputs(name: str, array: Any, rows: Sequence[int] | None = None) -> Tensor:
    """Returns samples as a tensor: images ``(N, C, H, W)`` or features ``(N, ...)``, in the memory format of `layout`.

    uint8 arrays are images: ``(N, H, W)`` gets a channel, ``(N, H, W, 1 or 3)`` becomes ``(N, C, H, W)``. Floats
    keep their dtype; int32 and int64 (tokens) become int64.

    Args:
        name: Name of the samples in errors.
        array: The samples.
        rows: Their row numbers, ``(N,)``, if these are not all rows.

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
    """Memory format of samples: channels_last for images, since convolutions are faster with it."""
    return torch.channels_last if ndim == 4 else torch.contiguous_format


def labels(name: str, array: Any) -> Tensor:
    """Returns class labels as int64, ``(N,)``.

    Raises:
        UserError: If they are not one-dimensional, or not integers >= 0.
    """
    y = _tensor(name, array)
    ensure(
        not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool,
        f"{name}: labels are {y.dtype}; convert them to integers 0, 1, ...",
    )
    ensure(y.ndim == 1, f"{name}: shape {tuple(y.shape)} is not (N,); give one label per sample")
    y = y.long()
    if len(y) and y.min() < 0:
        raise UserError(f"{name}: label {int(y.min())} at row {int(y.argmin())} is negative; number the classes from 0")
    return y


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
            f"{name}: {type(array).__name__} of {np.asarray(array).dtype} is not a numeric array; "
            "give a numpy array or tensor"
        ) from None
