"""Converts samples and targets to checked tensors, and compares training and test data."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.core import Inputs, UserError, ensure, named_tensors

LEAK = 0.01
"""Largest share of the test samples that may occur in the training data without a warning."""
UNSAID = 100_000
"""Classes that labels may count; more than these and than the samples are numbers of something else."""
CHANNELS = 4
"""Largest number of channels: 4-dimensional arrays with more rows than that may be NHWC."""


def inputs(name: str, array: Any, rows: Sequence[int] | None = None) -> Inputs:
    """Converts samples to a tensor: images ``(N, C, H, W)`` or features ``(N, ...)``, in the memory format of `layout`.

    uint8 arrays are images: ``(N, H, W)`` gets a channel, and ``(N, H, W, 1, 3 or 4)`` becomes ``(N, C, H, W)`` if H
    exceeds 4. So do floats, if W exceeds 4 as well, with one channel only if H = W; they keep their dtype. int32 and
    int64 (tokens) become int64; booleans (masks) stay.

    Args:
        name: Name of the samples in errors.
        array: The samples. A dict, or a NumPy array with named fields, becomes a dict of tensors.
        rows: Row numbers of the samples for errors, ``(N,)``, if they are not 0 to N - 1.

    Raises:
        UserError: If the dtype is none of these, or a value is not finite.
    """
    if isinstance(array, np.ndarray) and array.dtype.names:
        array = {field: array[field].copy() for field in array.dtype.names}  # fields may be unaligned
    if isinstance(array, Mapping):
        ensure(
            len(array) > 0 and all(isinstance(key, str) and "." not in key for key in array),
            f"{name}: keys {list(array)}; name one array or more, without dots",
        )
        return {key: inputs(f"{name}.{key}", entry, rows) for key, entry in array.items()}
    x = numeric(name, array)
    if x.ndim == 4 and _channels_come_last(x):
        x = x.movedim(-1, 1)
    if x.dtype == torch.uint8:
        x = x[:, None] if x.ndim == 3 else x
    elif x.is_floating_point():
        x = finite(name, x, rows)
    elif x.dtype in (torch.int32, torch.int64):
        x = x.long()
    else:
        ensure(
            x.dtype == torch.bool,
            f"{name}: dtype {x.dtype} is not supported; use uint8 (images), float or int64 (tokens)",
        )
    return x.contiguous(memory_format=layout(x.ndim))


def _channels_come_last(x: Tensor) -> bool:
    """Returns whether samples ``(N, a, b, c)`` are images NHWC; floats may also be maps of many channels."""
    _, rows, columns, last = x.shape
    if x.dtype == torch.uint8:
        return last in (1, 3, 4) and rows > CHANNELS
    images = x.is_floating_point() and min(rows, columns) > CHANNELS
    return images and (last in (3, 4) or (last == 1 and rows == columns))


def layout(ndim: int) -> torch.memory_format:
    """Returns the memory format of samples: channels_last for images, with which convolutions are faster."""
    return torch.channels_last if ndim == 4 else torch.contiguous_format


def finite(name: str, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """Returns floats unchanged.

    Raises:
        UserError: If a value is not finite.
    """
    if not x.isfinite().all():
        row = int((~x.isfinite()).nonzero()[0, 0])
        raise UserError(
            f"{name}: row {row if rows is None else rows[row]} holds NaN or infinity; clean or drop such rows"
        )
    return x


def numeric(name: str, array: Any) -> Tensor:
    """Converts an array to a tensor on the CPU, bfloat16 to float32.

    Raises:
        UserError: If it holds no numbers, or is no dense tensor.
    """
    if isinstance(array, Tensor):
        dense = array.layout == torch.strided and not array.is_quantized and not array.is_meta
        ensure(dense, f"{name}: a tensor that is sparse, quantized or without values; make it dense first")
        tensor = array.detach().cpu()
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16
    try:
        numbers = np.require(np.ascontiguousarray(array), requirements="W")  # pandas gives arrays to read alone
        return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError):
        raise UserError(
            f"{name}: {type(array).__name__} of {np.asarray(array).dtype} is not a numeric array; "
            "give numbers that torch has, such as float32 or int64"
        ) from None


def check_pairs(x_train: Inputs, y_train: Tensor, x_test: Inputs, y_test: Tensor) -> None:
    """Checks that samples and targets, and training and test data, fit together.

    Raises:
        UserError: If counts, names, shapes or dtypes disagree.
    """
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        for name, array in named_tensors(x, f"x_{split}").items():
            ensure(
                len(array) == len(y),
                f"{name}: {len(array)} samples, but y_{split} has {len(y)} labels; give one label per sample",
            )
        ensure(len(y) != 0, f"x_{split}: no samples; the {split} data must not be empty")
    check_alike("x_train", x_train, "x_test", x_test)
    check_alike("y_train", y_train, "y_test", y_test.to(y_train.dtype))


def check_alike(name: str, x: Inputs, other: str, y: Inputs) -> None:
    """Checks that two sets of samples have the same arrays, with the same shapes and dtypes.

    Args:
        name: Name of the first set in errors.
        x: The first set.
        other: Name of the second set.
        y: The second set.

    Raises:
        UserError: If something differs.
    """
    a, b = named_tensors(x, ""), named_tensors(y, "")
    ensure(a.keys() == b.keys(), f"{other}: its arrays are not named as {name}'s; name both alike")
    for key, tensor in a.items():
        for kind, expected, actual in (
            ("shape", tuple(tensor.shape[1:]), tuple(b[key].shape[1:])),
            ("dtype", tensor.dtype, b[key].dtype),
        ):
            ensure(
                expected == actual,
                f"{other}{key}: {kind} {actual} of a sample differs from {name}{key}'s {expected}; prepare both alike",
            )


def check_sizes(name: str, sizes: tuple[int, int], published: Any) -> None:
    """Warns if a data set has not as many training and test samples as the published one; None: there is none."""
    if published is not None and sizes != (published.train, published.test):
        rank_zero_warn(
            f"{name}: {sizes[0]} training and {sizes[1]} test samples, not the {published.train} and {published.test} "
            "of the published data set; results do not compare",
            stacklevel=5,
        )


def checked_owners(clients: Any, n: int, m: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the client of each of ``n`` test samples, -1 for none.

    Args:
        clients: Their numbers.
        n: Number of test samples.
        m: Number of clients.

    Raises:
        UserError: If there are not as many, or a number is out of range.
    """
    owners = np.asarray(clients)
    ensure(len(owners) == n, f"test_clients: {len(owners)} for {n} samples; give one per sample")
    problem = f"test_clients: {owners.min()} to {owners.max()}; number the {m} clients from 0, -1 is none"
    ensure(owners.min() >= -1 and owners.max() < m, problem)
    return owners


def check_classes(y_train: Tensor, y_test: Tensor, number: int, said: bool) -> None:
    """Checks labels against the number of classes; warns if some do not occur, and nobody says that there are more.

    Args:
        y_train: Training labels, ``(N,)``.
        y_test: Test labels.
        number: Number of classes.
        said: Whether the data set or the user says it; otherwise it is the largest training label + 1.

    Raises:
        UserError: If a label exceeds them, or the labels seem to be no classes.
    """
    top = number - 1
    if not said:
        occur = len(np.unique(y_train.numpy()))
        numbering = f"only {occur} of the classes 0 to {top} occur; number them 0, 1, ..."
        remedy = f"or set data.num_classes = {number}"
        ensure(top < max(len(y_train), UNSAID), f"y_train: {numbering}, {remedy}")
        if occur <= top:
            rank_zero_warn(f"y_train: {numbering}, {remedy} if all are meant", stacklevel=5)
    for name, labels in (("y_train", y_train), ("y_test", y_test)):
        label, row = int(labels.max()), int(labels.argmax())
        largest = f"exceeds {top}, the largest of classes" if said else f"exceeds y_train's largest, {top}"
        ensure(
            label <= top,
            f"{name}: label {label} at row {row} {largest}; number the classes of both alike, or set "
            f"data.num_classes = {label + 1}",
        )


def count_leaks(x_train: Inputs, x_test: Inputs) -> int:
    """Counts the test samples that are also training samples, by a hash of their values.

    Published data sets have a few such twins; warns if there are more than `LEAK`.
    """
    seen, tested = set(_hashes(x_train)), list(_hashes(x_test))
    leaked = sum(row in seen for row in tested)
    if leaked > LEAK * len(tested):
        rank_zero_warn(
            f"x_test: {leaked} of {len(tested)} samples occur in x_train as well, value for value; "
            "test accuracy will flatter, take them out of one of the two",
            stacklevel=4,
        )
    return leaked


def _hashes(x: Inputs) -> Iterator[int]:
    # in the order of memory, which is that of NHWC
    arrays = [(v.permute(0, 2, 3, 1) if v.ndim == 4 else v).numpy() for v in named_tensors(x, "x").values()]
    return (hash(b"".join(row.tobytes() for row in rows)) for rows in zip(*arrays, strict=True))
