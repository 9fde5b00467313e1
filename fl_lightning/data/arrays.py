"""Data from Python: arrays and data sets of PyTorch; .npz and .npy files; scikit-learn's digits."""

import re
import zipfile
from collections.abc import Mapping, Sequence, Sized
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fl_lightning.core import (
    LATER,
    Divisor,
    PositiveInt,
    UserError,
    described,
    ensure,
    fits,
    named_tensors,
    numpy_generator,
)
from fl_lightning.core.nested import nested
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Given, stratified
from fl_lightning.data.streaming import IndexedSamples
from fl_lightning.data.validation import check_alike, inputs

KEYS = ("x_train", "y_train", "x_test", "y_test")
READ_AGAIN = 4
"""Samples of a data set that are read twice, to find a random transform."""


class Arrays(FederatedDataModule):
    """Plain arrays: an .npz file or a folder of .npy files to be divided, or one (x, y) pair per client.

    uint8 arrays are images and are scaled to [0, 1]; floats are not scaled, and float64 is kept.

    Args:
        path: File with ``x_train, y_train, x_test, y_test``, or folder with ``x_train.npy`` and so on, which ``stream``
            maps into memory; images may be NHWC or NCHW. An array of users, clients or a mask beside them is refused,
            unless ``partition`` is set: no other array is read. Arrays ``x_train.image, x_train.table`` and likewise
            ``x_test.image, x_test.table`` make samples with several named inputs, which the net gets as a dict.
        client_arrays: From Python, each client's ``(x, y)``, which sets the partition and the number of clients; x is
            an array or a nested dict of arrays.
        test: With client_arrays, the central test set ``(x, y)``.
        scale: Value of a uint8 pixel that becomes 1.0.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If not exactly one of path and client_arrays is given, or on faulty data.
    """

    def __init__(
        self,
        path: Annotated[str | PathLike[str] | None, LATER] = None,
        client_arrays: Annotated[list[tuple[Any, Any]] | None, LATER] = None,
        test: tuple[Any, Any] | None = None,
        scale: Divisor = 255.0,
        **kwargs: Any,
    ) -> None:
        ensure(
            path is None or isinstance(path, str | PathLike),
            f"data.path = a {type(path).__name__}: give an .npz file or a folder; "
            "arrays go by client_arrays=[(x, y), ...], test=(x, y)",
        )
        ensure(
            (path is None) != (client_arrays is None),
            "data.path: give either path (an .npz file or a folder) or client_arrays (from Python)",
        )
        self.path, self.scale = path, scale
        self.client_arrays, self.test = client_arrays, test
        if client_arrays is not None:
            ensure(test is not None, "test: missing; client_arrays need the central test set as (x, y)")
            valid = fits(client_arrays, list) and all(fits(pair, list) and len(pair) == 2 for pair in client_arrays)
            ensure(valid, "client_arrays: give a list of pairs (x, y), one for each client")
            n, asked = len(client_arrays), kwargs.get("num_clients", len(client_arrays))
            ensure(asked == n, f"num_clients = {asked}: client_arrays has {n}; leave it out")
            ensure(kwargs.get("partition") is None, "partition: client_arrays is one; leave it out")
            partition = Given.consecutive(len(y) for _, y in client_arrays)
            kwargs = {**kwargs, "num_clients": len(client_arrays), "partition": partition}
        super().__init__(**kwargs)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        if self.path is not None:
            arrays, suffix, others = _read(Path(self.path), "r" if self.stream else None)
            unread = [name for name in others if re.search("user|client|partition|mask", name, re.IGNORECASE)]
            ensure(
                not unread or self.partition is not self._default,
                f"data.path = '{self.path}': {', '.join(unread)} is not read; set data.partition, such as Natural with "
                "its users, or leave this array out",
            )
            data = {key: nested(arrays, key) for key in KEYS}
            missing = [key for key, part in data.items() if not (part if isinstance(part, Mapping) else np.ndim(part))]
            needed = ", ".join(f"{key}{suffix}" for key in KEYS)
            ensure(not missing, f"data.path = '{self.path}' lacks {', '.join(missing)}; it needs {needed}")
            x_train, y_train, x_test, y_test = data.values()
            return x_train, np.array(y_train), x_test, np.array(y_test)
        assert self.client_arrays is not None and self.test is not None
        x_test, y_test = inputs("x of test", self.test[0]), self.task.targets("y of test", self.test[1])
        xs, ys = [], []
        for client, (x, y) in enumerate(self.client_arrays):
            xs.append(inputs(f"x of client {client}", x))
            ys.append(self.task.targets(f"y of client {client}", y))
            for n in {len(v) for v in named_tensors(xs[-1], "x").values()}:
                ensure(
                    n == len(ys[-1]),
                    f"client_arrays: client {client} has {n} samples and {len(ys[-1])} labels; "
                    "give one label per sample",
                )
            check_alike("x of test", x_test, f"x of client {client}", xs[-1])
        parts = [named_tensors(x, "x") for x in xs]
        return (
            nested({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, "x"),
            torch.cat(ys),
            x_test,
            y_test,
        )


def _read(path: Path, mode: Any) -> tuple[dict[str, Any], str, list[str]]:
    """Returns arrays of an .npz file or a folder's .npy files by name, the suffix of names, and those of the others."""
    try:
        if path.is_dir():
            files = {file.stem: file for file in sorted(path.glob("*.npy"))}
            arrays = {name: np.load(file, mmap_mode=mode) for name, file in files.items() if _is_read(name)}
            return arrays, ".npy", [*files.keys() - arrays.keys()]
        with np.load(path) as file:
            arrays = {name: file[name] for name in file if _is_read(name)}
            return arrays, "", [*set(file) - arrays.keys()]
    except FileNotFoundError:
        raise UserError(f"data.path = '{path}': no such file; give an .npz file with {', '.join(KEYS)}") from None
    except (OSError, ValueError, EOFError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        kind, them = ("has no readable .npy files", "them") if path.is_dir() else ("is not a readable .npz file", "it")
        remedy = f"write {them} again with np.{'save' if path.is_dir() else 'savez'}"
        raise UserError(f"data.path = '{path}' {kind} ({error}); {remedy}") from None


def _is_read(name: str) -> bool:
    return name.partition(".")[0] in KEYS


class FromDataset(FederatedDataModule):
    """Map-style torch data sets of pairs ``(x, label)``; x is an array, a tensor, a PIL image, or a dict of these.

    Threads read the samples once, or with ``stream`` whenever they are needed. Every sample is read for its label
    before, but for torchvision's own data sets without a ``target_transform``, whose ``targets`` hold the labels.

    Args:
        train: The training data.
        test: The test data.
        clients: Client of each training sample, numbers or names, which sets the partition and the number of
            clients. Null: samples are divided by ``partition``.
        test_clients: With clients, the client of each test sample: a client's own part of the test set.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If there are not as many clients as samples, or test clients alone, or (on loading or reading)
            samples are not pairs, or differ in shape or dtype.
    """

    def __init__(
        self,
        train: Dataset[Any],
        test: Dataset[Any],
        clients: Sequence[int | str] | None = None,
        test_clients: Sequence[int | str] | None = None,
        **kwargs: Any,
    ) -> None:
        ensure(test_clients is None or clients is not None, "clients: missing; test_clients are among them")
        for name, users, samples in (("clients", clients, train), ("test_clients", test_clients, test)):
            split = "train" if samples is train else "test"
            sized = isinstance(samples, Sized)
            ensure(sized, f"{split}: a {type(samples).__name__} has no length; give a map-style data set of pairs")
            n = len(cast(Sized, samples))
            ensure(
                users is None or len(users) == n,
                f"{name}: {0 if users is None else len(users)} for {n} samples; give one per sample",
            )
        super().__init__(**kwargs)
        self.train, self.test = train, test
        if clients is not None:
            self.set_clients(clients, test_clients, kwargs.get("num_clients"))

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        return *_pairs("train", self.train), *_pairs("test", self.test)


def _pairs(name: str, dataset: Any) -> tuple[IndexedSamples, NDArray[Any]]:
    """Returns the inputs and the labels of a data set of pairs."""
    ensure(len(dataset) != 0, f"{name}: no samples; the {name} data must not be empty")
    first: Any = dataset[0] if hasattr(dataset, "__getitem__") else None  # a DataLoader has none
    if isinstance(first, Mapping):  # as in Hugging Face's data sets
        raise UserError(
            f"{name}: samples are dicts with keys {', '.join(map(str, first))}, not pairs (x, label); "
            "use HuggingFace, or wrap the data set"
        )
    pair = isinstance(first, tuple | list) and len(first) > 1
    ensure(pair, f"{name}: a {type(dataset).__name__} has no pairs (x, label); give a map-style data set of pairs")
    n, labels = len(dataset), _known_labels(dataset)
    labels = np.asarray([dataset[i][1] for i in range(n)]) if labels is None else labels
    samples = IndexedSamples(name, n, lambda i: dataset[i][0], first[0])
    if any(described(samples[i]) != described(samples[i]) for i in range(min(n, READ_AGAIN))):
        rank_zero_warn(
            f"{name}: a sample differs when it is read again, as by a random transform; samples are read once, or with "
            "stream each time, and then no run can be repeated: augment by data.augment",
            stacklevel=2,
        )
    return samples, labels


def _known_labels(dataset: Any) -> NDArray[Any] | None:
    """Returns the labels that a data set of torchvision keeps; None of others, since a wrapper may change them."""
    module = getattr(type(dataset).__getitem__, "__module__", None) or ""  # that of a list has none
    targets = getattr(dataset, "targets", None) if module.startswith("torchvision.") else None
    if targets is None or getattr(dataset, "target_transform", None) is not None:
        return None
    labels, n = np.asarray(targets), len(dataset)
    fit = labels.shape == (n,) and labels.dtype.kind in "iu"  # QMNIST has eight columns, Cityscapes paths
    return labels if fit and all(dataset[i][1] == labels[i] for i in (0, n - 1)) else None


class Digits(FederatedDataModule):
    """The 1,797 handwritten 8x8 digits that come with scikit-learn: 1,437 for training, 360 for testing.

    Args:
        num_clients: Number of clients.
        batch_size: Samples per local step; null for full batches.
        **kwargs: As for FederatedDataModule.
    """

    scale = 16.0

    def __init__(self, num_clients: PositiveInt = 50, batch_size: PositiveInt | None = 16, **kwargs: Any) -> None:
        super().__init__(num_clients=num_clients, batch_size=batch_size, **kwargs)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.images.astype(np.uint8), digits.target.astype(np.int64)
        test = stratified(y, 360, numpy_generator(0, "digits test set"))  # independent of data.seed
        train = np.setdiff1d(np.arange(len(y)), test)
        return x[train], y[train], x[test], y[test]
