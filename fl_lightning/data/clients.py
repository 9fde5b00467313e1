"""The samples of each client, as indices into the training data."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import numpy_generator, require
from fl_lightning.data.partition import Partition, cut, stratified


class ClientIndices(Sequence[Tensor]):
    """Each client's indices, as views of one tensor: a million clients are cheap.

    Args:
        parts: Indices by client.

    Attributes:
        indices: All of them, client after client.
        sizes: Number of samples of each client, ``(clients,)``.
    """

    def __init__(self, parts: Sequence[NDArray[np.int64]]) -> None:
        self.indices = torch.from_numpy(np.concatenate(parts))
        self.sizes = torch.tensor([len(part) for part in parts])
        self._ends = self.sizes.cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, client: int) -> Tensor:  # type: ignore[override]  # no slices
        return self.indices[self._of(client)]

    def _of(self, client: int) -> slice:
        return slice(self._ends[client - 1] if client else 0, self._ends[client])

    def arrays(self, clients: Sequence[int]) -> list[NDArray[np.int64]]:
        """Returns the indices of several clients."""
        indices = self.indices.numpy()
        return [indices[self._of(client)] for client in clients]

    @classmethod
    def of(cls, clients: NDArray[np.int64], num_clients: int) -> Self:
        """Groups indices by the client of each sample.

        Args:
            clients: Number of each sample's client, ``(N,)``; -1 for a sample without a client.
            num_clients: Number of clients.
        """
        order = np.argsort(clients, kind="stable")[np.count_nonzero(clients < 0) :]
        return cls(cut(order, np.bincount(clients[order], minlength=num_clients)))


def divide(
    y: NDArray[Any],
    strata: NDArray[np.int64],
    partition: Partition,
    num_clients: int,
    num_classes: int,
    val_fraction: float,
    seed: int,
) -> tuple[Tensor, ClientIndices]:
    """Holds out the validation part, and divides the rest among the clients.

    Args:
        y: Training labels, ``(N,)``, or targets ``(N, k)``.
        strata: Class of each sample, ``(N,)``; zeros if they have none.
        partition: Divides the rest. A fixed partition refers to all N samples, and loses the samples that are held out.
        num_clients: Number of clients.
        num_classes: Number of classes.
        val_fraction: Share of the samples that is held out, stratified by class.
        seed: Seed of the validation part and of the partition.

    Returns:
        Indices of the samples that are held out, ``(n_val,)``, and indices of each client's samples.

    Raises:
        UserError: If nothing would be held out, or a client is left without samples.
    """
    n_val = round(val_fraction * len(y))
    require(n_val > 0 or not val_fraction, "data.val_fraction", val_fraction, "holds out nothing; use for example 0.1")
    val = stratified(strata, n_val, numpy_generator(seed, "validation"))
    kept = np.delete(np.arange(len(y)), val)
    require(len(kept) > 0, "data.val_fraction", val_fraction, "leaves nothing to train on; use a smaller one")
    require(
        num_clients <= len(kept),
        "data.num_clients",
        num_clients,
        f"exceeds the {len(kept)} training samples; use fewer clients",
    )
    if partition.fixed:
        parts = [part[~np.isin(part, val)] for part in partition(y, num_clients, num_classes, seed)]
    else:
        parts = [kept[part] for part in partition(y[kept], num_clients, num_classes, seed)]
    clients = ClientIndices(parts)
    require(
        bool(clients.sizes.all()),
        "data.val_fraction",
        val_fraction,
        f"takes all data of client {int(clients.sizes.argmin())}; use a smaller one",
    )
    return torch.from_numpy(val), clients
