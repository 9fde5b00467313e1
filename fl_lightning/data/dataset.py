"""Any torch data set, with the client of each sample."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fl_lightning.core import UserError, ensure
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Natural
from fl_lightning.data.stream import Samples


class FromDataset(FederatedDataModule):
    """Map-style torch data sets of samples ``(x, label)``; x is an array, a tensor or a PIL image.

    Threads read the samples once, or with ``stream`` whenever they are needed. Labels are those of the attribute
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
        if clients is not None:
            natural = Natural([str(client) for client in clients])
            kwargs = {**kwargs, "num_clients": len({*map(str, clients)}), "partition": natural}
            self.test_clients = None if test_clients is None else natural.clients(test_clients)
        super().__init__(**kwargs)
        self.train, self.test = train, test

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        train, test = PairInputs("train", self.train), PairInputs("test", self.test)
        return train, train.labels(), test, test.labels()


class PairInputs(Samples):
    """The inputs of a data set's pairs.

    Args:
        name: Their name in errors.
        dataset: A map-style data set of pairs ``(x, label)``; x is an array, a tensor or a PIL image.

    Raises:
        UserError: If there are no samples or these are no pairs, or (on reading) they differ in shape or dtype.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        ensure(len(dataset) != 0, f"{name}: no samples; the {name} data must not be empty")
        sample = dataset[0]
        if isinstance(sample, Mapping):  # as in Hugging Face's data sets
            raise UserError(
                f"{name}: samples are dicts with keys {', '.join(map(str, sample))}, not pairs (x, label); "
                "use HuggingFace, or wrap the data set"
            )
        first = np.asarray(sample[0])
        self.shape, self.dtype = (len(dataset), *first.shape), first.dtype

    def __getitem__(self, index: int) -> NDArray[Any]:
        """See :class:`Samples`."""
        given = self.dataset[index][0]
        sample, file = np.asarray(given), getattr(given, "filename", "")
        ensure(
            sample.shape == self.shape[1:] and sample.dtype == self.dtype,
            f"{self.name}: sample {index}{f' ({file})' if file else ''} is {sample.dtype} {sample.shape}, the first is "
            f"{self.dtype} {self.shape[1:]}; make all alike, images by a transform or map that resizes",
        )
        return sample

    def labels(self) -> NDArray[Any]:
        """Label of each sample, ``(N,)``."""
        known = getattr(self.dataset, "targets", None)
        return np.asarray([self.dataset[i][1] for i in range(len(self))] if known is None else known)
