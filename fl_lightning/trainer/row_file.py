"""Rows of one size in a file, written by copy on write."""

import errno
import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import State, UserError
from fl_lightning.core.files import CHUNK, load, restore_removed, save
from fl_lightning.trainer.positions import Positions

STAMP = 8
"""Bytes of a row's stamp, a number that no other row has."""
HEADER = 2 * STAMP
"""Bytes before each row in the file: its stamp, and the CRC-32 of stamp and values."""
REMEDY = "put the run's own file back, take another checkpoint, or start again"


Bytes = np.ndarray[Any, Any]


class RowFile:
    """Rows of one size in a file, by position. Positions that a checkpoint refers to are never written to.

    Args:
        path: The file. Rows already in it may belong to checkpoints, and stay until the next `saved`.
        shapes: Shapes of a row's values, by name.
        like: A tensor with the dtype of all values; if it is on a GPU, rows are read to pinned memory.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> None:
        self.path, self.shapes = path, shapes
        self.options: dict[str, Any] = {"dtype": like.dtype, "pin_memory": like.is_cuda}
        self.size = HEADER + sum(int(np.prod(shape)) for shape in shapes.values()) * like.element_size()
        end = -(-path.stat().st_size // self.size) if path.exists() else 0
        self.held = bytearray(b"\1" * end)  # by position: whether a checkpoint may refer to it
        self.stamps = array("q", bytes(STAMP * end))
        self.free: list[int] = []
        self.pins = path.with_suffix(".pins")
        self.pinned = _read_pins(self.pins) if self.pins.exists() else np.zeros(0, np.int64)
        self.pinned = self.pinned[self.pinned < end]
        self.snapshot: np.ndarray[Any, Any] | None = None  # positions of the last state, None if it is pinned
        self.stamp = secrets.randbits(62)
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The open file."""
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
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
        values = [_bytes(v.to("cpu", self.options["dtype"]).contiguous()) for v in slots.values()]
        with self._in_one_line("written"):
            header = np.array([self.stamp, _sum(np.int64(self.stamp), values)])
            self._transfer(os.pwritev, position, [header.view(np.uint8), *values])
        return self.free.pop()

    def read(self, position: int) -> State:
        """Returns the row at a position, on the CPU. A thread and the run may read at the same time."""
        header = np.zeros(2, np.int64)
        slots = State({name: torch.empty(shape, **self.options) for name, shape in self.shapes.items()})
        values = [_bytes(v) for v in slots.values()]
        with self._in_one_line("read"):
            self._transfer(os.preadv, position, [header.view(np.uint8), *values])
        self._check(position, header[None], [_sum(header[0], values)])
        return slots

    def _check_rows(self, first: int, number: int) -> None:
        """Reads rows at consecutive positions, to check them."""
        rows = np.zeros((number, self.size), np.uint8)
        with self._in_one_line("read"):
            self._transfer(os.preadv, first, [rows.reshape(-1)])
        headers = rows[:, :HEADER].copy().view(np.int64)
        self._check(first, headers, [_sum(*each) for each in zip(headers[:, 0], rows[:, None, HEADER:], strict=True)])

    def _check(self, first: int, headers: Bytes, sums: Sequence[int]) -> None:
        """Checks the headers of rows at consecutive positions, ``(rows, 2)``, against their checksums and stamps."""
        for row, (stamp, checksum), right in zip(count(first), headers.tolist(), sums, strict=False):
            if checksum != right:
                raise UserError(f"{self.path}: damaged, row {row} has another checksum; {REMEDY}")
            if stamp != self.stamps[row]:
                raise UserError(f"{self.path}: changed, row {row} is not that of the run or checkpoint; {REMEDY}")

    def _transfer(self, call: Callable[[int, Any, int], int], position: int, buffers: list[Bytes]) -> None:
        """Transfers whole rows by preadv or pwritev, in as many calls as it takes."""
        offset = position * self.size
        while buffers:
            done = call(self.fd, buffers, offset)
            if not done:
                raise OSError(errno.EIO, "the file is cut short")
            offset += done
            while buffers and done >= len(buffers[0]):
                done -= len(buffers.pop(0))
            if done:
                buffers[0] = buffers[0][done:]

    @contextmanager
    def _in_one_line(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be {done} ({error.strerror}); check the disk and resume from the last "
                "checkpoint, or keep the rows in memory (trainer.client_memory)"
            ) from None

    def release(self, position: int) -> None:
        """Gives a position up; it becomes free now, or when no checkpoint refers to it."""
        if not self.held[position]:
            self.free.append(position)

    def state(self, index: Positions, pin: bool) -> dict[str, Any]:
        """Flushes the rows of ``index`` to disk and returns their positions; see `ClientStore.state_dict`."""
        positions = index.positions
        np.asarray(self.held)[positions] = 1
        self.snapshot = None if pin else positions
        if pin:
            self.pinned = np.union1d(self.pinned, positions)
        if len(positions):
            restore_removed(self.path, self.fd)
            with self._in_one_line("flushed to disk"):
                os.fsync(self.fd)
            if pin:  # recorded before there is such a checkpoint
                save(self.pins, {"positions": torch.from_numpy(self.pinned)})
        return {
            "name": self.path.name,
            "row_bytes": self.size,
            "ids": torch.from_numpy(index.clients),
            "positions": torch.from_numpy(positions),
            "stamps": torch.from_numpy(np.asarray(self.stamps)[positions]),
        }

    def saved(self, used: Bytes) -> None:
        """Frees positions that are neither used, nor pinned, nor in the last `state`."""
        if self.snapshot is None:
            return
        self.held = bytearray(len(self.held))
        held = np.asarray(self.held)
        held[self.snapshot] = held[self.pinned] = 1
        taken = held.copy()
        taken[used] = 1
        self.free = np.flatnonzero(taken == 0)[::-1].tolist()  # the first ones are taken first

    def load(self, state: Mapping[str, Any]) -> Positions:
        """Checks that the rows of `state` are in the file, every bit of them; returns their positions by client."""
        positions, stamps = state["positions"].numpy(), state["stamps"].numpy()
        need = int(positions.max(initial=-1) + 1) * self.size
        if not len(state["ids"]) == len(positions) == len(stamps):
            raise UserError(f"{self.path}: the checkpoint has not one row for each client; {REMEDY}")
        if len(positions) and not self.path.exists():
            raise UserError(f"{self.path}: missing, and the checkpoint keeps {len(positions)} clients there; {REMEDY}")
        if state["row_bytes"] != self.size:
            raise UserError(f"{self.path}: has rows of {state['row_bytes']} bytes, this run {self.size}; {REMEDY}")
        if len(positions) and (size := self.path.stat().st_size) < need:
            raise UserError(f"{self.path}: cut short, {size} bytes of at least {need}; {REMEDY}")
        np.asarray(self.stamps)[positions] = stamps
        for run in _runs(np.sort(positions), max(1, CHUNK // self.size)):
            self._check_rows(int(run[0]), len(run))
        return Positions(state["ids"].numpy(), positions)

    def close(self) -> None:
        """Closes the file until it is used again."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def _bytes(values: Tensor) -> Bytes:
    found: Bytes = values.numpy().reshape(-1).view(np.uint8)
    return found


def _sum(stamp: np.int64, values: Iterable[Bytes]) -> int:
    """The checksum of a row."""
    found = crc32(stamp.tobytes())
    for value in values:
        found = crc32(value.data, found)
    return found


def _runs(positions: Bytes, most: int) -> Iterator[Bytes]:
    """Divides ascending positions into runs of consecutive ones, of limited length."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        yield from (run[at : at + most] for at in range(0, len(run), most))


def _read_pins(path: Path) -> Bytes:
    try:
        found: Bytes = load(path)["positions"].numpy()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: damaged ({error}); put it back, or remove it together with best.ckpt and round_<n>.ckpt, which "
            "need it"
        ) from None
    return found
