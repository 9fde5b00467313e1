"""Minibatches: their samples are drawn before training, and gathered and augmented when they are needed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.core import Inputs, map_tensors, named_tensors, to_device
from fl_lightning.core.nested import nested
from fl_lightning.data.samples import Batch, SampleStore

CHUNK = 64 * 2**20
"""Bytes of samples that are gathered and augmented at once."""


@dataclass(frozen=True)
class Minibatches:
    """A client's minibatches of one phase; iterating yields ``(x, y)`` of each step.

    Attributes:
        source: The data module that holds the samples.
        indices: Samples in the order of use, ``(n,)``, on the CPU.
        sizes: Samples of each step; their sum is n.
        draws: Random draws of the augmentation, ``(n, ...)`` by name, on the CPU.
        dtype: Floating dtype of the samples.
    """

    source: SampleStore
    indices: Tensor
    sizes: list[int]
    draws: dict[str, Tensor]
    dtype: torch.dtype

    def __len__(self) -> int:
        """Returns the number of steps."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        offset, (indices, draws) = 0, self.source.to_samples(self.indices, self.draws)
        with self.source.reading_ahead([self.indices]):
            for sizes in chunks(self.sizes, self.source.sample_bytes(self.dtype)):
                n = sum(sizes)
                drawn = {name: v[offset : offset + n] for name, v in draws.items()}
                x, y = self.source.samples(indices[offset : offset + n], drawn, self.dtype)
                for start, end in pairwise(accumulate(sizes, initial=0)):
                    yield map_tensors(itemgetter(slice(start, end)), x), y[start:end]
                offset += n

    def take(self, steps: Sequence[int]) -> "Minibatches":
        """Returns some of the steps, in the given order."""
        parts = torch.split(torch.arange(len(self.indices)), self.sizes)
        rows, sizes = torch.cat([parts[step] for step in steps]), [self.sizes[step] for step in steps]
        draws = {name: v[rows] for name, v in self.draws.items()}
        return Minibatches(self.source, self.indices[rows], sizes, draws, self.dtype)


@dataclass(frozen=True)
class MinibatchTable:
    """Minibatches of several clients, one client after another.

    Attributes:
        source: The data module that holds the samples.
        indices: Samples in the order of use, ``(n,)``, on the CPU.
        sizes: Samples of each step of each client, ``(clients, steps)``; 0: it takes no such step.
        draws: Random draws of the augmentation, ``(n, ...)`` by name, on the CPU.
        dtype: Floating dtype of the samples.
    """

    source: SampleStore
    indices: Tensor
    sizes: NDArray[np.int64]
    draws: dict[str, Tensor]
    dtype: torch.dtype

    def blocks(self, clients: Sequence[int], width: int) -> list[dict[str, Tensor]]:
        """Stacks the clients of consecutive rounds, gathered at once; returns `Block.tensors` of each round.

        Args:
            clients: Numbers of clients of the rounds.
            width: As for `blocks`.
        """
        rounds, batch = len(clients), self.source.batch_size or 1
        sizes = np.zeros((rounds, width, self.sizes.shape[1]), np.int64)
        sizes[np.arange(width) < np.array(clients)[:, None]] = self.sizes
        (indices, draws), weights = _placed(self.source, sizes, self.indices, self.draws, batch, self.dtype)
        tensors = _stacked(self.source.samples(indices, draws, self.dtype), width, batch, *weights).tensors()
        steps = np.count_nonzero(sizes.any(1), axis=1).tolist()
        parts = {name: torch.split(v, steps) for name, v in tensors.items()}
        return [{name: values[i] for name, values in parts.items()} for i in range(rounds)]


def chunks(sizes: Iterable[int], sample_bytes: int) -> Iterator[list[int]]:
    """Groups consecutive steps whose samples take about `CHUNK` bytes; yields the sizes of their minibatches."""
    limit = max(1, CHUNK // sample_bytes)
    chunk: list[int] = []
    for size in sizes:
        if chunk and sum(chunk) + size > limit:
            yield chunk
            chunk = []
        chunk.append(size)
    yield chunk


@dataclass(frozen=True)
class Block:
    """Some steps of several clients, padded to one shape.

    Attributes:
        x: Samples, ``(steps, clients, batch, ...)``, or a nested dict of such tensors.
        y: Labels, ``(steps, clients, batch)``, or with Mixup ``(steps, clients, batch, classes)``.
        weight: Weight of each sample in its minibatch's mean, 0 for padding, ``(steps, clients, batch)``.
        active: Whether a client takes that step, ``(steps, clients, 1)``.
    """

    x: Inputs
    y: Tensor
    weight: Tensor
    active: Tensor

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor, Tensor, Tensor]]:
        """Yields ``x, y, weight, active`` of each step."""
        for i, (y, weight, active) in enumerate(zip(self.y, self.weight, self.active, strict=True)):
            yield map_tensors(itemgetter(i), self.x), y, weight, active

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name; those of a dict ``x`` by dotted path."""
        return named_tensors(vars(self), "block")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Block":
        """Returns the block whose `tensors` these are; further names are ignored."""
        return cls(**nested(tensors, "block"))


def blocks(clients: Sequence[Minibatches], width: int, batch: int) -> Iterator[Block]:
    """Stacks the minibatches of several clients; yields consecutive steps.

    Args:
        clients: Their minibatches, of one source.
        width: Clients of a block; places beyond the given clients are padding and never active.
        batch: Samples of a minibatch, padding included.
    """
    first = clients[0]
    sizes = np.zeros((1, width, max(map(len, clients))), np.int64)
    for row, client in zip(sizes[0], clients, strict=False):  # further rows are padding
        row[: len(client)] = client.sizes
    drawn = {name: torch.cat([c.draws[name] for c in clients]) for name in first.draws}
    joined = torch.cat([c.indices for c in clients])
    # all are moved to the device at once, not chunk by chunk
    (indices, draws), (weight, active) = _placed(first.source, sizes, joined, drawn, batch, first.dtype)
    steps, step = len(active), width * batch
    start = 0
    with first.source.reading_ahead(client.indices for client in clients):
        for chunk in chunks([batch] * steps, first.source.sample_bytes(first.dtype) * width):
            end = start + len(chunk)
            rows = slice(start * step, end * step)
            samples = first.source.samples(indices[rows], {name: v[rows] for name, v in draws.items()}, first.dtype)
            yield _stacked(samples, width, batch, weight[start:end], active[start:end])
            start = end


def _stacked(samples: Batch, width: int, batch: int, weight: Tensor, active: Tensor) -> Block:
    """Returns samples ``(steps * clients * batch, ...)`` with their labels as a block."""
    x, y = (map_tensors(lambda v: torch.unflatten(v, 0, (-1, width, batch)), tensors) for tensors in samples)
    return Block(x, y, weight, active)


def _placed(
    source: SampleStore,
    sizes: NDArray[np.int64],
    indices: Tensor,
    draws: Mapping[str, Tensor],
    batch: int,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """Returns the places of padded minibatches, those of the blocks of some rounds one after another.

    Args:
        source: The data module that holds the samples.
        sizes: Samples of each step, ``(rounds, width, steps)``; 0: a client takes no such step.
        indices: Samples of all clients, one client after another, ``(n,)``.
        draws: Their random draws, ``(n, ...)`` by name.
        batch: Samples of a minibatch, padding included.
        dtype: Floating dtype of the weights.

    Returns:
        Sample of every place, ``(steps * clients * batch,)``, and its random draws by name; weight and activity as in
        `Block`. All are where the source uses them.
    """
    # position of every place in all clients' samples, joined; padding repeats a minibatch's last sample
    starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
    taken = sizes.any(1)  # (rounds, steps)
    starts, sizes = (np.ascontiguousarray(v.transpose(0, 2, 1)[taken])[..., None] for v in (starts, sizes))
    place, active = np.arange(batch), sizes > 0  # (steps, clients, 1)
    flat = torch.from_numpy(np.where(active, starts + np.minimum(place, sizes - 1), 0)).reshape(-1)
    weight = torch.from_numpy((place < sizes) / np.maximum(sizes, 1))
    samples = source.to_samples(indices[flat], {name: v[flat] for name, v in draws.items()})
    return samples, (to_device(weight, source.device, dtype), to_device(torch.from_numpy(active), source.device))


# DataLoaders of whole batches, for a plain ``lightning.Trainer``


class Batches(Dataset[Batch]):
    """A map-style data set whose items are whole batches.

    Args:
        count: Number of batches in an epoch.
        make: Returns the batches of the given numbers, in that order, of the given epoch.
    """

    def __init__(self, count: int, make: Callable[[Sequence[int], int], Iterator[Batch]]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Batch:
        return next(self.make([number], 0))


class EpochSampler(Sampler[int]):
    """Yields the numbers of an epoch's batches, and counts epochs: samples and augmentation are drawn by epoch.

    The epoch grows by one with each pass; Lightning sets it, so it continues when a run is resumed.
    """

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch


class BatchLoader(DataLoader[Batch]):
    """A DataLoader over `Batches`, which the data module's threads read ahead: there are no worker processes.

    Lightning can inject a DistributedSampler, and then each process makes its own share of the batches.

    Args:
        dataset: The batches.
        **kwargs: As for DataLoader, such as ``sampler``.
    """

    dataset: Batches

    def __init__(self, dataset: Batches, **kwargs: Any) -> None:
        super().__init__(dataset, **{**kwargs, "batch_size": None})

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch declares its own iterator class
        # read at the first batch: Lightning sets the first epoch of a resumed run only after it has called iter()
        epoch = getattr(self.sampler, "epoch", 0)
        yield from self.dataset.make([*self.sampler], epoch)
