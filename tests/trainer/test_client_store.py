"""The client store: the same rows wherever they lie, and after a crash those of the last checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fl_lightning import UserError
from fl_lightning.core import files
from fl_lightning.core.files import write_atomically
from fl_lightning.core.state import State
from fl_lightning.trainer.storage.client_store import ClientStore

D = 5
RULES: dict[str, Any] = {"c": "zeros", "n": 2.0, "own": lambda w0: w0.new_ones(2, 3)}
W0 = torch.linspace(-1, 1, D)
GIB = 2**30
LARGE, NONE = 1.0, 0.0
THREE = 3.5 * (4 * 512 + 4 * (D + 1 + 6)) / GIB
"""Budgets for all rows here, for none, and for three."""


def save(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save(content, file))


def value(client: int, number: int, dtype: torch.dtype = torch.float32) -> State:
    """A row like no other, of bit patterns that no arithmetic would leave alone."""
    draw = torch.Generator().manual_seed(1000 * number + client)
    c = torch.randn(D, generator=draw, dtype=dtype)
    c[:3] = torch.tensor([-0.0, float("nan"), 5e-324 if dtype == torch.float64 else 1e-45], dtype=dtype)
    return State({"c": c, "n": c[-1:].clone(), "own": torch.randn(2, 3, generator=draw, dtype=dtype), "scratch": c})


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(a[k].dtype == b[k].dtype and torch.equal(*(x[k].view(bits[x[k].dtype]) for x in (a, b))) for k in RULES)


def assert_holds(store: ClientStore, expected: Mapping[int, State]) -> None:
    rows = store.rows()
    assert len(store) == len(rows) and rows.keys() == expected.keys()
    assert all(rows[k].keys() == RULES.keys() and same(rows[k], expected[k]) for k in rows)


def make(folder: Path, memory: float = NONE, dtype: torch.dtype = torch.float32) -> ClientStore:
    store = ClientStore(RULES, W0.to(dtype), memory)
    store.open(folder)
    return store


def play(store: ClientStore, clients: Any, number: int) -> dict[int, State]:
    """A round in which these clients get new rows."""
    rows = {k: value(k, number, store.w0.dtype) for k in clients}
    store.stage(rows)
    store.commit()
    return rows


def write(store: ClientStore, path: Path, pin: bool | Path = False, **entries: Any) -> None:
    save(path, {"clients": store.state_dict(pin), **entries})
    store.saved()


def read(path: Path, folder: Path, memory: float = NONE, dtype: torch.dtype = torch.float32) -> ClientStore:
    store = ClientStore(RULES, torch.zeros(D, dtype=dtype), memory)
    store.load_state_dict(torch.load(path, weights_only=True)["clients"], folder)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("after", [NONE, THREE, LARGE])
@pytest.mark.parametrize("before", [NONE, THREE, LARGE])
def test_same_bits_whatever_the_budget(before: float, after: float, dtype: torch.dtype, tmp_path: Path) -> None:
    store = make(tmp_path / "clients", before, dtype)
    rows = play(store, range(8), 0) | play(store, (1, 6, 9), 1)
    assert_holds(store, rows)
    assert (tmp_path / "clients").exists() == (before != LARGE)
    write(store, tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["clients"]
    assert len(state["ids"]) == {NONE: 0, THREE: 3, LARGE: 9}[before]
    loaded = read(tmp_path / "x.ckpt", tmp_path / "clients", after, dtype)
    assert torch.equal(loaded.w0, W0.to(dtype))
    assert_holds(loaded, rows)
    rows |= play(loaded, (0, 6, 11), 2) | play(loaded, range(12), 3)
    assert_holds(loaded, rows)
    assert len(loaded.state_dict()["ids"]) == {NONE: 0, THREE: 3, LARGE: 12}[after]  # a new budget counts from now on
    store.close()
    loaded.close()


def test_rows_own_their_memory(tmp_path: Path) -> None:
    """Else one row in memory would keep a whole cohort's matrix; and what comes in may be a view of any kind."""
    for memory in (NONE, LARGE):
        store = make(tmp_path / str(memory), memory)
        batch = torch.randn(4, 2 * D)
        rows = {
            k: State({"c": batch[k, ::2], "n": batch[k, 1:4:5], "own": batch[k, :6].view(3, 2).T}) for k in range(4)
        }
        copies = {k: State({name: v.clone() for name, v in row.items()}) for k, row in rows.items()}
        store.stage(rows)
        store.commit()
        batch.zero_()
        assert_holds(store, copies)
        store.read_ahead(rows)
        store.stage(copies)
        store.commit()
        for row in copies.values():  # read ahead, too, is a row's own memory
            row.c.neg_()
        assert all(store.get(k, W0).c.equal(-copies[k].c) for k in copies)
        row = 16 + 4 * (D + 1 + 6)  # bytes; what is read from the file shares the memory of one row
        assert all(v.untyped_storage().nbytes() <= row for row_of in store.rows().values() for v in row_of.values())


def test_without_client_state_nothing_is_kept(tmp_path: Path) -> None:
    store = ClientStore({}, W0, NONE)
    store.open(tmp_path / "clients")
    store.stage({3: State({"w": W0})})
    store.commit()
    assert len(store) == 0 and store.row(3) is None and store.rows() == {} and not (tmp_path / "clients").exists()
    assert store.get(3, W0) == {}


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("memory", [NONE, THREE])
def test_undo_after_a_checkpoint(memory: float, saved: bool, tmp_path: Path) -> None:
    """A round breaks off while its checkpoint is written, or right after that."""
    store = make(tmp_path / "clients", memory)
    rows = play(store, range(6), 0)
    write(store, tmp_path / "x.ckpt")
    new = {k: value(k, 1) for k in (2, 5, 7)}
    store.stage(new)
    assert_holds(store, rows | new)
    if saved:
        write(store, tmp_path / "x.ckpt")
    else:
        store.state_dict()
    store.rollback()
    assert_holds(store, rows)
    for t in (2, 3, 0):
        play(store, (0, 1), t)
    assert_holds(store, rows)
    assert_holds(read(tmp_path / "x.ckpt", tmp_path / "clients", memory), rows | new if saved else rows)


def test_a_slot_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    with pytest.raises(ValueError, match="other shapes"):
        store.stage({0: value(0, 0).replace(c=torch.zeros(D + 1))})


class AnyHistory(RuleBasedStateMachine):
    """Rounds, checkpoints and crashes in any order, against plain dicts."""

    @property
    def memory(self) -> float:
        return NONE

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder, self.last = self.root / "clients", self.root / "last.ckpt"
        self.store = make(self.folder, self.memory)
        self.rows: dict[int, State] = {}
        self.pending: dict[int, State] = {}
        self.saved: dict[int, State] | None = None
        self.kept: dict[Path, dict[int, State]] = {}
        self.number = 0

    def teardown(self) -> None:
        try:
            for path, rows in self.kept.items():
                assert_holds(read(path, self.folder, self.memory), rows)
            self.crash()
            self.look()
        finally:
            self.store.close()
            shutil.rmtree(self.root)

    @rule(clients=st.sets(st.integers(0, 7), min_size=1))
    def scatter(self, clients: set[int]) -> None:
        self.number += 1
        new = {k: value(k, self.number) for k in clients}
        self.store.stage(new)
        self.pending |= new

    @rule()
    def settle(self) -> None:
        self.store.commit()
        self.rows, self.pending = self.rows | self.pending, {}

    @rule()
    def undo(self) -> None:
        self.store.rollback()
        self.pending = {}

    @rule(clients=st.lists(st.integers(0, 9), unique=True))
    def read_ahead(self, clients: list[int]) -> None:
        self.store.read_ahead(clients)

    @rule(client=st.integers(0, 9))
    def gather(self, client: int) -> None:
        row = (self.rows | self.pending).get(client) or State.initial(RULES, W0, W0)
        assert same(self.store.get(client, W0), row)

    @rule(finished=st.sampled_from(["all", "without saved()", "state_dict() alone"]))
    def save(self, finished: str) -> None:
        state = self.store.state_dict()
        if finished != "state_dict() alone":
            save(self.last, {"clients": state})
            self.saved = self.rows | self.pending
        if finished == "all":
            self.store.saved()

    @rule(name=st.sampled_from(["best", "round_1", "round_2"]))
    def keep(self, name: str) -> None:
        path = self.root / f"{name}.ckpt"
        write(self.store, path, pin=path)
        self.kept[path] = self.rows | self.pending

    @rule()
    def keep_for_good(self) -> None:
        self.number += 1
        path = self.root / f"{self.number}.ckpt"
        write(self.store, path, pin=True)
        self.kept[path] = self.rows | self.pending

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.kept)))
        path.unlink()
        del self.kept[path]

    def _resume(self, path: Path, rows: dict[int, State]) -> None:
        lost, self.store = self.store, read(path, self.folder, self.memory)
        lost.close()
        self.rows, self.pending = rows, {}

    @rule()
    def crash(self) -> None:
        if self.saved is not None:
            self._resume(self.last, self.saved)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.kept)))
        self._resume(path, self.kept[path])

    @invariant()
    def rows_are_there(self) -> None:
        assert len(self.store) == len(self.rows | self.pending)

    @rule()
    def look(self) -> None:
        assert_holds(self.store, self.rows | self.pending)


class PartlyInMemory(AnyHistory):
    @property
    def memory(self) -> float:
        return THREE


AnyHistory.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
PartlyInMemory.TestCase.settings = AnyHistory.TestCase.settings
TestAnyHistory, TestPartlyInMemory = AnyHistory.TestCase, PartlyInMemory.TestCase


def cohort(t: int) -> list[int]:
    return [(7 * t + k * (t % 3 + 1)) % 20 for k in range(4)]


def rounds_for_ever(folder: Path, memory: float) -> None:
    """Rounds with a checkpoint after every third, from the last checkpoint on."""
    path, t = folder / "last.ckpt", 0
    store = make(folder / "clients", memory)
    if path.exists():
        store, t = read(path, folder / "clients", memory), torch.load(path)["round"]
    while True:
        play(store, cohort(t), t)
        store.read_ahead(cohort(t + 1))
        t += 1
        if t % 3 == 0:
            write(store, path, round=t)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("memory", [NONE, THREE])
def test_kill_9(memory: float, tmp_path: Path) -> None:
    path, previous = tmp_path / "last.ckpt", 0
    for k in range(6):
        before = path.stat().st_mtime_ns if path.exists() else 0
        child = multiprocessing.get_context("fork").Process(target=rounds_for_ever, args=(tmp_path, memory))
        child.start()
        while child.is_alive() and (not path.exists() or path.stat().st_mtime_ns == before):
            time.sleep(0.001)
        time.sleep(0.007 * k)  # some way into the rounds and checkpoints that follow
        assert child.is_alive() and child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        t = torch.load(path)["round"]
        assert t > previous
        previous = t
        rows = {k: value(k, s) for s in range(t) for k in cohort(s)}
        assert_holds(read(path, tmp_path / "clients", memory), rows)
    # twenty clients, at most twice in checkpoints, and what three rounds write; twice, for what a killed run left
    row = make(tmp_path / "clients").state_dict()["file"]["row_bytes"]
    assert (tmp_path / "clients" / "rows.bin").stat().st_size <= 2 * (2 * 20 + 3 * 4) * row


def test_read_ahead_gives_the_newest_row(tmp_path: Path) -> None:
    store = make(tmp_path)
    rows = play(store, range(6), 0)
    store.read_ahead([1, 2, 3, 4, 9])
    new = {k: value(k, 1) for k in (2, 3, 9)}
    store.stage(new)
    store.read_ahead([3, 4, 5, 9])
    assert_holds(store, rows | new)
    store.rollback()
    assert same(store.get(3, W0), rows[3]) and store.row(9) is None
    store.read_ahead(range(6))
    rows |= play(store, (2, 3, 9), 2)
    write(store, tmp_path / "x.ckpt")
    rows |= play(store, (2, 4), 3)  # to the places of the old rows, which the thread may still be reading
    assert_holds(store, rows)
    store.close()
    assert_holds(store, rows)


def test_read_ahead_reads_before_it_is_asked(tmp_path: Path) -> None:
    store = make(tmp_path)
    rows = play(store, range(4), 0)
    store.read_ahead([0, 2])
    store._thread.submit(int).result()  # type: ignore[union-attr]  # its turn comes when the rows have been read
    (tmp_path / "rows.bin").write_bytes(b"")
    assert same(store.get(0, W0), rows[0]) and same(store.get(2, W0), rows[2])
    for client in (0, 1):
        with pytest.raises(UserError, match=r"rows\.bin: cannot be read \(the file is cut short\); check the disk"):
            store.get(client, W0)


def test_positions_are_used_again(tmp_path: Path) -> None:
    store = make(tmp_path)
    row, sizes = store.state_dict()["file"]["row_bytes"], []
    for t in range(60):
        play(store, [(3 * t + k) % 12 for k in range(4)], t)
        if t % 5 == 4:
            write(store, tmp_path / "last.ckpt")
            sizes.append((tmp_path / "rows.bin").stat().st_size // row)
    assert sizes[-1] == sizes[3] <= 2 * 12 + 4


def test_positions_of_removed_checkpoints_are_used_again(tmp_path: Path) -> None:
    """So are those of a file that is replaced, although a process has died in between."""
    store = make(tmp_path)
    for t in range(60):
        play(store, [(3 * t + k) % 12 for k in range(4)], t)
        for path in (tmp_path / "best.ckpt", tmp_path / f"round_{t}.ckpt"):
            write(store, path, pin=path)
        (tmp_path / f"round_{t - 2}.ckpt").unlink(missing_ok=True)
        write(store, tmp_path / "last.ckpt")
        if t % 20 == 10:
            store.close()
            store = read(tmp_path / "last.ckpt", tmp_path)
    row = store.state_dict()["file"]["row_bytes"]
    assert (tmp_path / "rows.bin").stat().st_size // row <= 12 * (4 + 2)


def test_kept_checkpoints_stay_whole(tmp_path: Path) -> None:
    """They do, whichever checkpoint a run goes on from, although its last one does not know the later ones."""
    store, rows, kept = make(tmp_path), {}, {}
    for t in range(6):
        rows |= play(store, [t, 7], t)
        write(store, tmp_path / "last.ckpt")
        write(store, tmp_path / f"{t}.ckpt", pin=True)
        kept[t] = dict(rows)
    for start in ("last", "1"):
        store = read(tmp_path / f"{start}.ckpt", tmp_path)
        for t in range(10):
            play(store, range(8), 100 + t)
            write(store, tmp_path / "last.ckpt")
        for t in kept:
            assert_holds(read(tmp_path / f"{t}.ckpt", tmp_path), kept[t])


def test_a_kept_checkpoint_does_not_replace_the_last_one(tmp_path: Path) -> None:
    store = make(tmp_path)
    rows = play(store, range(3), 0)
    write(store, tmp_path / "last.ckpt")
    play(store, range(3), 1)
    write(store, tmp_path / "kept.ckpt", pin=True)
    for t in (2, 3):
        play(store, range(3), t)
    assert_holds(read(tmp_path / "last.ckpt", tmp_path), rows)


def test_an_overwritten_checkpoint_is_noticed(tmp_path: Path) -> None:
    """The store does not know the copy."""
    store = make(tmp_path)
    play(store, range(3), 0)
    write(store, tmp_path / "last.ckpt")
    shutil.copy(tmp_path / "last.ckpt", tmp_path / "copy.ckpt")
    for t in (1, 2):
        play(store, range(3), t)
        write(store, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"rows\.bin: changed, row 0 is not that of .* take another"):
        read(tmp_path / "copy.ckpt", tmp_path)


def test_two_runs_in_one_folder_are_noticed(tmp_path: Path) -> None:
    store = make(tmp_path)
    play(store, range(3), 0)
    write(store, tmp_path / "last.ckpt")
    second = read(tmp_path / "last.ckpt", tmp_path)
    play(store, range(3), 1)
    play(second, range(3), 1)
    with pytest.raises(UserError, match="changed, row 3 is not that of the run"):
        store.rows()


def test_a_restart_checks_every_row(tmp_path: Path) -> None:
    """It does also in a file with gaps, and in one that is read in several parts."""
    m, d = 300, 2000
    w = torch.zeros(d)
    store = ClientStore({"c": "zeros"}, w, NONE)
    store.open(tmp_path)
    for t, clients in enumerate((range(m), range(20, 29), range(130, 133))):
        store.stage({k: State({"c": torch.full((d,), float(k + t))}) for k in clients})
        store.commit()
        state = store.state_dict()
        store.saved()
    store.close()
    size, used = state["file"]["row_bytes"], sorted(state["file"]["positions"].tolist())
    gaps, chunk = [a for a, b in pairwise(used) if b != a + 1], files.CHUNK // size
    assert len(gaps) > 1 and m > 2 * chunk
    path = tmp_path / "rows.bin"
    content = path.read_bytes()
    foreign = content[used[1] * size :][:size]
    with path.open("r+b", buffering=0) as file:
        for row in {used[0], *gaps, used[chunk - 1], used[chunk], used[m // 2], used[-1]}:
            original = content[row * size :][:size]
            for harm, message in ((original[:-1] + bytes([original[-1] ^ 1]), "damaged"), (foreign, "changed")):
                os.pwrite(file.fileno(), harm, row * size)
                with pytest.raises(UserError, match=f"{message}, row {row} "):
                    store.load_state_dict(state, tmp_path)
            os.pwrite(file.fileno(), original, row * size)
    store.load_state_dict(state, tmp_path)
    assert all(bool((store.get(k, w).c == k + (20 <= k < 29) + 2 * (130 <= k < 133)).all()) for k in range(m))
    store.close()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "missing or cut short, 0 bytes of at least 192; put"),
        (lambda path: os.truncate(path, 70), "missing or cut short, 70 bytes of at least 192; put"),
    ],
)
def test_file_that_does_not_fit_the_checkpoint(harm: Any, message: str, tmp_path: Path) -> None:
    store = make(tmp_path)
    play(store, range(3), 0)
    write(store, tmp_path / "x.ckpt")
    store.close()
    harm(tmp_path / "rows.bin")
    with pytest.raises(UserError, match=rf"rows\.bin: {message}") as error:
        read(tmp_path / "x.ckpt", tmp_path)
    assert "\n" not in str(error.value)


def test_rows_of_another_size(tmp_path: Path) -> None:
    store = make(tmp_path)
    play(store, range(3), 0)
    write(store, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="has rows of 64 bytes, this run 112; put"):
        read(tmp_path / "x.ckpt", tmp_path, dtype=torch.float64)


def test_full_disk(tmp_path: Path) -> None:
    """The round is taken back, the checkpoint is whole, and with room again the run goes on."""
    store = make(tmp_path)
    rows = play(store, range(10), 0)
    write(store, tmp_path / "x.ckpt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "rows.bin").stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(UserError, match=r"rows\.bin: cannot be written \(File too large\); check the disk"):
            store.stage({k: value(k, 1) for k in range(10)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.rollback()
    assert_holds(store, rows)
    assert_holds(read(tmp_path / "x.ckpt", tmp_path), rows)
    rows |= play(store, range(3, 8), 2)
    assert_holds(store, rows)
