"""DataLoaders of whole batches, for a plain ``lightning.Trainer``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.data.minibatches import Batch


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
    """The numbers of an epoch's batches, in order, and the epoch, by which samples and augmentation are drawn.

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
