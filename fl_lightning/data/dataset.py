"""Any torch data set, with the client of each sample."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fl_lightning.core.errors import UserError
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Natural
from fl_lightning.data.stream import Samples


class FromDataset(FederatedDataModule):
    """Map-style torch data sets whose samples are ``(x, label)``; x is an array, a tensor or a PIL image.

    Samples are read once, by threads, or with ``stream`` each time when they are needed; then labels are taken from
    the attribute ``targets`` if there is one, and otherwise found by reading every sample.

    Args:
        train: The training data.
        test: The test data.
        clients: Client of each training sample, numbers or names; this is then the partition, and the number of
            clients. Null: divided by ``partition``.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If there are not as many clients as samples, or (on loading or reading) samples are not alike.
    """

    def __init__(
        self, train: Dataset[Any], test: Dataset[Any], clients: Sequence[int | str] | None = None, **kwargs: Any
    ) -> None:
        if clients is not None:
            if len(clients) != len(cast(Sized, train)):
                raise UserError(
                    f"clients: {len(clients)} of them for {len(cast(Sized, train))} samples; give the client of each"
                )
            users = [str(client) for client in clients]
            kwargs = {**kwargs, "num_clients": len(set(users)), "partition": Natural(users)}
        super().__init__(**kwargs)
        self.train, self.test = train, test

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        train, test = _Read("train", self.train), _Read("test", self.test)
        return train, train.labels(), test, test.labels()


class _Read(Samples):
    """The first parts of a data set's pairs."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        if len(dataset) == 0:
            raise UserError(f"{name}: no samples; the {name} data must not be empty")
        first = np.asarray(dataset[0][0])
        self.shape, self.dtype = (len(dataset), *first.shape), first.dtype

    def __getitem__(self, index: int) -> NDArray[Any]:
        sample = np.asarray(self.dataset[index][0])
        if sample.shape != self.shape[1:] or sample.dtype != self.dtype:
            raise UserError(
                f"{self.name}: sample {index} is {sample.dtype} {sample.shape}, the first is {self.dtype} "
                f"{self.shape[1:]}; make all alike"
            )
        return sample

    def labels(self) -> NDArray[Any]:
        """Label of each sample, ``(N,)``."""
        known = getattr(self.dataset, "targets", None)
        return np.asarray([self.dataset[i][1] for i in range(len(self))] if known is None else known)
