"""Rows of one size in a file, written by copy on write."""

import errno
import math
import os
import secrets
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import State, UserError, ensure, files

CHECKSUM = STAMP = 8
"""Bytes of the CRC-32 of all that follows it in a row, and of the row's stamp, a number that no other row has."""
HEADER = CHECKSUM + STAMP
"""Bytes before the values of each row in the file."""
COLUMNS = ("ids", "positions", "stamps")
"""Entries of `RowFile.state` with a number for each row."""
LAST, FOR_GOOD = "", "*"
"""Names of what `RowFile.kept` holds of last.ckpt, and of all checkpoints that stay; others have those of files."""
REMEDY = "put the run's own file back, take another checkpoint, or start again"
Bytes = np.ndarray[Any, Any]


class RowFile:
    """Rows of one size in a file, by position. Positions that a checkpoint refers to are never written to.

    Args:
        path: The file. Rows already in it may belong to checkpoints, and stay until the next `saved`.
        shapes: Shapes of a row's values, by name.
        like: A tensor with the dtype of all values; if it is on a GPU, rows are read to pinned memory.
        named: Whether there are checkpoints of it; otherwise the file has no name, and goes with the process.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], like: Tensor, named: bool = True) -> None:
        self.path, self.shapes, self.named = path, shapes, named
        self.dtype, self.pin = like.dtype, like.is_cuda
        self.size = HEADER + sum(map(math.prod, shapes.values())) * like.element_size()
        end = -(-path.stat().st_size // self.size) if path.exists() else 0
        self.held = bytearray(b"\1" * end)  # by position: whether a checkpoint may refer to it
        self.stamps = array("q", bytes(STAMP * end))
        self.free: list[int] = []
        self.pins = path.with_suffix(".pins")
        pins = _read_pins(self.pins) if self.pins.exists() else {}
        self.kept: dict[str, Bytes] = {name: pin[pin < end] for name, pin in pins.items()}  # by checkpoint, see `state`
        self.written = "", np.zeros(0, np.int64)  # the last `state`
        self.knows_last = False
        self.stamp = secrets.randbits(62)
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The open file."""
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:  # a run that is only looked at
                if error.errno not in (errno.EROFS, errno.EACCES):
                    raise
                self._fd = os.open(self.path, os.O_RDONLY)
            if not self.named:
                self.path.unlink()
        return self._fd

    def write(self, slots: State) -> int:
        """Writes a row to a free position, and returns that."""
        if {name: tuple(v.shape) for name, v in slots.items()} != self.shapes:
            raise ValueError(f"client state has other shapes than at first contact: {self.shapes}")
        if not self.free:
            self.free.append(len(self.held))
            self.held.append(0)
            self.stamps.append(0)
        position = self.free[-1]
        self.stamp = self.stamps[position] = self.stamp + 1
        row = torch.zeros(self.size, dtype=torch.uint8)
        for name, value in self._values(row).items():
            value.copy_(slots[name])
        content = row.numpy()
        header = content[:HEADER].view(np.int64)
        header[1] = self.stamp
        header[0] = crc32(content[CHECKSUM:].data)
        with self._in_one_line("written"):
            self._transfer(os.pwritev, position, content.data)
        return self.free.pop()

    def read(self, position: int) -> State:
        """Returns the row at a position, on the CPU. A thread and the run may read at the same time."""
        return State(self._values(self._read(position, 1)[0]))

    def _values(self, row: Tensor) -> dict[str, Tensor]:
        """Returns the values in the bytes of a row, by name; they share its memory."""
        parts = torch.split(row[HEADER:].view(self.dtype), [math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def _read(self, first: int, number: int) -> Tensor:
        """Returns the bytes of rows at consecutive positions, ``(number, size)``; checks every bit of them."""
        rows = torch.empty(number, self.size, dtype=torch.uint8, pin_memory=self.pin)
        content = rows.numpy()
        with self._in_one_line("read"):
            self._transfer(os.preadv, first, content.reshape(-1).data)
        headers = content[:, :HEADER].copy().view(np.int64).tolist()
        for position, (checksum, stamp), row in zip(count(first), headers, content, strict=False):
            ensure(
                checksum == crc32(row[CHECKSUM:].data),
                f"{self.path}: damaged, row {position} has another checksum; {REMEDY}",
            )
            ensure(
                stamp == self.stamps[position],
                f"{self.path}: changed, row {position} is not that of the run or checkpoint; {REMEDY}",
            )
        return rows

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], position: int, content: memoryview) -> None:
        """Transfers the bytes of whole rows by preadv or pwritev, in as many calls as it takes."""
        offset = position * self.size
        while len(content):
            transferred = call(self.fd, [content], offset)
            if not transferred:
                raise OSError(errno.EIO, "the file is cut short")
            content, offset = content[transferred:], offset + transferred

    @contextmanager
    def _in_one_line(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be {action} ({error.strerror}); check the disk and resume from the last "
                "checkpoint, or keep the rows in memory (trainer.client_memory)"
            ) from None

    def release(self, position: int) -> None:
        """Gives a position up; it becomes free now, or when no checkpoint refers to it."""
        if not self.held[position]:
            self.free.append(position)

    def state(self, index: Mapping[int, int], pin: bool | Path) -> dict[str, Any]:
        """Flushes rows to disk and returns their positions; see `ClientStore.state_dict`.

        Args:
            index: Positions of the rows, by client.
            pin: As for `ClientStore.state_dict`.
        """
        positions = as_array(index.values())
        np.asarray(self.held)[positions] = 1
        name = os.path.relpath(pin, self.path.parent) if isinstance(pin, Path) else FOR_GOOD if pin else LAST
        self.written = name, positions
        self.kept[name] = np.union1d(self.kept.get(name, positions), positions)  # of either, until one is on disk
        if len(positions):
            files.restore_removed(self.path, self.fd)
            with self._in_one_line("flushed to disk"):
                os.fsync(self.fd)
            if pin:  # recorded before there is such a checkpoint
                pins = {name: torch.from_numpy(kept) for name, kept in self.kept.items() if name != LAST}
                files.save(self.pins, {"pins": pins})
        return {
            "name": self.path.name,
            "row_bytes": self.size,
            "ids": torch.from_numpy(as_array(index)),
            "positions": torch.from_numpy(positions),
            "stamps": torch.from_numpy(np.asarray(self.stamps)[positions]),
        }

    def saved(self, used: Bytes) -> None:
        """Frees positions that are neither used nor those of a checkpoint that there is: that of `state` is on disk."""
        name, positions = self.written
        if name != FOR_GOOD:
            self.kept[name] = positions
        self.knows_last |= name == LAST
        if not self.knows_last:
            return
        self.kept = {
            name: kept
            for name, kept in self.kept.items()
            if name in (LAST, FOR_GOOD) or (self.path.parent / name).exists()
        }
        self.held = bytearray(len(self.held))
        held = np.asarray(self.held)
        for kept in self.kept.values():
            held[kept] = 1
        taken = held.copy()
        taken[used] = 1
        self.free = np.flatnonzero(taken == 0)[::-1].tolist()  # the first ones are taken first

    def load(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Checks that the rows of `state` are in the file, every bit of them; returns their positions by client."""
        positions, stamps = state["positions"].numpy(), state["stamps"].numpy()
        n, row_bytes = len(positions), state["row_bytes"]
        ensure(
            len(state["ids"]) == n == len(stamps),
            f"{self.path}: the checkpoint has not one row for each client; {REMEDY}",
        )
        ensure(row_bytes == self.size, f"{self.path}: has rows of {row_bytes} bytes, this run {self.size}; {REMEDY}")
        size = self.path.stat().st_size if self.path.exists() else 0
        need = int(positions.max(initial=-1) + 1) * self.size
        ensure(size >= need, f"{self.path}: missing or cut short, {size} bytes of at least {need}; {REMEDY}")
        np.asarray(self.stamps)[positions] = stamps
        for run in _runs(np.sort(positions), max(1, files.CHUNK // self.size)):
            self._read(int(run[0]), len(run))
        return dict(zip(state["ids"].tolist(), positions.tolist(), strict=True))

    def close(self) -> None:
        """Closes the file until it is used again, if it has a name."""
        if self._fd is not None and self.named:
            os.close(self._fd)
            self._fd = None


def as_array(values: Collection[int]) -> Bytes:
    """Returns whole numbers as an array ``(n,)``, in their order."""
    return np.fromiter(values, np.int64, len(values))


def _runs(positions: Bytes, longest: int) -> Iterator[Bytes]:
    """Divides ascending positions into runs of consecutive ones, of limited length."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        yield from (run[start : start + longest] for start in range(0, len(run), longest))


def _read_pins(path: Path) -> dict[str, Bytes]:
    try:
        return {str(name): np.asarray(positions.numpy()) for name, positions in files.load(path)["pins"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: damaged ({error}); put it back, or remove it together with best.ckpt and round_<n>.ckpt, which "
            "need it"
        ) from None
