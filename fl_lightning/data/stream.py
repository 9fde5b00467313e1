"""Samples and labels as checked tensors; samples in files or memory maps that threads read when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import UserError, ensure

AHEAD = 256 * 2**20
"""Bytes of samples, as stored, that are read ahead."""


class Samples(ABC):
    """Samples that need not be in memory; ``load`` of a data set may return them instead of an array.

    Attributes:
        shape: Shape of an array of all samples, ``(N, ...)``.
        dtype: Their dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, index: int) -> NDArray[Any]:
        """One sample. Several threads call it at once; it may raise a UserError."""


class Stream:
    """Samples as a data module keeps them, read by a pool of threads.

    Args:
        name: Name of the samples in errors.
        source: The samples.
        workers: Number of threads.

    Attributes:
        shape: Shape of a tensor of all samples, ``(N, C, H, W)`` for images.
        dtype: Its dtype.
        ahead: Number of samples that are read ahead, at most.
    """

    def __init__(self, name: str, source: Samples | np.memmap[Any, Any], workers: int) -> None:
        self.name, self.source = name, source
        like = inputs(name, np.zeros((1, *source.shape[1:]), source.dtype))
        self.shape: tuple[int, ...] = (len(source), *like.shape[1:])
        self.dtype = like.dtype
        self.ahead = max(1, min(len(self), AHEAD // max(1, like.nbytes)))
        self._pool = ThreadPoolExecutor(workers, "samples")

    def __len__(self) -> int:
        return self.shape[0]

    def start(self, index: int) -> Future[NDArray[Any]]:
        """Lets a thread read one sample."""
        return self._pool.submit(self._read, index)

    def read(self) -> Tensor:
        """All samples, ``(N, ...)``."""
        rows = torch.empty(self.shape, dtype=self.dtype, memory_format=layout(len(self.shape)))
        with Prefetcher(self, range(len(self))) as prefetcher:
            for at in range(0, len(self), self.ahead):
                part = range(at, min(at + self.ahead, len(self)))
                rows[at : at + len(part)] = prefetcher.take(part)
        return rows

    def _read(self, index: int) -> NDArray[Any]:
        sample = self.source[index]
        return np.array(sample) if isinstance(sample, np.memmap) else sample  # a map is read when copied


class Prefetcher:
    """Reads a bounded number of samples ahead, in the order in which they will be needed.

    Only the thread that takes the samples changes its state, so it needs no lock. A sample that is planned again while
    it is in memory is not read again.

    Args:
        stream: The samples.
        plan: Indices in the order of use, with repeats. Others can be taken too, but are read only then.
        before: The previous prefetcher, which is closed; samples that it has read and the new plan needs soon are kept.
    """

    def __init__(self, stream: Stream, plan: Iterable[int], before: Prefetcher | None = None) -> None:
        self._stream = stream
        self._plan = deque(plan)
        self._reads: dict[int, Future[NDArray[Any]]] = {}
        self._uses = Counter[int]()  # planned and not yet taken; negative: taken before its turn
        self._fill({} if before is None else before._reads)
        if before is not None:
            before.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading."""
        self._plan.clear()
        for read in self._reads.values():
            read.cancel()
        self._reads = {}

    def take(self, indices: Sequence[int]) -> Tensor:
        """Returns samples by index, ``(n, ...)``, in host memory.

        Raises:
            UserError: If one of them is faulty.
        """
        stream, reads = self._stream, dict[int, Future[NDArray[Any]]]()
        places: dict[int, list[int]] = {}
        for place, i in enumerate(indices):
            places.setdefault(i, []).append(place)
        for i, its in places.items():
            reads[i] = self._reads[i] if i in self._reads else stream.start(i)
            self._uses[i] -= len(its)
            if self._uses[i] <= 0:
                self._reads.pop(i, None)
        self._fill({})
        rows = np.empty((len(indices), *stream.source.shape[1:]), stream.source.dtype)
        try:
            for i, its in places.items():
                sample = reads.pop(i).result()
                for place in its:
                    rows[place] = sample
        except BaseException:  # a faulty sample, or Ctrl-C: the others are not needed
            for read in reads.values():
                read.cancel()
            self.close()
            raise
        return inputs(stream.name, rows, indices)

    def _fill(self, done: dict[int, Future[NDArray[Any]]]) -> None:
        """Starts to read the next samples, unless they are among those done."""
        while self._plan and len(self._reads) < self._stream.ahead:
            i = self._plan.popleft()
            self._uses[i] += 1
            if self._uses[i] == 1:
                self._reads[i] = done.pop(i) if i in done else self._stream.start(i)


def stored_bytes(x: Tensor | Stream, indices: Sequence[int]) -> bytes:
    """The bits of some samples, the same whether they are streamed or not.

    Args:
        x: All samples.
        indices: Indices of some of them.
    """
    if isinstance(x, Stream):
        with Prefetcher(x, indices) as prefetcher:
            parts = [prefetcher.take(indices[at : at + x.ahead]) for at in range(0, len(indices), x.ahead)]
    else:
        parts = [x[torch.as_tensor(indices, dtype=torch.int64, device=x.device)].cpu()]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


# Arrays and tensors, checked and converted to one form


def inputs(name: str, array: Any, rows: Sequence[int] | None = None) -> Tensor:
    """Returns samples as a tensor: images ``(N, C, H, W)`` or features ``(N, ...)``, in the memory format of `layout`.

    uint8 arrays are images: ``(N, H, W)`` gets a channel, ``(N, H, W, 1 or 3)`` becomes ``(N, C, H, W)``. Floats
    keep their dtype; int32 and int64 (tokens) become int64.

    Args:
        name: Name of the samples in errors.
        array: The samples.
        rows: Their row numbers, ``(N,)``, if these are not all rows.

    Raises:
        UserError: If the dtype is none of these, or a value is not finite.
    """
    x = numeric(name, array)
    if x.dtype == torch.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.movedim(-1, 1)
    elif x.is_floating_point():
        x = finite(name, x, rows)
    elif x.dtype in (torch.int32, torch.int64):
        x = x.long()
    else:
        raise UserError(f"{name}: dtype {x.dtype} is not supported; use uint8 (images), float or int64 (tokens)")
    return x.contiguous(memory_format=layout(x.ndim))


def layout(ndim: int) -> torch.memory_format:
    """Memory format of samples: channels_last for images, since convolutions are faster with it."""
    return torch.channels_last if ndim == 4 else torch.contiguous_format


def labels(name: str, array: Any) -> Tensor:
    """Returns class labels as int64, ``(N,)``.

    Raises:
        UserError: If they are not one-dimensional, or not integers >= 0.
    """
    y = numeric(name, array)
    ensure(
        not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool,
        f"{name}: labels are {y.dtype}; convert them to integers 0, 1, ...",
    )
    ensure(y.ndim == 1, f"{name}: shape {tuple(y.shape)} is not (N,); give one label per sample")
    y = y.long()
    if len(y) and y.min() < 0:
        raise UserError(f"{name}: label {int(y.min())} at row {int(y.argmin())} is negative; number the classes from 0")
    return y


def stratified(y: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of ``n`` of the labels ``y``, sorted, with the class shares of the whole (to within one sample)."""
    order = rng.permutation(len(y))
    quantile = np.empty(len(y))
    for label in np.unique(y):
        members = order[y[order] == label]
        quantile[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.sort(order[np.argsort(quantile[order], kind="stable")[:n]])


def finite(name: str, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """Returns floats as they are.

    Raises:
        UserError: If one is not finite.
    """
    if not x.isfinite().all():
        row = int((~x.isfinite()).nonzero()[0, 0])
        raise UserError(
            f"{name}: row {row if rows is None else rows[row]} holds NaN or infinity; clean or drop such rows"
        )
    return x


def numeric(name: str, array: Any) -> Tensor:
    """Returns an array as a tensor on the CPU.

    Raises:
        UserError: If it holds no numbers.
    """
    try:
        return array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError):
        raise UserError(
            f"{name}: {type(array).__name__} of {np.asarray(array).dtype} is not a numeric array; "
            "give a numpy array or tensor"
        ) from None
