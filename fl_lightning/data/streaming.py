"""Samples in files or memory maps, which threads read when they are needed."""

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.core import Inputs, ensure, grouped, map_tensors, named_tensors
from fl_lightning.data.validation import inputs, layout

AHEAD = 256 * 2**20
"""Bytes of samples, as stored, that are read ahead."""


class Samples(ABC):
    """Samples that are read one by one; ``load`` of a data module may return them instead of an array.

    Attributes:
        shape: Shape of an array of all samples, ``(N, ...)``.
        dtype: Its dtype. With named fields, such as ``np.dtype([("image", "u1", (8, 8)), ("table", "f4", 5)])`` and
            ``shape = (N,)``, a sample is a dict of arrays.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Returns one sample. Several threads call it at the same time; it may raise a UserError."""


class Records(Samples):
    """Samples of several named arrays, memory maps or `Samples` each.

    Args:
        arrays: The arrays by name.

    Raises:
        UserError: If their lengths differ.
    """

    def __init__(self, arrays: Inputs) -> None:
        self.arrays = map_tensors(lambda array: array if isinstance(array, Samples) else np.asanyarray(array), arrays)
        lengths = {len(array) for array in named_tensors(arrays, "").values()}
        ensure(
            len(lengths) == 1, f"samples: arrays {list(arrays)} of {sorted(lengths)} rows; give all one row a sample"
        )
        self.shape, self.dtype = (lengths.pop(),), record_dtype(self.arrays, axes=1)

    def __getitem__(self, index: int) -> Any:
        """See :class:`Samples`."""
        return map_tensors(lambda array: array[index], self.arrays)


class IndexedSamples(Samples):
    """Samples that a function returns by index, all of the shape and dtype of the first.

    Args:
        name: Name of the samples in errors.
        count: Number of samples.
        read: Returns a sample: an array, a tensor, a PIL image, or a nested dict of these.
        first: The first sample.

    Raises:
        UserError: If (on reading) a sample differs in shape or dtype from the first.
    """

    def __init__(self, name: str, count: int, read: Callable[[int], Any], first: Any) -> None:
        self.name, self.read = name, read
        self.shape, self.dtype = (count,), record_dtype(map_tensors(_array, first))

    def __getitem__(self, index: int) -> Any:
        """See :class:`Samples`."""
        value = self.read(index)
        sample, file = map_tensors(_array, value), getattr(value, "filename", "")
        dtype = record_dtype(sample)
        ensure(
            dtype == self.dtype,
            f"{self.name}: sample {index}{f' ({file})' if file else ''} is {dtype.base} {dtype.shape}, the first is "
            f"{self.dtype.base} {self.dtype.shape}; make all alike, images by a transform or map that resizes",
        )
        return sample


def _array(x: Any) -> NDArray[Any]:
    """Converts a value to an array; the channels of a PIL image come first, and its numbers of colours become colours.

    Raises:
        UserError: If it is an image of more than 8 bits a channel.
    """
    x = x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x  # NumPy has no bfloat16
    mode = getattr(x, "mode", None) if hasattr(x, "getbands") else None
    deep = mode is not None and mode[0] in "IF"
    ensure(not deep, f"an image has more than 8 bits a channel ({mode}); convert it to 8 bits, or give an array")
    array = np.asarray(x.convert({"P": "RGB", "1": "L"}[mode]) if mode in ("P", "1") else x)
    return array.transpose(2, 0, 1) if hasattr(x, "getbands") and array.ndim == 3 else array


def record_dtype(arrays: Inputs, axes: int = 0) -> np.dtype[Any]:
    """Returns the dtype of a sample: of an array, or of named fields for a nested dict of arrays.

    Args:
        arrays: The arrays of one sample, or of all samples.
        axes: Leading axes that do not belong to a sample.
    """
    if isinstance(arrays, Mapping):
        return np.dtype([(name, record_dtype(array, axes)) for name, array in arrays.items()])
    return np.dtype((arrays.dtype, tuple(arrays.shape[axes:])))


class Stream:
    """Samples of a data module that a pool of threads reads.

    Args:
        name: Name of the samples in errors.
        source: The samples.
        workers: Number of threads.

    Attributes:
        like: A tensor, or a nested dict of tensors, of the shapes and dtypes of all samples; it takes no memory.
        ahead: Largest number of samples that are read ahead.
    """

    def __init__(self, name: str, source: Samples | np.memmap[Any, Any], workers: int) -> None:
        self.name, self.source = name, source
        row = inputs(name, np.zeros((1, *source.shape[1:]), source.dtype))
        self.like = map_tensors(lambda v: v.expand(len(source), *v.shape[1:]), row)
        self.ahead = max(1, min(len(source), AHEAD // max(1, sum(v.nbytes for v in named_tensors(row, name).values()))))
        self._pool = ThreadPoolExecutor(workers, "samples")

    def start(self, index: int) -> Future[Any]:
        """Lets a thread read one sample."""
        return self._pool.submit(lambda: _record(self.source[index], self.source.dtype))

    def read(self) -> Inputs:
        """Returns all samples, ``(N, ...)``."""
        rows = map_tensors(lambda v: torch.empty_like(v, memory_format=layout(v.ndim)), self.like)
        with closing(Prefetcher(self, range(len(self.source)))) as prefetcher:
            for start in range(0, len(self.source), self.ahead):
                part = range(len(self.source))[start : start + self.ahead]
                arrays = named_tensors(prefetcher.take(part), "")
                for name, v in named_tensors(rows, "").items():
                    v[start : start + len(part)] = arrays[name]
        return rows


def _record(sample: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a sample as NumPy assigns it to a row of this dtype: an array, or tuples of arrays for named fields."""
    if dtype.names is not None:
        return tuple(_record(sample[name], dtype[name]) for name in dtype.names)
    # a memory map is read when it is copied
    return np.array(sample) if isinstance(sample, np.memmap) else np.asarray(sample)


class Prefetcher:
    """Reads a bounded number of samples ahead, in the order of their use.

    It needs no lock, since only the thread that takes samples changes its state. A sample that is used again while it
    is in memory is not read again.

    Args:
        stream: The samples.
        plan: Indices in the order of use, with repeats. Samples out of the plan are read when they are taken.
        before: The previous prefetcher, which gets closed; samples that it has read and the plan soon needs are kept.
    """

    def __init__(self, stream: Stream, plan: Iterable[int], before: "Prefetcher | None" = None) -> None:
        self._stream, self._plan = stream, deque(plan)
        self._reads: dict[int, Future[Any]] = {}
        self._uses = Counter[int]()  # planned and not yet taken; negative: taken before its turn
        self._fill({} if before is None else before._reads)
        if before is not None:
            before.close()

    def close(self) -> None:
        """Stops reading."""
        self._plan.clear()
        for read in self._reads.values():
            read.cancel()
        self._reads = {}

    def take(self, indices: Sequence[int]) -> Inputs:
        """Returns samples by index, ``(n, ...)``, in host memory.

        Raises:
            UserError: If one of them is faulty.
        """
        stream, reads = self._stream, dict[int, Future[Any]]()
        places = grouped((i, position) for position, i in enumerate(indices))
        for i, positions in places.items():
            reads[i] = self._reads[i] if i in self._reads else stream.start(i)
            self._uses[i] -= len(positions)
            if self._uses[i] <= 0:
                self._reads.pop(i, None)
        self._fill({})
        rows = np.empty((len(indices), *stream.source.shape[1:]), stream.source.dtype)
        try:
            for i, positions in places.items():
                sample = reads.pop(i).result()
                for position in positions:
                    rows[position] = sample
        except BaseException:  # a faulty sample, or Ctrl-C: the others are not needed
            self._reads |= reads
            self.close()
            raise
        return inputs(stream.name, rows, indices)

    def _fill(self, done: dict[int, Future[Any]]) -> None:
        """Starts to read the next samples, except those that are already read."""
        while self._plan and len(self._reads) < self._stream.ahead:
            i = self._plan.popleft()
            self._uses[i] += 1
            if self._uses[i] == 1:
                self._reads[i] = done.pop(i) if i in done else self._stream.start(i)


def stored_bytes(x: Inputs | Stream, indices: Sequence[int]) -> bytes:
    """Returns the bytes of some samples, which are the same whether the samples are streamed or not.

    Args:
        x: All samples.
        indices: Indices of some of them.
    """
    if isinstance(x, Stream):
        rows = Prefetcher(x, ()).take(indices)
    else:
        rows = map_tensors(lambda v: v[torch.as_tensor(indices, dtype=torch.int64, device=v.device)].cpu(), x)
    return b"".join(v.contiguous().numpy().tobytes() for v in named_tensors(rows, "").values())


@dataclass(frozen=True)
class Published:
    """What is known of a published data set.

    Attributes:
        train: Number of training samples.
        test: Number of test samples.
        shape: Shape of a sample, as stored.
        classes: Number of classes.
        tokens: Number of tokens; None: samples are images, uint8.
    """

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    tokens: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all samples in memory."""
        return (self.train + self.test) * math.prod(self.shape) * (1 if self.tokens is None else 8)

    def random(self, stream: bool) -> tuple[Any, Any, Any, Any]:
        """Returns random data of this form, as `FederatedDataModule.load` does; streamed, all samples are equal."""
        draw, kind = np.random.default_rng(0), np.uint8 if self.tokens is None else np.int64

        def part(n: int) -> tuple[Any, NDArray[Any]]:
            x = draw.integers(0, self.tokens or 256, self.shape if stream else (n, *self.shape), dtype=kind)
            return IndexedSamples("data", n, lambda _: x, x) if stream else x, np.arange(n) % self.classes

        return *part(self.train), *part(self.test)
