"""Stored samples, in memory or streamed, and the way from there to batches on a device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import Self

from fl_lightning.core import Checked, Count, Divisor, Threads, ensure, require, to_device
from fl_lightning.data.augment import Augment
from fl_lightning.data.checks import check_pairs, count_leaks
from fl_lightning.data.minibatches import Batch, Minibatches
from fl_lightning.data.stream import Prefetcher, Samples, Stream, inputs
from fl_lightning.data.tasks import TASKS, TaskName


class SampleModule(Checked, L.LightningDataModule, ABC, key="data"):
    """Training and test samples, and batches of them on a device; the clients come with `FederatedDataModule`.

    A training batch is gathered, augmented, split by :meth:`pair`, scaled and normalised; an evaluation batch is the
    same without augmentation. Settings and attributes are those of `FederatedDataModule`.
    """

    scale: float = 255.0
    """Value of a uint8 pixel that becomes 1.0."""
    published: tuple[int, int] | None = None
    """Numbers of training and test samples of a published data set; setup warns of others."""

    def __init__(
        self,
        eval_batch_size: Count,
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
        self.task = TASKS[task]
        self.device = torch.device("cpu")
        self._prefetcher: Prefetcher | None = None

    @abstractmethod
    def load(self) -> tuple[Any, Any, Any, Any]:
        """Reads the data.

        Returns:
            ``x_train, y_train, x_test, y_test`` as arrays or tensors: uint8 images (NCHW, NHWC or NHW), or floats or
            tokens ``(N, ...)``; labels are integers ``(N,)``, targets of other tasks as these want them. Samples that
            need not be in memory can be `Samples` or an ``np.memmap``.
        """

    # Hooks for data that are not images with one class each

    def count_classes(self) -> int:
        """Number of classes, by default one more than the largest training label; not called with other tasks."""
        return self.task.outputs(self.y_train)

    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one sample before augmentation."""
        return tuple(self.x_train.shape[1:])

    def pair(self, x: Tensor, y: Tensor, evaluation: bool) -> Batch:
        """Splits stored samples into the input of the net and its target.

        Args:
            x: Stored samples, in training augmented, ``(n, ...)``.
            y: Their labels, ``(n,)``.
            evaluation: Whether they are for evaluation.
        """
        return x, y

    def metric(self) -> tuple[str, Metric]:
        """Name and a new instance of the metric that is evaluated with the loss, updated by outputs and targets."""
        return self.task.metric(self.num_classes)

    def test_parts(self) -> dict[str, Tensor]:
        """Parts of the test set that also get a metric of their own: masks ``(n_test,)`` bool by name."""
        return {}

    # Storage

    def setup(self, stage: str | None = None) -> None:
        """Loads and checks the data. Every stage needs all of them: the classes are those of the training labels."""
        x_train, y_train, x_test, y_test = self.load()
        self.x_train, self.y_train = self.stored("x_train", x_train), self.task.targets("y_train", y_train)
        self.x_test, self.y_test = self.stored("x_test", x_test), self.task.targets("y_test", y_test)
        check_pairs(self.x_train, self.y_train, self.x_test, self.y_test)
        sizes = len(self.x_train), len(self.x_test)
        if self.published is not None and sizes != self.published:
            rank_zero_warn(
                f"{type(self).__name__}: {sizes[0]} training and {sizes[1]} test samples, not the "
                f"{self.published[0]} and {self.published[1]} of the published data set; results do not compare",
                stacklevel=4,
            )
        self.leaked = count_leaks(self.x_train, self.x_test)
        self.num_classes = self.count_classes() if self.task.by_class else self.task.outputs(self.y_train)
        label, row, top = int(self.y_test.max()), int(self.y_test.argmax()), self.num_classes - 1
        ensure(
            not self.task.by_class or label <= top,
            f"y_test: label {label} at row {row} exceeds y_train's largest, {top}; number the classes of both alike",
        )
        self.input_shape = self.stored_shape()
        no_images = f"samples of shape {self.input_shape} are not images (C, H, W); use null"
        require(
            self.augment is None or len(self.input_shape) == 3, "data.augment", type(self.augment).__name__, no_images
        )
        mixup = getattr(self.augment, "mixup", 0.0)
        require(
            not mixup or self.task.by_class, "data.augment.mixup", mixup, "mixes classes, these targets are none; use 0"
        )
        alone = not self.standardise or (self.mean is None and self.std is None)
        require(alone, "data.standardise", "true", "replaces mean and std; leave these out")
        for key, values in (("mean", self.mean), ("std", self.std)):
            fits = values is None or len(values) in (1, *self.input_shape[:1])
            shape = f"samples have shape {self.input_shape}; give one value, or one per channel"
            require(fits, f"data.{key}", values, shape)
        if self.augment is not None:
            self.input_shape = self.augment.output_shape(self.input_shape)

    def stored(self, name: str, x: Any) -> Tensor | Stream:
        """Checked samples in the form in which they are kept: a tensor, or a `Stream` if they stay where they are.

        Args:
            name: Name of the samples in errors.
            x: Samples, as `load` may return them.
        """
        if isinstance(x, Samples) or (self.stream and isinstance(x, np.memmap)):
            stream = Stream(name, x, self.workers)
            return stream if self.stream else stream.read()
        return inputs(name, x)

    def to(self, device: torch.device | str) -> Self:
        """Moves the stored data to ``device``, where batches are then made; streamed samples stay where they are."""
        device = torch.device(device)
        if device != self.device:
            for name in ("y_train", "y_test") if self.stream else ("x_train", "y_train", "x_test", "y_test"):
                setattr(self, name, getattr(self, name).to(device))
            self.device = device
        return self

    # Batches

    def moved(self, indices: Tensor, draws: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Indices and draws where `samples` uses them, moved at once for many calls: on the device, unless streamed."""
        if self.stream:
            return indices, draws
        return to_device(indices, self.device), self.augment.moved(draws, self.device) if self.augment else draws

    def samples(self, indices: Tensor, draws: dict[str, Tensor], dtype: torch.dtype) -> Batch:
        """Training samples, augmented and scaled, on the device of the data.

        Args:
            indices: Indices into the training data, ``(n,)``; those of a minibatch are consecutive. Of a stream they
                are on the host.
            draws: Their draws, from `Augment.draw`, ``(n, ...)`` by name; empty for no augmentation.
            dtype: Floating dtype of the samples.
        """
        here = to_device(indices, self.device)
        raw = self._gather(self.x_train, indices if self.stream else here, self._prefetcher)
        augment = self.augment if draws else None
        x, y = self.pair(raw if augment is None else augment(raw, draws), self.y_train[here], evaluation=False)
        x, y = self._scaled(x, dtype), _target(y, dtype)
        return (x, y) if augment is None else augment.finish(x, y, draws, self.num_classes)

    def batches_of(self, name: str, x: Any, y: Any, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
        """Batches of further samples, prepared as those of the test set.

        Args:
            name: Name of the samples in errors.
            x: Samples, as `load` may return them.
            y: Their labels, ``(N,)``.
            dtype: Floating dtype of the samples.

        Raises:
            UserError: If they are faulty, or their shape is not the test set's.
        """
        stored, targets = self.stored(name, x), self.task.targets(name, y).to(self.device)
        ensure(
            stored.shape[1:] == self.x_test.shape[1:],
            f"{name}: samples of shape {tuple(stored.shape[1:])}, x_test has {tuple(self.x_test.shape[1:])}",
        )
        if isinstance(stored, Tensor) and not self.stream:
            stored = stored.to(self.device)
        return self.evaluation_batches(stored, targets, self.in_batches(torch.arange(len(targets))), dtype)

    def in_batches(self, indices: Tensor) -> Sequence[Tensor]:
        """Indices ``(n,)`` split into batches for evaluation, on the device of the data; none if n is 0."""
        return torch.split(to_device(indices, self.device), self.eval_batch_size) if len(indices) else ()

    def evaluation_batches(
        self, x: Tensor | Stream, y: Tensor, batches: Sequence[Tensor], dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Batches of stored samples without augmentation.

        Args:
            x: Samples, as stored.
            y: Their labels, ``(N,)``, on the device.
            batches: Indices of each batch, by `in_batches`.
            dtype: Floating dtype of the samples.
        """
        plan = (i for indices in batches for i in indices.tolist())
        with Prefetcher(x, plan) if isinstance(x, Stream) else nullcontext() as prefetcher:
            for indices in batches:
                raw = self._gather(x, indices.cpu() if self.stream else indices, prefetcher)
                if self.augment is not None:
                    raw = self.augment.central(raw)
                samples, targets = self.pair(raw, y[indices], evaluation=True)
                yield self._scaled(samples, dtype), _target(targets, dtype)

    def read_ahead(self, clients: Iterable[Minibatches]) -> None:
        """Starts to read the samples of these minibatches, as many as memory is meant for; stops if there are none.

        Samples already read for the previous call that are needed again are kept. Without a call, minibatches read
        ahead while they are iterated. Samples in memory do not need it.

        Args:
            clients: Minibatches in the order of use, such as those of a cohort and then of the next.
        """
        if isinstance(self.x_train, Stream):
            plan = [i for client in clients for i in client.indices.tolist()]
            prefetcher = Prefetcher(self.x_train, plan, self._prefetcher)
            self._prefetcher = prefetcher if plan else None

    def reading_ahead(self, clients: Iterable[Minibatches]) -> AbstractContextManager[object]:
        """A context in which the samples of these minibatches are read ahead, unless others already are."""
        if not self.stream or self._prefetcher is not None:
            return nullcontext()
        self.read_ahead(clients)
        stack = ExitStack()
        stack.callback(self.read_ahead, ())
        return stack

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one sample, in bytes."""
        return max(1, math.prod(self.input_shape) * dtype.itemsize)

    def _gather(self, x: Tensor | Stream, indices: Tensor, prefetcher: Prefetcher | None) -> Tensor:
        """Some samples, on the device; images stay channels_last. The indices are on the device of ``x``."""
        if isinstance(x, Stream):
            rows = (prefetcher or Prefetcher(x, ())).take(indices.tolist())
        elif x.ndim == 4:
            rows = x.permute(0, 2, 3, 1)[indices].permute(0, 3, 1, 2)
        else:
            rows = x[indices]
        if self.stream and self.device.type == "cuda":  # the copy from pinned memory does not block the host
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True)

    def _scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Raw samples to inputs of the net; floats may be changed in place."""
        if x.dtype == torch.int64:  # tokens
            return x
        out = x.to(dtype)
        if self.standardise:
            n = math.prod(x.shape[1:])
            std, mean = torch.std_mean(out, dim=tuple(range(1, x.ndim)), correction=0, keepdim=True)
            return out.sub_(mean).div_(std.clamp(min=n**-0.5))
        if x.dtype == torch.uint8:
            out = out.div_(self.scale)
        if self.mean is not None:
            out = out.sub_(_channels(tuple(self.mean), x.ndim - 1, dtype, x.device))
        if self.std is not None:
            out = out.div_(_channels(tuple(self.std), x.ndim - 1, dtype, x.device))
        return out


def _target(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype) if y.is_floating_point() else y


@cache  # on a GPU each new tensor would be a copy from the host
def _channels(values: tuple[float, ...], ndim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of each channel, to broadcast over samples of ``ndim`` dimensions."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, *[1] * (ndim - 1))
