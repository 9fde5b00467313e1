"""The clients' state between rounds: rows by client, made on first use, in memory and beyond a budget in a file."""

from __future__ import annotations

import errno
import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import UserError
from fl_lightning.core.state import Init, State
from fl_lightning.trainer import checkpoint

STAMP = 8
"""Bytes before each row in the file: a number that no other row has."""


class ClientStore:
    """State of every client seen so far; a client never seen costs nothing.

    A round's rows are pending, and seen by every reader, until `commit` or `rollback`. A row stays where it is first put:
    in memory (beside ``w0``) while the budget lasts, else in a file that is written by copy on write, so that what a
    checkpoint refers to is whole whenever the process dies.

    One process keeps the rows; two stores must not write to the same folder.

    Args:
        rules: First values of the slots, by name.
        w0: The initial model, ``(d,)``; rows have its dtype, and are handed out on its device.
        memory: Rows kept in memory, in GiB, with the Python objects around them; 0 for none.
    """

    def __init__(self, rules: Mapping[str, Init], w0: Tensor, memory: float = 1.0) -> None:
        self.rules, self.w0 = dict(rules), w0
        self._shapes = {name: tuple(v.shape) for name, v in State.initial(self.rules, w0, w0).items()}
        row = sum(512 + int(np.prod(shape)) * w0.element_size() for shape in self._shapes.values())
        self._room = int(memory * 2**30 / (512 + row))
        self._rows: dict[int, State] = {}
        self._index: dict[int, int] = {}  # positions in the file of the clients that are not in memory
        self._pending: dict[int, State] = {}
        self._placed: dict[int, int] = {}  # positions of those pending rows that are in the file
        self._ahead: dict[int, Future[State] | State | None] = {}
        self._file: _RowFile | None = None
        self._thread: ThreadPoolExecutor | None = None

    def open(self, folder: Path) -> None:
        """Say in which folder rows may go to a file; nothing is made there before the first one does."""
        if self._file is None or self._file.path.parent != folder:
            self._file = _RowFile(folder / "rows.bin", self._shapes, self.w0)

    def __len__(self) -> int:
        """Number of clients with a row."""
        new = sum(k not in self._rows and k not in self._index for k in self._pending)
        return len(self._rows) + len(self._index) + new

    @property
    def on_disk(self) -> bool:
        """Whether the row of some client is in the file."""
        return bool(self._index or self._placed)

    def get(self, client: int, w: Tensor, scratch: Mapping[str, Init], row: State | None = None) -> State:
        """State of a client that has just received ``w``: its row, or first values if it was never seen.

        Args:
            client: Its id.
            w: What it received, ``(d,)``.
            scratch: Rules of further slots, which start afresh.
            row: Its state if it is newer than what is stored.

        Raises:
            UserError: If the row is in the file and cannot be read.
        """
        kept = row or self.row(client) or State.initial(self.rules, self.w0, w)
        return State({**kept, **State.initial(scratch, self.w0, w)})

    def row(self, client: int) -> State | None:
        """What is kept of a client, be it pending; None if it was never seen. Raises as `get`."""
        found = self._pending.get(client) or self._rows.get(client)
        if found is not None or client not in self._index:
            return found
        ahead = self._ahead.pop(client, None)
        read = ahead.result() if isinstance(ahead, Future) else ahead or self._disk.read(self._index[client])
        return State({name: v.to(self.w0.device, non_blocking=True) for name, v in read.items()})

    def rows(self) -> dict[int, State]:
        """The slots of all clients seen, by id. For small runs: it holds them all at once."""
        clients = sorted(self._rows.keys() | self._index.keys() | self._pending.keys())
        return {k: row for k in clients if (row := self.row(k)) is not None}

    def stage(self, rows: Mapping[int, State]) -> None:
        """Take a round's rows as pending; names without a rule are dropped.

        Those that go to the file are written here, so that `commit` cannot fail. What is pending in memory is a copy.

        Args:
            rows: The clients' states, by id.

        Raises:
            UserError: If the file cannot be written. `rollback` then leaves the state as it was.
        """
        if not self.rules:
            return
        for client in rows:
            self._drop(client)
        room = self._room - len(self._rows) - sum(k not in self._rows for k in self._pending if k not in self._placed)
        for client, slots in rows.items():
            slots = slots.only(self.rules)
            room -= client not in self._rows
            if room >= 0:
                slots = State({name: v.to(self.w0, copy=True) for name, v in slots.items()})
            else:  # a client whose row is in memory comes here if a checkpoint of a larger budget was loaded
                self._placed[client] = self._disk.write(slots)
                room += 1
            self._pending[client] = slots

    def _drop(self, client: int) -> None:
        self._pending.pop(client, None)
        if client in self._placed:
            self._disk.release(self._placed.pop(client))

    def rollback(self) -> None:
        """Drop the pending rows: the state is that before them, also if `state_dict` has been called since."""
        for client in list(self._pending):
            self._drop(client)

    def commit(self) -> None:
        """The pending rows become the state, and what they replace is forgotten.

        If this is broken off, the rows are still pending, and it may be called again.
        """
        for client, slots in self._pending.items():
            old, new = self._index.get(client), self._placed.get(client)
            if new is None:
                self._rows[client] = slots
                self._index.pop(client, None)
                self._ahead.pop(client, None)
            else:
                self._index[client] = new
                self._rows.pop(client, None)
                if client in self._ahead:  # wanted again at once: no need to read it
                    self._ahead[client] = State({name: v.clone() for name, v in slots.items()})
            if old is not None and old != new:
                self._disk.release(old)
        self._pending, self._placed = {}, {}

    def read_ahead(self, clients: Iterable[int]) -> None:
        """Let a thread read the rows of the clients that will be gathered next; what was read before is forgotten.

        Best called when a round's own clients have been gathered. A row that changes meanwhile is handed out as it is
        when it is gathered.

        Args:
            clients: Their ids, in the order in which they will be gathered. So many rows must fit into memory beside
                the budget.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, "read-ahead")
        ahead: dict[int, Future[State] | State | None] = {}
        for client in clients:
            if client in self._pending:
                ahead[client] = None  # settle puts the row here
            elif client in self._index:
                known = self._ahead.get(client)
                ahead[client] = known or self._thread.submit(self._disk.read, self._index[client])
        self._ahead = ahead

    def state_dict(self, pin: bool = False) -> dict[str, Any]:
        """The state, pending rows included, for a checkpoint; what it refers to in the file is on disk on return.

        Neither its positions nor those of the checkpoint before are written to until `saved`. Nothing is settled: if
        the checkpoint cannot be written, `rollback` still takes the round back.

        Args:
            pin: For a checkpoint that later ones do not replace: its positions are never written to again, whichever
                checkpoint the run is resumed from.

        Returns:
            Rows in memory as tensors, by slot ``(clients, d)``, in the order of ``ids``; the initial model; and where
            the rows in the file are.

        Raises:
            UserError: If the folder cannot be written.
        """
        rows, index = {**self._rows, **self._pending}, {**self._index, **self._placed}
        for client in self._pending:
            (rows if client in self._placed else index).pop(client, None)
        ids = sorted(rows)
        stacked = {name: torch.stack([rows[k][name].cpu() for k in ids]) for name in self.rules} if ids else {}
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "rows": stacked,
            "w0": self.w0.cpu(),
            "file": None if self._file is None else self._file.state(index, pin),
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Take over the state of `state_dict`.

        Nothing is written, and nothing that lies in the file is overwritten before the next `saved`: until then other
        checkpoints of the same folder stay whole, too.

        Args:
            state: What it returned.
            folder: As for `open`: where the file is.

        Raises:
            UserError: If the file is missing, cut short, or lacks a row that the checkpoint refers to.
        """
        self.close()
        self.w0 = state["w0"].to(self.w0)
        self._rows, self._index, self._pending, self._placed, self._file = {}, {}, {}, {}, None
        self._rows = {
            client: State({name: values[k].to(self.w0, copy=True) for name, values in state["rows"].items()})
            for k, client in enumerate(torch.as_tensor(state["ids"]).tolist())
        }
        self.open(folder)
        if state.get("file"):
            self._index = self._disk.load(state["file"])

    def saved(self) -> None:
        """The checkpoint of the last `state_dict` is safely on disk and takes the place of the one before.

        Positions that neither it nor a pinned one refers to become free. After a pinned `state_dict` nothing changes.
        """
        if self._file is not None:
            self._file.saved([*self._index.values(), *self._placed.values()])

    def close(self) -> None:
        """End the thread and close the file; either comes back if it is needed again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread, self._ahead = None, {}
        if self._file is not None:
            self._file.close()

    @property
    def _disk(self) -> _RowFile:
        assert self._file is not None, "open() says where rows beyond the memory budget go"
        return self._file


class _RowFile:
    """Rows of one size in a file, by position; what a checkpoint refers to is never written to.

    Args:
        path: The file. What lies in it already may belong to checkpoints, and is left alone until the next `saved`.
        shapes: Shapes of a row's slots, by name.
        like: A tensor with the dtype of all slots; if it is on a GPU, rows are read to pinned memory.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> None:
        self.path, self.shapes = path, shapes
        self.options: dict[str, Any] = {"dtype": like.dtype, "pin_memory": like.is_cuda}
        self.size = STAMP + sum(int(np.prod(shape)) for shape in shapes.values()) * like.element_size()
        end = -(-path.stat().st_size // self.size) if path.exists() else 0
        self.held = bytearray(b"\1" * end)  # by position: whether a checkpoint may refer to it
        self.stamps = array("q", bytes(STAMP * end))
        self.free: list[int] = []
        self.pins = path.with_suffix(".pins")
        self.pinned = torch.load(self.pins)["positions"].numpy() if self.pins.exists() else np.zeros(0, np.int64)
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
        """Write a row to a free position, which is returned."""
        if {name: tuple(v.shape) for name, v in slots.items()} != self.shapes:
            raise ValueError(f"client state has other shapes than at first contact: {self.shapes}")
        if not self.free:
            self.free.append(len(self.held))
            self.held.append(0)
            self.stamps.append(0)
        position = self.free[-1]
        self.stamp = self.stamps[position] = self.stamp + 1
        values = [v.to("cpu", self.options["dtype"]).contiguous() for v in slots.values()]
        with self._in_one_line("written"):
            self._transfer(os.pwritev, position, np.array([self.stamp]), values)
        return self.free.pop()

    def read(self, position: int) -> State:
        """The row at a position, on the CPU, each slot in memory of its own. The thread and the run read at once."""
        stamp = np.zeros(1, np.int64)
        slots = State({name: torch.empty(shape, **self.options) for name, shape in self.shapes.items()})
        with self._in_one_line("read"):
            self._transfer(os.preadv, position, stamp, list(slots.values()))
        if stamp[0] != self.stamps[position]:
            raise UserError(
                f"{self.path}: changed while the run used it; let one run at a time use a folder, and start anew"
            )
        return slots

    def _transfer(
        self, call: Callable[[int, Any, int], int], position: int, stamp: np.ndarray[Any, Any], values: Sequence[Tensor]
    ) -> None:
        """A whole row by preadv or pwritev, however many calls that takes."""
        buffers = [stamp.view(np.uint8), *(v.numpy().reshape(-1).view(np.uint8) for v in values)]
        offset = position * self.size
        while buffers:
            done = call(self.fd, buffers, offset)
            if not done:
                raise OSError(errno.EIO, "it is cut short")
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
                f"{self.path}: cannot be {done} ({error.strerror}); see to the disk and resume from the last "
                "checkpoint, or keep the rows in memory (trainer.client_memory)"
            ) from None

    def release(self, position: int) -> None:
        """The position is not in use any more; it becomes free, now or when no checkpoint refers to it."""
        if not self.held[position]:
            self.free.append(position)

    def state(self, index: Mapping[int, int], pin: bool) -> dict[str, Any]:
        """Where the rows of ``index`` are, once they are on disk; see `ClientStore.state_dict`."""
        positions = np.fromiter(index.values(), np.int64, len(index))
        np.asarray(self.held)[positions] = 1
        self.snapshot = None if pin else positions
        if pin:
            self.pinned = np.union1d(self.pinned, positions)
        if len(positions):
            with self._in_one_line("flushed to disk"):
                os.fsync(self.fd)
                if pin:  # noted before there is such a checkpoint
                    checkpoint.save(self.pins, {"positions": torch.from_numpy(self.pinned)})
        return {
            "name": self.path.name,
            "row_bytes": self.size,
            "ids": torch.from_numpy(np.fromiter(index, np.int64, len(index))),
            "positions": torch.from_numpy(positions),
            "stamps": torch.from_numpy(np.asarray(self.stamps)[positions]),
        }

    def saved(self, used: Sequence[int]) -> None:
        """Free what is neither used, nor pinned, nor in the last `state`."""
        if self.snapshot is None:
            return
        self.held = bytearray(len(self.held))
        held = np.asarray(self.held)
        held[self.snapshot] = held[self.pinned] = 1
        taken = held.copy()
        taken[np.array(used, np.int64)] = 1
        self.free = np.flatnonzero(taken == 0)[::-1].tolist()  # the first ones are taken first

    def load(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Check that the rows of `state` are there, and return their positions by client."""
        positions, stamps = state["positions"].numpy(), state["stamps"].numpy()
        need = int(positions.max(initial=-1) + 1) * self.size
        remedy = "put the run's own file back, take another checkpoint, or start anew"
        if len(positions) and not self.path.exists():
            raise UserError(f"{self.path}: missing, and the checkpoint keeps {len(positions)} clients there; {remedy}")
        if state["row_bytes"] != self.size:
            raise UserError(f"{self.path}: has rows of {state['row_bytes']} bytes, this run {self.size}; {remedy}")
        if len(positions) and (size := self.path.stat().st_size) < need:
            raise UserError(f"{self.path}: cut short, {size} bytes of at least {need}; {remedy}")
        for position, stamp in zip(positions.tolist(), stamps.tolist(), strict=True):
            if os.pread(self.fd, STAMP, position * self.size) != np.int64(stamp).tobytes():
                raise UserError(f"{self.path}: holds newer rows than the checkpoint's; {remedy}")
            self.stamps[position] = stamp
        return dict(zip(state["ids"].tolist(), positions.tolist(), strict=True))

    def close(self) -> None:
        """Close the file until it is used again."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
