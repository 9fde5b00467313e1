"""The clients' state between rounds: a row a client, created on first use, in memory and beyond a budget in a file."""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core import Init, State
from fl_lightning.trainer.runtime.collectives import owner
from fl_lightning.trainer.storage.row_file import COLUMNS, RowFile, as_array


class ClientStore:
    """State of every client seen so far; a client never seen costs nothing.

    A round's rows are pending, and visible to every reader, until `commit` or `rollback`. A row stays where it is first
    put: in memory (on the device of ``w0``) while the budget lasts, otherwise in a file that is written by copy on
    write, so that whatever a checkpoint refers to is intact whenever the process dies.

    Each process keeps the rows of the clients that it owns. Rank 0, which writes the checkpoints, also keeps those of
    the others as they were when it last asked for them. Two runs must not write to the same folder.

    Args:
        inits: Initial values of a client's state, by name.
        w0: The initial model, ``(d,)``; rows have its dtype, and are handed out on its device.
        memory: Rows kept in memory, in GiB, with the Python objects around them; 0 for none.
        rank: The process.
        processes: Number of processes.

    Attributes:
        shared: Whether other processes keep rows, too.
    """

    def __init__(
        self, inits: Mapping[str, Init], w0: Tensor, memory: float = 1.0, rank: int = 0, processes: int = 1
    ) -> None:
        self.inits, self.w0, self.rank, self.processes = dict(inits), w0, rank, processes
        self.shared = bool(inits) and processes > 1
        self.shapes = {name: tuple(v.shape) for name, v in State.initial(self.inits, w0, w0).items()}
        row = sum(512 + math.prod(shape) * w0.element_size() for shape in self.shapes.values())
        self._room = int(memory * 2**30 / (512 + row))
        self._rows: dict[int, State] = {}
        self._index: dict[int, int] = {}  # positions in the file of the clients that are not in memory
        self._pending: dict[int, State] = {}
        self._placed: dict[int, int] = {}  # positions of those pending rows that are in the file
        self._ahead: dict[int, Future[State] | State | None] = {}
        self._unsaved: set[int] = set()  # clients whose rows rank 0 may have as they were
        self._file: RowFile | None = None
        self._thread: ThreadPoolExecutor | None = None

    def open(self, folder: Path) -> None:
        """Sets the folder of the file; nothing is created there before the first row goes to it."""
        if self._file is None or self._file.path.parent != folder:
            name = f"rows_{self.rank}.bin" if self.rank else "rows.bin"
            self._file = RowFile(folder / name, self.shapes, self.w0, named=not self.rank)

    def owns(self, client: int) -> bool:
        """Returns whether this process keeps the row of a client between rounds."""
        return owner(client, self.processes) == self.rank

    @property
    def unsaved(self) -> list[int]:
        """On other processes than rank 0, clients whose rows may have changed since the last checkpoint."""
        return [k for k in sorted(self._unsaved) if k in self._pending or k in self._rows or k in self._index]

    def __len__(self) -> int:
        """Number of clients with a row."""
        return len(self._rows.keys() | self._index.keys() | self._pending.keys())

    def __repr__(self) -> str:
        """Returns the number of clients seen, and the shapes of a row."""
        row = ", ".join(f"{name}: {shape}" for name, shape in self.shapes.items())
        return f"ClientStore({len(self)} clients seen, each with {row or 'no state'})"

    @property
    def on_disk(self) -> bool:
        """Whether the row of some client is in the file."""
        return bool(self._index or self._placed)

    def get(self, client: int, w: Tensor, row: State | None = None) -> State:
        """Returns the state of a client that has just received ``w``: its row, or initial values at first contact.

        Args:
            client: Its id.
            w: What it received, ``(d,)``.
            row: Its state, if newer than what is stored.

        Raises:
            UserError: If the row is in the file and cannot be read.
        """
        return row or self.row(client) or State.initial(self.inits, self.w0, w)

    def row(self, client: int) -> State | None:
        """Returns the row of a client, pending or not; None before first contact. It raises as `get` does."""
        row = self._pending.get(client) or self._rows.get(client)
        if row is not None or client not in self._index:
            return row
        ahead = self._ahead.pop(client, None)
        values = ahead.result() if isinstance(ahead, Future) else ahead or self._disk.read(self._index[client])
        return State({name: v.to(self.w0.device, non_blocking=True) for name, v in values.items()})

    @property
    def seen(self) -> list[int]:
        """Ids of the clients with a row that this process owns."""
        return [k for k in sorted(self._rows.keys() | self._index.keys() | self._pending.keys()) if self.owns(k)]

    def rows(self) -> dict[int, State]:
        """Returns the rows of all clients seen that this process owns, by id. It holds them all at once."""
        return {k: row for k in self.seen if (row := self.row(k)) is not None}

    def stage(self, rows: Mapping[int, State]) -> None:
        """Takes a round's rows as pending, without scratch state.

        Rows that go to the file are written here, so that `commit` cannot fail. Those in memory are copies.

        Args:
            rows: The clients' states, by id.

        Raises:
            UserError: If the file cannot be written. `rollback` then restores the state.
        """
        if not self.inits:
            return
        if self.rank:
            self._unsaved |= rows.keys()
        for client in rows:
            self._drop(client)
        room = self._room - len(self._rows) - sum(k not in self._rows for k in self._pending if k not in self._placed)
        for client, slots in rows.items():
            slots = slots.only(self.inits)
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

    def rollback(self) -> dict[int, State]:
        """Drops the pending rows, also if `state_dict` has been called since; returns them."""
        dropped = dict(self._pending)
        for client in dropped:
            self._drop(client)
        return dropped

    def commit(self) -> None:
        """Makes the pending rows the state. If it is interrupted, the rows are still pending: call it again."""
        for client, slots in self._pending.items():
            old, new = self._index.get(client), self._placed.get(client)
            if new is None:
                self._rows[client] = slots
                self._index.pop(client, None)
                self._ahead.pop(client, None)
            else:
                self._index[client] = new
                self._rows.pop(client, None)
                if client in self._ahead:  # needed again at once: not read from the file
                    self._ahead[client] = State({name: v.clone() for name, v in slots.items()})
            if old is not None and old != new:
                self._disk.release(old)
        self._pending, self._placed = {}, {}

    def read_ahead(self, clients: Iterable[int]) -> None:
        """Reads the rows of the next clients in a thread, and drops what was read ahead before.

        It is best called when a round's own clients have been read. A row that changes meanwhile is returned as it is
        when `get` asks for it.

        Args:
            clients: Their ids, in the order of use. So many rows must fit into memory in addition to the budget.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, "read-ahead")
        ahead: dict[int, Future[State] | State | None] = {}
        for client in clients:
            if client in self._pending:
                ahead[client] = None  # commit puts the row here
            elif client in self._index:
                ahead[client] = self._ahead.get(client) or self._thread.submit(self._disk.read, self._index[client])
        self._ahead = ahead

    def state_dict(self, pin: bool | Path = False) -> dict[str, Any]:
        """Returns the state, pending rows included, for a checkpoint. What it refers to in the file is then on disk.

        Neither its positions nor those of the checkpoint before are written to until `saved`. Nothing is committed: if
        the checkpoint cannot be written, `rollback` still undoes the round.

        Args:
            pin: Whether later checkpoints do not replace this one: its positions are then never written to again,
                whichever checkpoint the run is resumed from. Its path: until that file is replaced or removed.

        Returns:
            Rows in memory as tensors by name, ``(clients, d)``, in the order of ``ids``; the initial model; and the
            positions of the rows in the file.

        Raises:
            UserError: If the folder cannot be written.
        """
        rows, index = {**self._rows, **self._pending}, {**self._index, **self._placed}
        for client in self._pending:
            (rows if client in self._placed else index).pop(client, None)
        ids = sorted(rows)
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "rows": ({name: torch.stack([rows[k][name].cpu() for k in ids]) for name in self.inits} if ids else {}),
            "w0": self.w0.cpu(),
            "file": None if self._file is None else self._file.state(index, pin),
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restores the state of `state_dict`; other processes than rank 0 take what they own.

        Nothing in the file is overwritten before the next `saved`: until then other checkpoints of the same folder stay
        intact, too.

        Args:
            state: What `state_dict` returned.
            folder: As for `open`.

        Raises:
            UserError: If the file is missing, cut short, or lacks a row that the checkpoint refers to.
        """
        self.close()
        self.w0 = state["w0"].to(self.w0)
        self._rows, self._index, self._pending, self._placed, self._file = {}, {}, {}, {}, None
        columns = {name: values.unbind() for name, values in state["rows"].items()}
        self._rows = {
            client: State({name: column[k].to(self.w0, copy=True) for name, column in columns.items()})
            for k, client in enumerate(torch.as_tensor(state["ids"]).tolist())
            if self.owns(client) or not self.rank
        }
        self.open(folder)
        if state.get("file"):
            self._take(state["file"], folder)

    def _take(self, file: Mapping[str, Any], folder: Path) -> None:
        """Takes the rows that a checkpoint has in its file; other processes than rank 0 copy those that they own."""
        if not self.rank:
            self._index = self._disk.load(file)
            return
        owned = torch.tensor([self.owns(client) for client in file["ids"].tolist()], dtype=torch.bool)
        source = RowFile(folder / "rows.bin", self.shapes, self.w0)
        for client, position in source.load({**file, **{n: file[n][owned] for n in COLUMNS}}).items():
            self.stage({client: source.read(position)})
            self.commit()
        source.close()
        self._unsaved.clear()

    def saved(self) -> None:
        """Call it when the checkpoint of the last `state_dict` is on disk and replaces the one before.

        Positions that neither it nor another one refers to become free, once last.ckpt has been written.
        On other processes than rank 0 it says that rank 0 has put all rows into the checkpoint.
        """
        self._unsaved.clear()
        if self._file is not None and not self.rank:
            self._file.saved(as_array([*self._index.values(), *self._placed.values()]))

    def close(self) -> None:
        """Ends the thread and closes the file; both reopen if needed."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread, self._ahead = None, {}
        if self._file is not None:
            self._file.close()

    @property
    def _disk(self) -> RowFile:
        assert self._file is not None, "call open() first: rows exceed the memory budget"
        return self._file
