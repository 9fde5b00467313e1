"""Stored samples, in memory or streamed, and how they become batches on a device."""

import math
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cache
from itertools import cycle, islice
from typing import Any, Self

import lightning as L
import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import (
    Checked,
    Divisor,
    Inputs,
    PositiveInt,
    Threads,
    ensure,
    map_tensors,
    named_tensors,
    require,
    to_device,
)
from fl_lightning.data.augment import Augment
from fl_lightning.data.partition import ClientIndices
from fl_lightning.data.streaming import Prefetcher, Records, Samples, Stream
from fl_lightning.data.tasks import TASKS, TaskName
from fl_lightning.data.validation import check_alike, check_pairs, count_leaks, inputs

Batch = tuple[Inputs, Tensor]
"""Samples ``(B, *input_shape)``, a tensor or a nested dict of tensors, and targets ``(B, ...)``."""


class SampleStore(Checked, L.LightningDataModule, ABC, key="data"):
    """Base of `FederatedDataModule`: stores samples and makes batches of them.

    A training batch is gathered, augmented, split by `pair`, scaled and normalized. An evaluation batch is prepared in
    the same way, without augmentation.
    """

    scale: float = 255.0
    """Value of a uint8 pixel that becomes 1.0."""
    batch_size: int | None
    drop_last: bool
    _num_classes: int
    input_shape: Any
    clients: ClientIndices

    def __init__(
        self,
        eval_batch_size: PositiveInt,
        augment: Augment | None,
        mean: list[float] | None,
        std: list[Divisor] | None,
        standardise: bool,
        stream: bool,
        workers: Threads,
        task: TaskName,
    ) -> None:
        super().__init__()
        self.eval_batch_size, self.augment = eval_batch_size, augment
        self.mean, self.std, self.standardise = mean, std, standardise
        self.stream, self.workers = stream, workers
        self.task, self.device = TASKS[task], torch.device("cpu")
        self._prefetcher: Prefetcher | None = None

    def __repr__(self) -> str:
        """Returns the class with its settings; after setup also number and shape of the samples."""
        text = super().__repr__()
        if not hasattr(self, "clients"):
            return text
        samples = f"{int(self.clients.sizes.sum()):,} training samples of shape {self.input_shape}"
        return f"{text}: {samples}, {self.num_classes} {self.task.unit}"

    __str__ = __repr__  # Lightning's lists the sizes of DataLoaders

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or target values; exists after setup."""
        return self._num_classes

    def _sizes(self, n: int) -> list[int]:
        """Returns the number of samples of each minibatch in one pass over ``n`` samples; never empty."""
        size = self.batch_size or n
        full, rest = divmod(n, size)
        return [size] * full + [rest] * (rest > 0 and not (self.drop_last and full))

    def batch_sizes(self, n: int, count: int) -> list[int]:
        """Returns the number of samples of each of ``count`` minibatches of ``n`` samples."""
        return list(islice(cycle(self._sizes(n)), count))

    def minibatch_sizes(self) -> set[int]:
        """Returns the numbers of samples that minibatches of the clients have."""
        return {size for n in {*self.clients.sizes.tolist()} for size in {*self._sizes(n)}}

    def pair(self, x: Inputs, y: Tensor, evaluation: bool) -> Batch:
        """Splits stored samples into the input of the net and its target.

        Args:
            x: Stored samples, augmented in training, ``(n, ...)``.
            y: Their labels, ``(n,)``.
            evaluation: Whether they are for evaluation.
        """
        return x, y

    # Storage

    def store(self, loaded: Any) -> None:
        """Checks and keeps what `load` has returned.

        Raises:
            UserError: If they are faulty, or do not fit together.
        """
        four = isinstance(loaded, tuple | list) and len(loaded) == 4
        ensure(four, f"data = {type(self).__name__}: load must return four arrays: x_train, y_train, x_test, y_test")
        x_train, y_train, x_test, y_test = loaded
        self.x_train, self.y_train = self.as_stored("x_train", x_train), self.task.targets("y_train", y_train)
        self.x_test, self.y_test = self.as_stored("x_test", x_test), self.task.targets("y_test", y_test)
        check_pairs(like(self.x_train), self.y_train, like(self.x_test), self.y_test)
        files = isinstance(self.x_train, Stream) or isinstance(self.x_test, Stream)
        self.leaked = None if files else count_leaks(self.x_train, self.x_test)

    def as_stored(self, name: str, x: Any) -> Inputs | Stream:
        """Checks samples and returns them in the form of storage: tensors, or a `Stream` if they are read when needed.

        Args:
            name: Name of the samples in errors.
            x: Samples, as `load` may return them.
        """
        if any(isinstance(array, Samples | np.memmap) for array in named_tensors(x, name).values()):
            source = x if isinstance(x, Samples | np.memmap) else Records(x)
            if self.stream or isinstance(source, Samples):
                stream = Stream(name, source, self.workers)
                return stream if self.stream else stream.read()
        return inputs(name, x)

    def to(self, device: torch.device | str) -> Self:
        """Moves the stored data to ``device``, where batches are then made; streamed samples stay where they are."""
        device = torch.device(device)
        if device != self.device:
            for name in ("y_train", "y_test") if self.stream else ("x_train", "y_train", "x_test", "y_test"):
                setattr(self, name, map_tensors(lambda v: v.to(device), getattr(self, name)))
            self.device = device
        return self

    def prepared_shape(self, shape: Any) -> Any:
        """Returns the shape of the net's input, and compares the settings of preparation with the data.

        Args:
            shape: Shape of a stored sample; of a dict, the shapes by name.

        Raises:
            UserError: If a setting does not suit samples of this shape, or targets of this kind.
        """
        tensor = isinstance(shape, tuple)
        for key, values in (("mean", self.mean), ("std", self.std)):
            fits = values is None or (tensor and len(values) in (1, *shape[:1]))
            remedy = "give one value, or one per channel" if tensor else "leave it out"
            require(fits, f"data.{key}", values, f"samples have shape {shape}; {remedy}")
        require(
            not self.standardise or (self.mean is None and self.std is None),
            "data.standardise",
            "true",
            "replaces mean and std; leave these out",
        )
        require(tensor or not self.standardise, "data.standardise", "true", "samples are dicts; use false")
        if self.augment is None:
            return shape
        require(
            tensor and len(shape) == 3,
            "data.augment",
            type(self.augment).__name__,
            f"samples of shape {shape} are not images (C, H, W); use null",
        )
        require(
            not self.augment.mixup or self.task.by_class,
            "data.augment.mixup",
            self.augment.mixup,
            "mixes classes, these targets are none; use 0",
        )
        return self.augment.output_shape(shape)

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Returns the memory of one sample, in bytes."""
        shapes: list[tuple[int, ...]] = [*named_tensors(self.input_shape, "x").values()]
        return max(1, sum(map(math.prod, shapes)) * dtype.itemsize)

    # Batches

    def class_counts(self, client: int) -> Tensor:
        """Counts a client's training samples of each class, ``(num_classes,)``, int64, on the device."""
        labels = self.y_train[to_device(self.clients[client], self.device)]
        counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)
        return counts.scatter_add_(0, labels, torch.ones_like(labels))  # on a GPU, bincount looks at values

    def to_samples(self, indices: Tensor, draws: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Moves indices and draws to where `samples` uses them: to the device, unless samples are streamed."""
        if self.stream:
            return indices, draws
        draws = self.augment.to_device(draws, self.device) if self.augment else draws
        return to_device(indices, self.device), draws

    def samples(self, indices: Tensor, draws: dict[str, Tensor], dtype: torch.dtype) -> Batch:
        """Returns training samples, augmented and scaled, on the device of the data.

        Args:
            indices: Indices into the training data, ``(n,)``, of one minibatch after another; on the host for streamed
                samples.
            draws: The draws of `Augment.draw` for these samples, ``(n, ...)`` by name; empty for no augmentation.
            dtype: Floating dtype of the samples.
        """
        on_device = to_device(indices, self.device)
        raw = self._gather(self.x_train, indices if self.stream else on_device, self._prefetcher)
        augment = self.augment if draws else None
        raw = raw if augment is None else augment(raw, draws)
        x, y = self._prepared(raw, self.y_train[on_device], dtype, evaluation=False)
        return (x, y) if augment is None else augment.finalize(x, y, draws, self.num_classes)

    def in_batches(self, indices: Tensor) -> Sequence[Tensor]:
        """Splits indices ``(n,)`` into batches for evaluation, on the device of the data; none if n is 0."""
        return torch.split(to_device(indices, self.device), self.eval_batch_size) if len(indices) else ()

    def evaluation_batches(
        self, x: Inputs | Stream, y: Tensor, batches: Sequence[Tensor], dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yields batches of stored samples without augmentation.

        Args:
            x: Samples, as stored.
            y: Their targets, ``(N, ...)``, on the device.
            batches: Indices of each batch, by `in_batches`.
            dtype: Floating dtype of the samples.
        """
        plan = (i for indices in batches for i in indices.tolist())
        with closing(Prefetcher(x, plan)) if isinstance(x, Stream) else nullcontext() as prefetcher:
            for indices in batches:
                raw = self._gather(x, indices.cpu() if self.stream else indices, prefetcher)
                raw = raw if self.augment is None else self.augment.center_crop(raw)
                yield self._prepared(raw, y[indices], dtype, evaluation=True)

    def batches_of(self, name: str, x: Any, y: Any, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
        """Returns batches of further samples, prepared like those of the test set.

        Args:
            name: Name of the samples in errors.
            x: Samples, as `load` may return them.
            y: Their targets, ``(N, ...)``.
            dtype: Floating dtype of the samples.

        Raises:
            UserError: If they are faulty, or differ in shape or dtype from the test set's.
        """
        stored, targets = self.as_stored(name, x), self.task.targets(name, y).to(self.device)
        check_alike("x_test", like(self.x_test), name, like(stored))
        stored = stored if self.stream else map_tensors(lambda v: v.to(self.device), stored)
        return self.evaluation_batches(stored, targets, self.in_batches(torch.arange(len(targets))), dtype)

    # Streams

    def read_ahead(self, clients: Iterable[Tensor]) -> None:
        """Starts to read training samples, up to a bounded memory; stops reading if there are none to read.

        Samples that the previous call has read and that are needed again stay. Without a call, minibatches read ahead
        while they are iterated. Has no effect on samples in memory.

        Args:
            clients: Indices of each client's samples in the order of use: the clients of a cohort, then of the next.
        """
        if isinstance(self.x_train, Stream):
            plan = [i for indices in clients for i in indices.tolist()]
            prefetcher = Prefetcher(self.x_train, plan, self._prefetcher)  # which ends the one before
            self._prefetcher = prefetcher if plan else None

    def reading_ahead(self, clients: Iterable[Tensor]) -> AbstractContextManager[object]:
        """Returns a context in which these samples are read ahead as by `read_ahead`, unless others already are."""
        if not self.stream or self._prefetcher is not None:
            return nullcontext()
        self.read_ahead(clients)
        stack = ExitStack()
        stack.callback(self.read_ahead, ())
        return stack

    def _gather(self, x: Inputs | Stream, indices: Tensor, prefetcher: Prefetcher | None) -> Inputs:
        """Returns some samples on the device; images stay channels_last. The indices are on the device of ``x``."""

        def gathered(v: Tensor) -> Tensor:
            if not isinstance(x, Stream):
                v = v.permute(0, 2, 3, 1)[indices].permute(0, 3, 1, 2) if v.ndim == 4 else v[indices]
            return to_device(v, self.device)

        rows = (prefetcher or Prefetcher(x, ())).take(indices.tolist()) if isinstance(x, Stream) else x
        return map_tensors(gathered, rows)

    def _prepared(self, raw: Inputs, y: Tensor, dtype: torch.dtype, evaluation: bool) -> Batch:
        """Converts raw samples and their labels to inputs of the net and targets; floats may be changed in place."""
        x, y = self.pair(raw, y, evaluation)
        return map_tensors(lambda v: self._scaled(v, dtype), x), y.to(dtype) if y.is_floating_point() else y

    def _scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype in (torch.int64, torch.bool):  # tokens, masks
            return x
        out = x.to(dtype)
        if self.standardise:
            std, mean = torch.std_mean(out, dim=tuple(range(1, x.ndim)), correction=0, keepdim=True)
            return out.sub_(mean).div_(std.clamp(min=math.prod(x.shape[1:]) ** -0.5))
        if x.dtype == torch.uint8:
            out = out.div_(self.scale)
        if self.mean is not None:
            out = out.sub_(_channels(tuple(self.mean), x.ndim - 1, dtype, x.device))
        if self.std is not None:
            out = out.div_(_channels(tuple(self.std), x.ndim - 1, dtype, x.device))
        return out


def like(x: Inputs | Stream) -> Inputs:
    """Returns stored samples, or for a `Stream` tensors of their shapes and dtypes."""
    return x.like if isinstance(x, Stream) else x


@cache  # on a GPU each new tensor would be a copy from the host
def _channels(values: tuple[float, ...], ndim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns values of each channel that broadcast over samples of ``ndim`` dimensions."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, *[1] * (ndim - 1))
