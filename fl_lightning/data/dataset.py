"""Data sets of PyTorch, with the client of each sample."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fl_lightning.core import UserError, ensure
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.streaming import IndexedSamples


class FromDataset(FederatedDataModule):
    """Map-style torch data sets of pairs ``(x, label)``; x is an array, a tensor, a PIL image, or a dict of these.

    Threads read the samples once, or with ``stream`` whenever they are needed. The labels come from the attribute
    ``targets`` if there is one; otherwise every sample is read for its label.

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
            n = len(cast(Sized, samples))
            ensure(users is None or len(users) == n, f"{name}: {len(users or ())} for {n} samples; give one per sample")
        super().__init__(**kwargs)
        self.train, self.test = train, test
        if clients is not None:
            self.set_clients(clients, test_clients)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        return *_read("train", self.train), *_read("test", self.test)


def _read(name: str, dataset: Any) -> tuple[IndexedSamples, NDArray[Any]]:
    """Returns the inputs and the labels of a data set of pairs."""
    ensure(len(dataset) != 0, f"{name}: no samples; the {name} data must not be empty")
    first = dataset[0]
    if isinstance(first, Mapping):  # as in Hugging Face's data sets
        raise UserError(
            f"{name}: samples are dicts with keys {', '.join(map(str, first))}, not pairs (x, label); "
            "use HuggingFace, or wrap the data set"
        )
    known = getattr(dataset, "targets", None)
    labels = [dataset[i][1] for i in range(len(dataset))] if known is None else known
    return IndexedSamples(name, len(dataset), lambda i: dataset[i][0], first[0]), np.asarray(labels)
