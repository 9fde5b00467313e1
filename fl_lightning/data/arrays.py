"""Data from Python, from .npz or .npy files, and scikit-learn's digits."""

import zipfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Count, Divisor, UserError, ensure, numpy_generator
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Given
from fl_lightning.data.stream import inputs, stratified

KEYS = ("x_train", "y_train", "x_test", "y_test")


class Arrays(FederatedDataModule):
    """Plain arrays: an .npz file or a folder of .npy files to be divided, or one (x, y) pair per client.

    uint8 arrays are images and are scaled to [0, 1]; floats are not scaled, and float64 is kept.

    Args:
        path: File with ``x_train, y_train, x_test, y_test``, or folder with ``x_train.npy`` and so on, which ``stream``
            maps into memory; images may be NHWC or NCHW.
        client_arrays: From Python, each client's ``(x, y)``, which sets the partition and the number of clients.
        test: With client_arrays, the central test set ``(x, y)``.
        scale: Value of a uint8 pixel that becomes 1.0.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If not exactly one of path and client_arrays is given, or on faulty data.
    """

    def __init__(
        self,
        path: str | None = None,
        client_arrays: list[tuple[Any, Any]] | None = None,
        test: tuple[Any, Any] | None = None,
        scale: Divisor = 255.0,
        **kwargs: Any,
    ) -> None:
        ensure(
            (path is None) != (client_arrays is None),
            "path: give either path (an .npz file or a folder) or client_arrays (from Python)",
        )
        self.path, self.scale = path, scale
        self.client_arrays, self.test = client_arrays, test
        if client_arrays is not None:
            ensure(test is not None, "test: missing; client_arrays need the central test set as (x, y)")
            bounds = accumulate((len(y) for _, y in client_arrays), initial=0)
            given = Given([list(range(a, b)) for a, b in pairwise(bounds)])
            kwargs = {**kwargs, "num_clients": len(client_arrays), "partition": given}
        super().__init__(**kwargs)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        if self.path is not None:
            folder = Path(self.path)
            return self._from_folder(folder) if folder.is_dir() else self._from_file()
        assert self.client_arrays is not None and self.test is not None
        x_test, y_test = inputs("x of test", self.test[0]), self.task.targets("y of test", self.test[1])
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        for client, (x, y) in enumerate(self.client_arrays):
            xs.append(inputs(f"x of client {client}", x))
            ys.append(self.task.targets(f"y of client {client}", y))
            ensure(
                len(xs[-1]) == len(ys[-1]),
                f"client_arrays: client {client} has {len(xs[-1])} samples and {len(ys[-1])} labels; "
                "give one label per sample",
            )
            ensure(
                xs[-1].shape[1:] == x_test.shape[1:] and xs[-1].dtype == x_test.dtype,
                f"client_arrays: client {client} has samples of shape {tuple(xs[-1].shape[1:])} and "
                f"{xs[-1].dtype}, test {tuple(x_test.shape[1:])} and {x_test.dtype}; prepare all alike",
            )
        return torch.cat(xs), torch.cat(ys), x_test, y_test

    def _from_file(self) -> tuple[Any, Any, Any, Any]:
        try:
            with np.load(str(self.path)) as file:
                missing = [key for key in KEYS if key not in file]
                ensure(not missing, f"data.path = '{self.path}' lacks {', '.join(missing)}; it needs {', '.join(KEYS)}")
                return file["x_train"], file["y_train"], file["x_test"], file["y_test"]
        except FileNotFoundError:
            keys = ", ".join(KEYS)
            raise UserError(f"data.path = '{self.path}': no such file; give an .npz file with {keys}") from None
        except UserError:
            raise
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(
                f"data.path = '{self.path}' is not a readable .npz file ({error}); write it again with np.savez"
            ) from None

    def _from_folder(self, folder: Path) -> tuple[Any, Any, Any, Any]:
        files = [folder / f"{key}.npy" for key in KEYS]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            needed = ", ".join(file.name for file in files)
            raise UserError(f"data.path = '{folder}' lacks {', '.join(missing)}; it needs {needed}")
        mode: Any = "r" if self.stream else None
        try:
            x_train, y_train, x_test, y_test = (np.load(file, mmap_mode=mode) for file in files)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"data.path = '{folder}' has no readable .npy files ({error}); write them again with np.save"
            ) from None
        return x_train, np.array(y_train), x_test, np.array(y_test)


class Digits(FederatedDataModule):
    """The 1,797 handwritten 8x8 digits that come with scikit-learn: 1,437 for training, 360 for testing.

    Args:
        num_clients: Number of clients.
        batch_size: Samples per local step; null for full batches.
        **kwargs: As for FederatedDataModule.
    """

    scale = 16.0

    def __init__(self, num_clients: Count = 50, batch_size: Count | None = 16, **kwargs: Any) -> None:
        super().__init__(num_clients=num_clients, batch_size=batch_size, **kwargs)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = digits.images.astype(np.uint8), digits.target.astype(np.int64)
        test = stratified(y, 360, numpy_generator(0, "digits test set"))  # independent of data.seed
        train = np.setdiff1d(np.arange(len(y)), test)
        return x[train], y[train], x[test], y[test]
