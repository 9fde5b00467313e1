"""The base class of all data sets: what a data set provides, and how its samples are divided among clients."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core import (
    Divisor,
    Fraction,
    Inputs,
    Made,
    NonNegativeInt,
    PositiveInt,
    Threads,
    ensure,
    generator,
    map_tensors,
    numpy_generator,
    require,
)
from fl_lightning.data.augment import Augment
from fl_lightning.data.minibatches import Batches, BatchLoader, EpochSampler, Minibatches, MinibatchTable
from fl_lightning.data.partition import IID, ClientIndices, Natural, Partition, divide, members, stratified
from fl_lightning.data.samples import Batch, SampleStore, like
from fl_lightning.data.streaming import Published, Stream, stored_bytes
from fl_lightning.data.tasks import TaskName
from fl_lightning.data.validation import check_classes, check_sizes, checked_owners

Split: TypeAlias = Literal["train", "val", "test"] | Sequence[int] | Tensor
"""A named part of the data, or indices into the training data."""
FINGERPRINTED = 1000
"""Training and test samples whose bits are part of a fingerprint; of fewer, all are."""
HASHED_AT_ONCE = 256
"""Samples that a hash of all of them copies at once."""
CLIENTS = 100
"""Number of clients, where neither settings nor data say one."""


class DividedData(SampleStore):
    """Base of `FederatedDataModule`: what is made of data that are divided, for training, evaluation and comparison.

    A federation trains on :meth:`client_batches`; a plain ``L.Trainer`` trains on the union of the clients' data, as
    with any Lightning data module.
    """

    seed: int
    val_fraction: float
    val_indices: Tensor
    client_sizes: Tensor
    _union: Tensor
    _test_shares: ClientIndices | None = None
    _fingerprint: str | None = None
    _set_up_with: list[Any]

    @property
    def strata(self) -> Tensor:
        """Class of each training sample, ``(N,)``; zeros if they have none."""
        y = self.y_train
        return y if self.task.by_class else y.new_zeros(len(y), dtype=torch.int64)

    # Training

    def batches_per_client(self, client: int, epochs: int, steps: int | None) -> int:
        """Returns the number of local steps K: ``steps`` if given, otherwise ``epochs`` passes through the batches."""
        return steps if steps is not None else epochs * len(self._sizes(len(self.clients[client])))

    def client_batches(
        self, client: int, epochs: int, steps: int | None, generator: torch.Generator, dtype: torch.dtype
    ) -> Minibatches:
        """Returns the training batches of one client: shuffled in every epoch, augmented and scaled when iterated.

        Args:
            client: Index of the client.
            epochs: Passes through its data.
            steps: Number of batches, over as many passes as that takes; overrides epochs.
            generator: CPU generator; the same state gives the same batches.
            dtype: Floating dtype of the samples.
        """
        return self._minibatches(self.clients[client], self.batches_per_client(client, epochs, steps), generator, dtype)

    def _minibatches(self, indices: Tensor, count: int, generator: torch.Generator, dtype: torch.dtype) -> Minibatches:
        table = self.minibatch_table([indices.numpy()], [count], [generator], dtype)
        return Minibatches(self, table.indices, table.sizes[0].tolist(), table.draws, dtype)

    def minibatch_table(
        self,
        clients: Sequence[NDArray[np.int64]],
        counts: Sequence[int],
        generators: Iterable[torch.Generator],
        dtype: torch.dtype,
    ) -> MinibatchTable:
        """Returns what `client_batches` returns for several clients, as one table.

        Args:
            clients: The samples of each client, as indices into the training data.
            counts: Number of batches of each.
            generators: CPU generator of each; it is used up before the next is asked for.
            dtype: Floating dtype of the samples.
        """
        sizes, orders = np.zeros((len(clients), max(counts, default=0)), np.int64), list[NDArray[np.int64]]()
        draws, plans = list[dict[str, Tensor]](), dict[tuple[int, int], tuple[list[int], list[int]]]()
        for row, indices, count, rng in zip(sizes, clients, counts, generators, strict=True):
            n = len(indices)
            if (n, count) not in plans:
                per_pass, batches = sum(self._sizes(n)), self.batch_sizes(n, count)
                plans[n, count] = batches, [min(per_pass, remaining) for remaining in range(sum(batches), 0, -per_pass)]
            row[:count], passes = plans[n, count]
            if self.batch_size is None:
                orders += [indices] * len(passes)
            else:
                orders += [indices[torch.randperm(n, generator=rng).numpy()[:taken]] for taken in passes]
            if self.augment is not None:
                draws.append(self.augment.draw(plans[n, count][0], rng))
        drawn = {name: torch.cat([draw[name] for draw in draws]) for name in (draws or [{}])[0]}
        order = np.concatenate(orders) if orders else np.zeros(0, np.int64)
        rows = {name: len(v) for name, v in drawn.items() if len(v) != len(order)}
        ensure(not rows, f"data.augment: draw gives {rows} rows for {len(order)} samples; give one for each")
        return MinibatchTable(self, torch.from_numpy(order), sizes, drawn, dtype)

    # Evaluation

    def eval_batches(
        self, split: Split, dtype: torch.dtype = torch.float32, share: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Returns batches in order and without augmentation.

        Args:
            split: ``train`` (the union of the clients' data), ``val``, ``test``, or indices into the training data.
            dtype: Floating dtype of the samples.
            share: (rank, processes): only every ``processes``-th sample, from the ``rank``-th on.

        Raises:
            UserError: If there is no such split, or it is ``val`` and nothing was held out.
        """
        x, y, indices = self._split(split)
        return self.evaluation_batches(x, y, self.in_batches(indices[share[0] :: share[1]]), dtype)

    def _split(self, split: Split) -> tuple[Inputs | Stream, Tensor, Tensor]:
        """Returns stored samples, their targets, and the indices of the split."""
        if not isinstance(split, str):
            return self.x_train, self.y_train, torch.as_tensor(split, dtype=torch.int64)
        splits = {"train": self._union, "val": self.val_indices, "test": torch.arange(len(self.y_test))}
        require(split in splits, "split", f"'{split}'", f"choose from {', '.join(splits)}, or give indices")
        ensure(
            split != "val" or len(self.val_indices) != 0,
            f"data.val_fraction = {self.val_fraction} holds out nothing to validate on; use for example 0.1",
        )
        x, y = (self.x_test, self.y_test) if split == "test" else (self.x_train, self.y_train)
        return x, y, splits[split]

    def client_test_indices(self, client: int) -> Tensor | None:
        """Returns a client's own part of the test set, as in LEAF, where users keep part of their samples for testing.

        Args:
            client: Index of the client.

        Returns:
            Sorted indices into the test data, ``(n,)`` int64 on the CPU, empty if the client has no test samples; None
            if the data do not name the clients of test samples.
        """
        return None if self._test_shares is None else self._test_shares[client]

    def sample_indices(self, n: int | None, seed: int | None = None) -> Tensor:
        """Draws a fixed stratified sample of the union of the clients' data: sorted indices into the training data.

        Args:
            n: Number of samples; null, or more than there are, takes all.
            seed: Seed of the draw; null takes the data module's.
        """
        if n is None or n >= len(self._union):
            return self._union
        rng = numpy_generator(self.seed if seed is None else seed, "sample")
        return self._union[torch.from_numpy(stratified(self.strata[self._union.to(self.device)].cpu().numpy(), n, rng))]

    # A plain L.Trainer

    def train_dataloader(self, seed: int | None = None, first_epoch: int = 0) -> BatchLoader:
        """Returns shuffled, augmented float32 batches of the union of the clients' data; processes share them.

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
        """Returns float32 batches of the validation part; empty if nothing was held out."""
        return self._eval_dataloader("val") if len(self.val_indices) else []

    def test_dataloader(self) -> BatchLoader:
        """Returns float32 batches of the test set."""
        return self._eval_dataloader("test")

    def _eval_dataloader(self, split: Split) -> BatchLoader:
        x, y, indices = self._split(split)
        batches = self.in_batches(indices)

        def make(numbers: Sequence[int], epoch: int) -> Iterator[Batch]:
            return self.evaluation_batches(x, y, [batches[i] for i in numbers], torch.float32)

        return BatchLoader(Batches(len(batches), make))

    def fingerprint(self) -> str:
        """Returns a hash of targets, clients' indices and `FINGERPRINTED` stored samples: it identifies the data."""
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

    def content(self) -> str:
        """Returns a hash of the fingerprint and of all stored samples, which are read once for it."""
        digest = hashlib.sha256(self.fingerprint().encode())
        for x, n in ((self.x_train, len(self.y_train)), (self.x_test, len(self.y_test))):
            for start in range(0, n, HASHED_AT_ONCE):
                digest.update(stored_bytes(x, range(start, min(start + HASHED_AT_ONCE, n))))
        return digest.hexdigest()


class FederatedDataModule(DividedData, ABC):
    """Training data divided among clients, and a central test set. Subclasses implement :meth:`load`.

    Data that are not images with one class each can override the hooks `stored_shape`, `pair`, `metric`
    and `test_parts`.

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
        task: Kind of the targets: classification (one class per sample), regression (one number per sample, or several,
            ``(N, k)``) or multilabel (zeros and ones ``(N, labels)``).
        num_classes: Number of classes, if the training samples do not have all of them; null: as many as the data set
            says, or the largest training label + 1.

    Attributes:
        num_classes: Number of classes, labels or target values. This and the following attributes exist after setup.
        input_shape: Shape of one sample as a net gets it, ``(C, H, W)`` for images; a dict of shapes for a dict.
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

    published: Published | None = None
    """Numbers and shape of a published data set; setup warns of other numbers."""
    classes: int | None = None
    """Number of classes, whether or not all occur, where the data set says it; null: the largest training label + 1."""
    test_clients: NDArray[np.int64] | None = None

    def __init__(
        self,
        num_clients: PositiveInt = CLIENTS,
        partition: Partition | None = None,
        batch_size: PositiveInt | None = 64,
        eval_batch_size: PositiveInt = 500,
        drop_last: bool = False,
        val_fraction: Fraction = 0.0,
        augment: Augment | None = None,
        mean: list[float] | None = None,
        std: list[Divisor] | None = None,
        standardise: bool = False,
        seed: NonNegativeInt = 0,
        stream: bool = False,
        workers: Threads = 4,
        task: TaskName = "classification",
        num_classes: PositiveInt | None = None,
    ) -> None:
        super().__init__(eval_batch_size, augment, mean, std, standardise, stream, workers, task)
        classes = num_classes is None or self.task.by_class
        require(classes, "data.num_classes", num_classes, f"data.task = {task} has no classes; leave it out")
        self.classes = num_classes or self.classes
        self._default = IID()
        self.num_clients, self.partition = num_clients, partition or self._default
        self.batch_size, self.drop_last = batch_size, drop_last
        self.val_fraction, self.seed = val_fraction, seed

    # What a data set provides

    @abstractmethod
    def load(self) -> tuple[Any, Any, Any, Any]:
        """Reads the data.

        Returns:
            ``x_train, y_train, x_test, y_test`` as arrays or tensors: uint8 images (NCHW, NHWC or NHW), or floats or
            tokens ``(N, ...)``; labels are integers ``(N,)``, and ``task`` says the form of other targets. Samples can
            be a nested dict of arrays, which the net's ``forward`` gets as a dict. Samples that need not be in memory
            can be `Samples` or an ``np.memmap``.
        """

    def stored_shape(self) -> Any:
        """Returns the shape of one sample before augmentation; of a dict, the shapes by name."""
        return map_tensors(lambda v: tuple(v.shape[1:]), like(self.x_train))

    def metric(self) -> tuple[str, Metric]:
        """Returns the name and a new instance of the metric that evaluation shows beside the loss."""
        return self.task.metric(self.num_classes)

    def test_parts(self) -> dict[str, Tensor]:
        """Returns parts of the test set that get a metric of their own: masks ``(n_test,)`` bool by name."""
        return {}

    def set_clients(
        self, users: Sequence[int | str], test_users: Sequence[int | str] | None = None, asked: int | None = None
    ) -> None:
        """Makes each user a client: sets the partition, the number of clients and, if known, `test_clients`.

        Args:
            users: The user of each training sample, in the order of the samples.
            test_users: The user of each test sample.
            asked: Number of clients that the user has set; None: none.

        Raises:
            UserError: If there is another partition, or another number of clients is set.
        """
        natural, kind = Natural([str(user) for user in users]), type(self.partition).__name__
        same = self.partition is self._default or getattr(self.partition, "users", None) == natural.users
        ensure(same, f"data.partition = {kind}: the data say whose each sample is; leave it out")
        self.partition, self.num_clients = natural, len({*natural.users})
        remedy = f"the data name {self.num_clients} clients; leave it out"
        require(asked in (None, self.num_clients), "data.num_clients", asked, remedy)
        self.test_clients = None if test_users is None else natural.clients(test_users)

    # Setup

    def setup(self, stage: str | None = None) -> None:
        """Loads, checks, holds out and divides the data, on every process alike.

        The second time it does so only if a setting has been set anew since: the config of a run shows the new one.

        Args:
            stage: Not used: every stage needs all data, since classes and checks are those of training and test data.
        """
        if hasattr(self, "clients") and all(map(is_, self._given(), self._set_up_with)):
            return
        self.device, self._fingerprint, self._test_shares = torch.device("cpu"), None, None
        self.store(self.load())
        check_sizes(type(self).__name__, (len(self.y_train), len(self.y_test)), self.published)
        self._num_classes = (self.classes if self.task.by_class else None) or self.task.outputs(self.y_train)
        if self.task.by_class:
            check_classes(self.y_train, self.y_test, self.num_classes, said=bool(self.classes))
        ensure(
            self.task.by_class or not self.partition.by_class,
            f"data.partition: {type(self.partition).__name__} divides by class, and these targets are none; "
            "use IID or Natural",
        )
        self.input_shape = self.prepared_shape(self.stored_shape())
        y, strata = self.y_train.numpy(), self.strata.numpy()
        self.val_indices, self.clients = divide(
            y, strata, self.partition, self.num_clients, self.num_classes, self.val_fraction, self.seed
        )
        self.client_sizes, self._union = self.clients.sizes, self.clients.indices.sort().values
        if self.test_clients is not None:
            owners = checked_owners(self.test_clients, len(self.y_test), self.num_clients)
            # the first group is that of the samples without a client
            self._test_shares = ClientIndices(members(owners + np.int64(1), self.num_clients + 1)[1:])
        self._set_up_with = self._given()

    def _given(self) -> list[Any]:
        """Returns the settings of the data and of their partition, as they are now."""
        return [*(vars(self).get(name) for name in Made.of(self).arguments), *vars(self.partition).values()]
