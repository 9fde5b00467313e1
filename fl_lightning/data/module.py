"""The base of all data sets: samples divided among clients, in memory or streamed."""

import hashlib
import math
from abc import ABC
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import (
    Count,
    Decay,
    Divisor,
    Threads,
    Whole,
    ensure,
    generator,
    numpy_generator,
    to_device,
)
from fl_lightning.data.augment import Augment
from fl_lightning.data.clients import ClientIndices, divide
from fl_lightning.data.gather import SampleModule
from fl_lightning.data.minibatches import Batch, Batches, BatchLoader, EpochSampler, Minibatches, epoch_sizes
from fl_lightning.data.partition import IID, Partition
from fl_lightning.data.stream import Stream, stored_bytes, stratified
from fl_lightning.data.tasks import TaskName

Split: TypeAlias = Literal["train", "val", "test"] | Sequence[int] | Tensor
"""A named part of the data, or indices into the training data."""
FINGERPRINTED = 1000
"""Training and test samples whose bits are part of a fingerprint; of fewer, all are."""


class FederatedDataModule(SampleModule, ABC):
    """Training data divided among clients, and a central test set. Subclasses implement :meth:`load` only.

    It serves a federation by :meth:`client_batches`, and a plain ``L.Trainer``, as an ordinary Lightning data module,
    with the union of the clients' data.

    Args:
        num_clients: Number of clients.
        partition: How the training samples are divided; IID by default.
        batch_size: Samples per local step; null takes a client's whole data in every step (full batch).
        eval_batch_size: Samples per batch in evaluation.
        drop_last: Leave out the short minibatch at the end of an epoch, unless it is the only one (FedDrive).
        val_fraction: Share of the training data held out for validation (stratified) before it is divided.
        augment: Augmentation of training batches; null for none.
        mean: Mean of each channel, subtracted after scaling to [0, 1]; null for none.
        std: Standard deviation of each channel, divided by after that; null for none.
        standardise: Give each image mean 0 and standard deviation 1 over its pixels and channels, instead of scale,
            mean and std, as TensorFlow's ``per_image_standardization`` does (the CIFAR-100 of Reddi et al. 2021).
        seed: Seed of the partition, of the validation part and of fixed samples.
        stream: Keep the samples where they are, in files, a memory map or host memory, and copy them to the device
            when they are needed: for data that do not fit there. The results are the same, to the bit.
        workers: Threads that read files and memory maps.
        task: What the targets are: classification (a class of each sample), regression (a number of each sample or
            several, ``(N, k)``) or multilabel (zeros and ones ``(N, labels)``).

    Attributes:
        num_classes: Number of classes (after setup, as all that follow); of labels or values with other tasks.
        input_shape: Shape of one sample as a net gets it, ``(C, H, W)`` for images.
        clients: Each client's indices into the training data.
        client_sizes: Number of samples of each client, ``(num_clients,)``, int64. With a partition with replacement,
            a sample counts here, and in the union of the clients' data, as often as it is held: so the loss of the
            union is the mean of the clients' losses, weighted by their samples.
        val_indices: Training samples that are held out for validation, ``(n_val,)``, sorted.
        leaked: Number of test samples that are also training samples; null if samples are streamed from files. Setup
            warns of more than 1 %.
        test_clients: Client of each test sample, ``(n_test,)``, -1 for none; null if the data do not say, as by
            default. `load` may set it.

    Raises:
        UserError: If a value is out of range, or (in setup) if the data are faulty or cannot be divided.
    """

    test_clients: NDArray[np.int64] | None = None

    def __init__(
        self,
        num_clients: Count = 100,
        partition: Partition | None = None,
        batch_size: Count | None = 64,
        eval_batch_size: Count = 500,
        drop_last: bool = False,
        val_fraction: Decay = 0.0,
        augment: Augment | None = None,
        mean: list[float] | None = None,
        std: list[Divisor] | None = None,
        standardise: bool = False,
        seed: Whole = 0,
        stream: bool = False,
        workers: Threads = 4,
        task: TaskName = "classification",
    ) -> None:
        super().__init__(eval_batch_size, augment, mean, std, standardise, stream, workers, task)
        self.num_clients, self.partition = num_clients, partition or IID()
        self.batch_size, self.drop_last = batch_size, drop_last
        self.val_fraction, self.seed = val_fraction, seed
        self._fingerprint: str | None = None

    def setup(self, stage: str | None = None) -> None:
        """Loads, checks, holds out and divides the data, on every process alike; does nothing the second time.

        Args:
            stage: Not used: every stage needs all data, since classes and checks are those of training and test data.
        """
        if hasattr(self, "clients"):
            return
        super().setup(stage)
        name = type(self.partition).__name__
        by_class = f"{name} divides by class, and these targets are none; use IID or Natural"
        ensure(self.task.by_class or not self.partition.by_class, f"data.partition: {by_class}")
        y, strata = self.y_train.numpy(), self.strata.numpy()
        self.val_indices, self.clients = divide(
            y, strata, self.partition, self.num_clients, self.num_classes, self.val_fraction, self.seed
        )
        self.client_sizes = self.clients.sizes
        self._union = self.clients.indices.sort().values
        owners, n = self.test_clients, len(self.y_test)
        if owners is not None:
            ensure(len(owners) == n, f"test_clients: {len(owners)} for {n} samples; give one per sample")
        self._test_shares = None if owners is None else ClientIndices.of(owners, self.num_clients)

    @property
    def strata(self) -> Tensor:
        """Class of each training sample, ``(N,)``; zeros if they have none."""
        return self.task.strata(self.y_train)

    # Training

    def batches_per_client(self, client: int, epochs: int, steps: int | None) -> int:
        """Number of local steps K: ``steps`` if given, otherwise ``epochs`` passes of the client's batches."""
        return steps if steps is not None else epochs * len(self._sizes(len(self.clients[client])))

    def class_counts(self, client: int) -> Tensor:
        """Number of a client's training samples of each class, ``(num_classes,)``, int64, on the device."""
        labels = self.y_train[to_device(self.clients[client], self.device)]
        counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)
        return counts.scatter_add_(0, labels, torch.ones_like(labels))  # on a GPU, bincount looks at values

    def client_batches(
        self, client: int, epochs: int, steps: int | None, generator: torch.Generator, dtype: torch.dtype
    ) -> Minibatches:
        """Training batches of one client: shuffled in every epoch, augmented, scaled, made as they are asked for.

        Args:
            client: Index of the client.
            epochs: Passes through its data.
            steps: Number of batches, over as many passes as that takes; overrides epochs.
            generator: CPU generator; the same state gives the same batches.
            dtype: Floating dtype of the samples.
        """
        count = self.batches_per_client(client, epochs, steps)
        return self._minibatches(self.clients[client], count, generator, dtype)

    def _sizes(self, n: int) -> list[int]:
        return epoch_sizes(n, self.batch_size, self.drop_last)

    def _minibatches(self, indices: Tensor, count: int, generator: torch.Generator, dtype: torch.dtype) -> Minibatches:
        n, sizes = len(indices), self._sizes(len(indices))
        used, epochs = sum(sizes), math.ceil(count / len(sizes))
        if self.batch_size is None:
            order = indices.repeat(epochs)
        else:
            orders = [indices[torch.randperm(n, generator=generator)[:used]] for _ in range(epochs)]
            order = torch.cat(orders) if epochs > 1 else orders[0]
        sizes = (sizes * epochs)[:count]
        draws = {} if self.augment is None else self.augment.draw(sizes, generator)
        return Minibatches(self, order[: sum(sizes)], sizes, draws, dtype)

    # Evaluation

    def eval_batches(
        self,
        split: Split,
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
        x, y, indices = self._split(split)
        return self.evaluation_batches(x, y, self.in_batches(indices[share[0] :: share[1]]), dtype)

    def _split(self, split: Split) -> tuple[Tensor | Stream, Tensor, Tensor]:
        """Stored samples, labels, and the indices of the split."""
        if isinstance(split, str) and split == "test":
            return self.x_test, self.y_test, torch.arange(len(self.y_test))
        ensure(
            not isinstance(split, str) or split != "val" or len(self.val_indices) != 0,
            f"data.val_fraction = {self.val_fraction} holds out nothing to validate on; use for example 0.1",
        )
        named = {"train": self._union, "val": self.val_indices}
        indices = named[split] if isinstance(split, str) else torch.as_tensor(split, dtype=torch.int64)
        return self.x_train, self.y_train, indices

    def client_eval_batches(self, client: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
        """All training data of one client, in order and without augmentation."""
        return self.eval_batches(self.clients[client], dtype)

    def client_test_indices(self, client: int) -> Tensor | None:
        """A client's own part of the test set, as in LEAF, where each user keeps a part of their samples for testing.

        Args:
            client: Index of the client.

        Returns:
            Sorted indices into the test data, ``(n,)`` int64 on the CPU, empty if the client has no test samples; None
            if the data do not say whose the test samples are.
        """
        return None if self._test_shares is None else self._test_shares[client]

    def sample_indices(self, n: int | None, seed: int | None = None) -> Tensor:
        """A fixed stratified sample of the union of the clients' data, as sorted indices into the training data.

        Args:
            n: Number of samples; null, or more than there are, takes all.
            seed: Seed of the draw; null takes the data module's.
        """
        if n is None or n >= len(self._union):
            return self._union
        y = self.strata[self._union.to(self.device)].cpu().numpy()
        rng = numpy_generator(self.seed if seed is None else seed, "sample")
        return self._union[torch.from_numpy(stratified(y, n, rng))]

    # A plain L.Trainer

    def train_dataloader(self, seed: int | None = None, first_epoch: int = 0) -> BatchLoader:
        """Shuffled, augmented float32 batches of the union of the clients' data; processes share the batches.

        Args:
            seed: Seed of order and augmentation; null takes the data module's.
            first_epoch: Number of the first epoch; each epoch is drawn by seed and number.
        """
        count, root = len(self._sizes(len(self._union))), self.seed if seed is None else seed

        def make(numbers: Sequence[int], epoch: int) -> Iterator[Batch]:
            rng = generator(root, "centralized", first_epoch + epoch)
            return iter(self._minibatches(self._union, count, rng, torch.float32).take(numbers))

        return BatchLoader(Batches(count, make), sampler=EpochSampler(count))

    def val_dataloader(self) -> BatchLoader | list[Batch]:
        """Float32 batches of the validation part; empty if nothing was held out."""
        return self._eval_dataloader("val") if len(self.val_indices) else []

    def test_dataloader(self) -> BatchLoader:
        """Float32 batches of the test set."""
        return self._eval_dataloader("test")

    def _eval_dataloader(self, split: Split) -> BatchLoader:
        x, y, indices = self._split(split)
        batches = self.in_batches(indices)

        def make(numbers: Sequence[int], epoch: int) -> Iterator[Batch]:
            return self.evaluation_batches(x, y, [batches[i] for i in numbers], torch.float32)

        return BatchLoader(Batches(len(batches), make))

    def fingerprint(self) -> str:
        """Hash of labels, clients' indices and `FINGERPRINTED` samples as stored; identifies a checkpoint's data."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for tensor in (self.client_sizes, self.clients.indices, self.y_train.cpu(), self.y_test.cpu()):
                digest.update(np.int64(len(tensor)).tobytes() + tensor.numpy().tobytes())
            n = len(self.y_train)
            drawn = numpy_generator(self.seed, "fingerprint").permutation(n + len(self.y_test))[:FINGERPRINTED]
            for x, indices in ((self.x_train, drawn[drawn < n]), (self.x_test, drawn[drawn >= n] - n)):
                digest.update(stored_bytes(x, sorted(indices.tolist())))
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint
