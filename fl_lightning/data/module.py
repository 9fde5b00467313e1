"""The base of all data sets: samples divided among clients, in memory or streamed."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data.augment import Augment
from fl_lightning.data.minibatches import Minibatches
from fl_lightning.data.partition import IID, Partition
from fl_lightning.data.stream import Ahead, Samples, Stream
from fl_lightning.data.tensors import check_pairs, copies, inputs, labels, stratified

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11

Batch = tuple[Tensor, Tensor]
"""Samples ``(B, *input_shape)`` and labels: ``(B,)``, with Mixup ``(B, classes)``, for segmentation ``(B, H, W)``."""

LEAK = 0.01
"""Share of the test samples that may be training samples, too, without a warning."""


class FederatedDataModule(L.LightningDataModule, ABC):
    """Training data divided among clients, and a central test set. Subclasses implement :meth:`load` only.

    It serves a federation by :meth:`client_batches` and, as an ordinary Lightning data module, a plain ``L.Trainer``
    with the union of the clients' data.

    Args:
        num_clients: Number of clients.
        partition: How the training samples are divided; IID if not given.
        batch_size: Samples per local step; null takes a client's whole data in every step (full batch).
        eval_batch_size: Samples per batch in evaluation.
        drop_last: Leave out the short minibatch at the end of an epoch, unless it is the only one (FedDrive).
        val_fraction: Share of the training data held out for validation (stratified) before it is divided.
        augment: Augmentation of training batches; null for none.
        mean: Mean of each channel, subtracted after scaling to [0, 1]; null for none.
        std: Standard deviation of each channel, divided by after that; null for none.
        standardise: Give each image mean 0 and standard deviation 1 over its pixels and channels, in place of scale,
            mean and std, as TensorFlow's ``per_image_standardization`` does (the CIFAR-100 of Reddi et al. 2021).
        seed: Seed of the partition, of the validation part and of fixed samples.
        stream: Keep the samples where they lie, in files, a memory map or host memory, and bring them to the device
            when they are needed: for data that do not fit there. The results are the same, to the bit.
        workers: Threads that read files and memory maps.

    Attributes:
        num_classes: Number of classes (after setup, as all that follow).
        input_shape: Shape of one sample as a net gets it, ``(C, H, W)`` for images.
        clients: Each client's indices into the training data.
        client_sizes: Number of samples of each client, ``(num_clients,)``, int64. Where the partition is with
            replacement, a sample counts here, and in the union of the clients' data, as often as it is held: so the
            loss of the union stays the mean of the clients' losses, weighted by their samples.
        leaked: Number of test samples that are training samples, too; null if samples are streamed from files. More
            than 1 % are warned of.

    Raises:
        UserError: If a value is out of range, or (in setup) if the data are faulty or cannot be divided.
    """

    scale: float = 255.0
    """Value of a uint8 pixel that becomes 1.0."""
    published: tuple[int, int] | None = None
    """Numbers of training and test samples of a published data set; others are warned of."""
    num_classes: int
    input_shape: tuple[int, ...]
    x_train: Tensor | Stream
    x_test: Tensor | Stream
    clients: Division
    client_sizes: Tensor
    leaked: int | None = None

    def __init__(
        self,
        num_clients: int = 100,
        partition: Partition | None = None,
        batch_size: int | None = 64,
        eval_batch_size: int = 500,
        drop_last: bool = False,
        val_fraction: float = 0.0,
        augment: Augment | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        standardise: bool = False,
        seed: int = 0,
        stream: bool = False,
        workers: int = 4,
    ) -> None:
        super().__init__()
        if num_clients < 1:
            raise UserError(f"data.num_clients = {num_clients} is not positive; use 1 or more")
        if batch_size is not None and batch_size < 1:
            raise UserError(f"data.batch_size = {batch_size} is not positive; use 1 or more, or null for full batches")
        if eval_batch_size < 1:
            raise UserError(f"data.eval_batch_size = {eval_batch_size} is not positive; use 1 or more")
        if not 0 <= val_fraction < 1:
            raise UserError(f"data.val_fraction = {val_fraction} is not in [0, 1); use for example 0.1")
        if std is not None and not all(s > 0 for s in std):
            raise UserError(f"data.std = {std} must be positive; leave out constant channels or use 1")
        if workers < 1:
            raise UserError(f"data.workers = {workers} is not positive; use for example the number of CPU cores")
        self.num_clients = num_clients
        self.partition = partition or IID()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.drop_last = drop_last
        self.val_fraction = val_fraction
        self.augment = augment
        self.mean = mean
        self.std = std
        self.standardise = standardise
        self.seed = seed
        self.stream = stream
        self.workers = workers
        self.device = torch.device("cpu")
        self._ahead: Ahead | None = None
        self._is_set_up = False
        self._constants: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @abstractmethod
    def load(self) -> tuple[Any, Any, Any, Any]:
        """Read the data.

        Returns:
            ``x_train, y_train, x_test, y_test`` as arrays or tensors: uint8 images (NCHW, NHWC or NHW), or floats or
            tokens ``(N, ...)``; labels are integers ``(N,)``. Samples that need not be in memory can be `Samples` or an
            ``np.memmap``.
        """

    # What a data set of another kind than images with one class each may override

    def count_classes(self) -> int:
        """Number of classes: by default one more than the largest training label."""
        return int(self.y_train.max()) + 1

    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one sample before augmentation."""
        return tuple(self.x_train.shape[1:])

    def pair(self, x: Tensor, y: Tensor, evaluation: bool) -> Batch:
        """What of the stored samples the net gets, and what it shall answer.

        Args:
            x: Stored samples, in training augmented, ``(n, ...)``.
            y: Their labels, ``(n,)``.
            evaluation: Whether they are for evaluation.
        """
        return x, y

    def metric(self) -> tuple[str, Metric]:
        """Name and a fresh accumulator of what is evaluated beside the loss; it is updated by outputs and targets."""
        return "acc", MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)

    def test_parts(self) -> dict[str, Tensor]:
        """Parts of the test set that are evaluated on their own, too: which samples, ``(n_test,)`` bool, by name."""
        return {}

    def setup(self, stage: str | None = None) -> None:
        """Load, check, hold out and divide the data; does nothing the second time."""
        if self._is_set_up:
            return
        x_train, y_train, x_test, y_test = self.load()
        self.x_train, self.y_train = self._stored("x_train", x_train), labels("y_train", y_train)
        self.x_test, self.y_test = self._stored("x_test", x_test), labels("y_test", y_test)
        check_pairs(self.x_train, self.y_train, self.x_test, self.y_test)
        self._compare_with_published()
        self._look_for_leaks()
        self.num_classes = self.count_classes()
        self.input_shape = self.stored_shape()
        self._check_settings()
        if self.augment is not None:
            self.input_shape = self.augment.output_shape(self.input_shape)
        self.clients = Division(self._divide())
        self.client_sizes = self.clients.sizes
        self._train_indices = self.clients.indices.sort().values
        self._is_set_up = True

    def _stored(self, name: str, x: Any) -> Tensor | Stream:
        if isinstance(x, Samples) or (self.stream and isinstance(x, np.memmap)):
            stream = Stream(name, x, self.workers)
            return stream if self.stream else stream.read()
        return inputs(name, x)

    def _compare_with_published(self) -> None:
        sizes = len(self.x_train), len(self.x_test)
        if self.published is not None and sizes != self.published:
            rank_zero_warn(
                f"{type(self).__name__}: {sizes[0]} training and {sizes[1]} test samples, not the "
                f"{self.published[0]} and {self.published[1]} of the published data set; results do not compare",
                stacklevel=4,
            )

    def _look_for_leaks(self) -> None:
        """Count test samples that are training samples, too; published data sets have a few such twins."""
        if isinstance(self.x_train, Tensor) and isinstance(self.x_test, Tensor):
            self.leaked = copies(self.x_train, self.x_test)
            if self.leaked > LEAK * len(self.x_test):
                rank_zero_warn(
                    f"x_test: {self.leaked} of {len(self.x_test)} samples occur in x_train as well, value for value; "
                    "test accuracy will flatter, take them out of one of the two",
                    stacklevel=4,
                )

    def _check_settings(self) -> None:
        if self.augment is not None and len(self.input_shape) != 3:
            raise UserError(f"augment: samples of shape {self.input_shape} are no images (C, H, W); set augment: null")
        if self.standardise and (self.mean is not None or self.std is not None):
            raise UserError("data.standardise = true: takes the place of mean and std; leave these out")
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, self.input_shape[0] if self.input_shape else 1):
                raise UserError(
                    f"{key}: {len(values)} values for samples of shape {self.input_shape}; give one, or one per channel"
                )

    def _divide(self) -> list[NDArray[np.int64]]:
        """Set ``val_indices``; return each client's."""
        y = self.y_train.numpy()
        n_val = round(self.val_fraction * len(y))
        if self.val_fraction and not n_val:
            raise UserError(f"data.val_fraction = {self.val_fraction} holds out nothing; use for example 0.1")
        val = stratified(y, n_val, numpy_generator(self.seed, "validation"))
        self.val_indices = torch.from_numpy(val)
        kept = np.setdiff1d(np.arange(len(y)), val)
        if self.num_clients > len(kept):
            raise UserError(
                f"data.num_clients = {self.num_clients} exceeds the {len(kept)} training samples; use fewer clients"
            )
        if not self.partition.fixed:
            parts = self.partition(y[kept], self.num_clients, self.num_classes, self.seed)
            return [kept[part] for part in parts]
        parts = self.partition(y, self.num_clients, self.num_classes, self.seed)
        parts = [part[~np.isin(part, val)] for part in parts]
        for client, part in enumerate(parts):
            if len(part) == 0:
                raise UserError(
                    f"data.val_fraction = {self.val_fraction} takes all data of client {client}; use a smaller one"
                )
        return parts

    def to(self, device: torch.device | str) -> Self:
        """Move the stored data to ``device``, where batches are then made; samples that are streamed stay."""
        device = torch.device(device)
        if device != self.device:
            for name in ("y_train", "y_test") if self.stream else ("x_train", "y_train", "x_test", "y_test"):
                setattr(self, name, getattr(self, name).to(device))
            self.device = device
        return self

    # Training

    def batches_per_client(self, client: int, epochs: int, steps: int | None) -> int:
        """Number of local steps K: ``steps`` if given, otherwise ``epochs`` passes of the client's batches."""
        return steps if steps is not None else epochs * self._batches_per_epoch(len(self.clients[client]))

    def client_batches(
        self, client: int, epochs: int, steps: int | None, generator: torch.Generator, dtype: torch.dtype
    ) -> Minibatches:
        """Training batches of one client: shuffled anew in every epoch, augmented, scaled, made as they are asked for.

        Args:
            client: Index of the client.
            epochs: Passes through its data.
            steps: Number of batches, over as many passes as that takes; overrides epochs.
            generator: CPU generator; the same state gives the same batches.
            dtype: Floating dtype of the samples.
        """
        count = self.batches_per_client(client, epochs, steps)
        return self._minibatches(self.clients[client], count, generator, dtype)

    def _minibatches(self, indices: Tensor, count: int, generator: torch.Generator, dtype: torch.dtype) -> Minibatches:
        n, size = len(indices), self.batch_size or len(indices)
        per_epoch = self._batches_per_epoch(n)
        used = min(n, size * per_epoch)
        sizes = ([size] * (per_epoch - 1) + [used - size * (per_epoch - 1)]) * math.ceil(count / per_epoch)
        if self.batch_size is None:
            order = indices.repeat(count)
        else:
            epochs = range(math.ceil(count / per_epoch))
            order = torch.cat([indices[torch.randperm(n, generator=generator)[:used]] for _ in epochs])
        sizes = sizes[:count]
        draws = {} if self.augment is None else self.augment.draw(sizes, generator)
        return Minibatches(self, order[: sum(sizes)], sizes, draws, dtype)

    def samples(self, indices: Tensor, draws: dict[str, Tensor], dtype: torch.dtype) -> Batch:
        """Training samples, augmented by what was drawn for them and scaled, on the device of the data.

        Args:
            indices: Which, ``(n,)``; those of a minibatch side by side.
            draws: By `Augment.draw`, ``(n, ...)`` by name; empty for none.
            dtype: Floating dtype of the samples.
        """
        here = indices.to(self.device)
        raw = self._gather(self.x_train, indices if self.stream else here, self._ahead)
        augment = self.augment if draws else None
        x, y = self.pair(raw if augment is None else augment(raw, draws), self.y_train[here], evaluation=False)
        x = self._scaled(x, dtype)
        return (x, y) if augment is None else augment.finish(x, y, draws, self.num_classes)

    def read_ahead(self, clients: Iterable[Minibatches]) -> None:
        """Have the samples of these read before they are asked for, as many as memory is meant for; none: stop.

        Without it, whatever is iterated reads its own ahead. What was read for the former ones and is needed here, too,
        is kept. Samples in memory need none of it.

        Args:
            clients: Minibatches in the order of use, such as those of a cohort and then of the next.
        """
        if isinstance(self.x_train, Stream):
            plan = [i for client in clients for i in client.indices.tolist()]
            ahead = Ahead(self.x_train, plan, self._ahead)
            self._ahead = ahead if plan else None

    def reading(self, clients: Iterable[Minibatches]) -> AbstractContextManager[object]:
        """A context in which the samples of these are read ahead, unless others are already."""
        if not self.stream or self._ahead is not None:
            return nullcontext()
        self.read_ahead(clients)
        stack = ExitStack()
        stack.callback(self.read_ahead, ())
        return stack

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one sample."""
        return max(1, math.prod(self.input_shape) * dtype.itemsize)

    def _gather(self, x: Tensor | Stream, indices: Tensor, ahead: Ahead | None) -> Tensor:
        """Some samples, on the device; images stay channels_last. The indices are where the samples are."""
        if isinstance(x, Stream):
            rows = (ahead or Ahead(x, ())).take(indices.tolist())
        elif x.ndim == 4:
            rows = x.permute(0, 2, 3, 1)[indices].permute(0, 3, 1, 2)
        else:
            rows = x[indices]
        if not self.stream:
            return rows
        if self.device.type == "cuda":  # from such memory it is copied while the host goes on
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True)

    def _batches_per_epoch(self, n: int) -> int:
        if self.batch_size is None:
            return 1
        return max(1, n // self.batch_size) if self.drop_last else math.ceil(n / self.batch_size)

    def _scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Raw samples to network inputs; floats may be changed in place."""
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
            out = out.sub_(self._constant("mean", self.mean, dtype))
        if self.std is not None:
            out = out.div_(self._constant("std", self.std, dtype))
        return out

    def _constant(self, name: str, values: list[float], dtype: torch.dtype) -> Tensor:
        key = (name, dtype, self.device)
        if key not in self._constants:
            shape = (-1, *[1] * (len(self.input_shape) - 1))
            self._constants[key] = torch.tensor(values, dtype=dtype, device=self.device).view(shape)
        return self._constants[key]

    # Evaluation

    def eval_batches(
        self,
        split: Literal["train", "val", "test"] | Sequence[int] | Tensor,
        dtype: torch.dtype = torch.float32,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[Batch]:
        """Batches in order and without augmentation.

        Args:
            split: ``train`` (the union of the clients' data), ``val``, ``test``, or indices into the training data.
            dtype: Floating dtype of the samples.
            share: (rank, processes): only every ``processes``-th sample, from the ``rank``-th on.

        Raises:
            UserError: If ``val`` is asked for, but nothing was held out.
        """
        if isinstance(split, str) and split == "test":
            return self._batches(self.x_test, self.y_test, torch.arange(share[0], len(self.y_test), share[1]), dtype)
        if isinstance(split, str) and split == "val" and len(self.val_indices) == 0:
            raise UserError(
                f"data.val_fraction = {self.val_fraction} holds out nothing to validate on; use for example 0.1"
            )
        named = {"train": self._train_indices, "val": self.val_indices}
        indices = named[split] if isinstance(split, str) else torch.as_tensor(split, dtype=torch.int64)
        return self._batches(self.x_train, self.y_train, indices[share[0] :: share[1]], dtype)

    def client_eval_batches(self, client: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
        """All training data of one client, in order and without augmentation."""
        return self.eval_batches(self.clients[client], dtype)

    def batches_of(self, name: str, x: Any, y: Any, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
        """Batches of further samples, prepared as those of the test set.

        Args:
            name: What they are called in errors.
            x: Samples, as `load` may return them.
            y: Their labels, ``(N,)``.
            dtype: Floating dtype of the samples.

        Raises:
            UserError: If they are faulty, or of another shape than the test set's.
        """
        stored, targets = self._stored(name, x), labels(name, y).to(self.device)
        if stored.shape[1:] != self.x_test.shape[1:]:
            raise UserError(
                f"{name}: samples of shape {tuple(stored.shape[1:])}, x_test has {tuple(self.x_test.shape[1:])}"
            )
        if isinstance(stored, Tensor) and not self.stream:
            stored = stored.to(self.device)
        return self._batches(stored, targets, torch.arange(len(targets)), dtype)

    def _batches(self, x: Tensor | Stream, y: Tensor, indices: Tensor, dtype: torch.dtype) -> Iterator[Batch]:
        here = indices.to(self.device)
        indices = indices.cpu() if self.stream else here
        with Ahead(x, indices.tolist()) if isinstance(x, Stream) else nullcontext() as ahead:
            for start in range(0, len(indices), self.eval_batch_size):
                part = slice(start, start + self.eval_batch_size)
                raw = self._gather(x, indices[part], ahead)
                if self.augment is not None:
                    raw = self.augment.central(raw)
                samples, targets = self.pair(raw, y[here[part]], evaluation=True)
                yield self._scaled(samples, dtype), targets

    def sample_indices(self, n: int | None, seed: int | None = None) -> Tensor:
        """A fixed stratified sample of the union of the clients' data, as sorted indices into the training data.

        Args:
            n: Number of samples; null, or more than there are, takes all.
            seed: Seed of the draw; null takes the data module's.
        """
        if n is None or n >= len(self._train_indices):
            return self._train_indices
        y = self.y_train[self._train_indices.to(self.device)].cpu().numpy()
        rng = numpy_generator(self.seed if seed is None else seed, "sample")
        return self._train_indices[torch.from_numpy(stratified(y, n, rng))]

    # Centralized training by a plain L.Trainer

    def train_dataloader(self, seed: int | None = None) -> Loader:
        """Shuffled, augmented float32 batches of the union of the clients' data.

        Args:
            seed: Seed of order and augmentation; null takes the data module's.
        """
        count, root = self._batches_per_epoch(len(self._train_indices)), self.seed if seed is None else seed

        def batches(epoch: int) -> Iterator[Batch]:
            # The trainer's count goes on after a resumption.
            epoch = self.trainer.current_epoch if self.trainer is not None else epoch
            rng = generator(root, "centralized", epoch)
            return iter(self._minibatches(self._train_indices, count, rng, torch.float32))

        return Loader(count, batches)

    def val_dataloader(self) -> Loader | list[Batch]:
        """Float32 batches of the validation part; empty if nothing was held out."""
        n = len(self.val_indices)
        return Loader(math.ceil(n / self.eval_batch_size), lambda _: self.eval_batches("val")) if n else []

    def test_dataloader(self) -> Loader:
        """Float32 batches of the test set."""
        return Loader(math.ceil(len(self.y_test) / self.eval_batch_size), lambda _: self.eval_batches("test"))

    def fingerprint(self) -> str:
        """Hash of labels and clients' indices, by which a checkpoint knows its data."""
        digest = hashlib.sha256()
        for tensor in (self.client_sizes, self.clients.indices, self.y_train.cpu(), self.y_test.cpu()):
            digest.update(np.int64(len(tensor)).tobytes() + tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


class Division(Sequence[Tensor]):
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

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(len(self)))]
        start = self._ends[client - 1] if client else 0
        return self.indices[start : self._ends[client]]


class Loader:
    """Batches that can be iterated again and again, with a length: all that a trainer needs of a data loader.

    Args:
        length: Number of batches.
        epoch: Makes the batches of one pass, given how many passes there were before.
    """

    def __init__(self, length: int, epoch: Callable[[int], Iterator[Batch]]) -> None:
        self._length = length
        self._epoch = epoch
        self._passes = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        self._passes += 1
        return self._epoch(self._passes - 1)
