"""Streamed samples: the same bits as those in memory, few of them at a time, and no thread left behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fl_lightning import (
    Arrays,
    Augment,
    Corrupt,
    Faults,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    ImageFolder,
    Stragglers,
)
from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data import FederatedDataModule, Samples, streaming

RNG = numpy_generator(0, "test streaming")
X = RNG.integers(0, 256, (48, 9, 8, 3), dtype=np.uint8)
Y = RNG.permutation(np.repeat(np.arange(3), 16))
SETTINGS = {"num_clients": 4, "batch_size": 5, "augment": Augment(1), "mean": [0.4], "std": [0.2], "eval_batch_size": 7}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Writes PNG files of two sizes in three classes."""
    root = tmp_path_factory.mktemp("pictures")
    for part, n in (("train", 48), ("test", 12)):
        for i in range(n):
            folder = root / part / f"class{Y[i]}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(X[i] if i % 2 else X[i, :6, :7]).save(folder / f"{i:02}.png")
    return root


def make(kind, pictures, folder, streamed):
    """Returns the same data, streamed or not."""
    if kind == "files":
        return ImageFolder(str(pictures), 8, stream=streamed, workers=2, val_fraction=0.25, **SETTINGS)
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:12], "y_test": Y[:12]}
    if kind == "memory map":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return Arrays(str(folder), stream=streamed, workers=2, val_fraction=0.25, **SETTINGS)
    np.savez(folder / "data.npz", **arrays)
    return Arrays(str(folder / "data.npz"), stream=streamed, val_fraction=0.25, **SETTINGS)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def fit(data, tmp_path, engine="sequential", **kwargs):
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=3,
        local_epochs=2,
        engine=engine,
        accelerator="cpu",
        enable_progress_bar=False,
        default_root_dir=str(tmp_path / "runs"),
        **kwargs,
    )
    return trainer.fit(FedAvg(net=net()), data)


def readers():
    """Returns threads that read samples."""
    return {t for t in threading.enumerate() if t.name.startswith("samples")}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("ahead", [streaming.AHEAD, 5 * 9 * 8 * 3])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("kind", ["files", "memory map", "host memory"])
def test_streamed_runs_are_the_same_to_the_bit(kind, engine, ahead, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "AHEAD", ahead)
    streamed, resident = (make(kind, pictures, tmp_path, s) for s in (True, False))
    monitor = FlatnessMonitor if engine == "sequential" else None  # it evaluates clients in between
    runs = [fit(d, tmp_path, engine, callbacks=[monitor()] if monitor else None) for d in (streamed, resident)]
    assert torch.equal(runs[0].global_model, runs[1].global_model)
    times = {name for name in runs[0].metrics if "time/" in name}
    assert all(runs[0].metrics[n] == runs[1].metrics[n] for n in runs[0].metrics if n not in times)
    assert streamed.fingerprint() == resident.fingerprint()
    assert isinstance(streamed.x_train, torch.Tensor) == (kind == "host memory")


def test_clients_that_fail_are_the_same_with_streamed_samples(pictures, tmp_path):
    faults = Faults(drop_before=0.3, drop_after=0.3, stragglers=Stragglers(deadline=3), corrupt=Corrupt(0.25))
    runs = [
        fit(make("memory map", pictures, tmp_path, s), tmp_path, faults=faults, on_divergence="continue", threads=1)
        for s in (True, False)
    ]
    assert torch.equal(runs[0].global_model, runs[1].global_model)


@pytest.mark.parametrize("kind", ["files", "memory map", "host memory"])
def test_all_batches_are_the_same_to_the_bit(kind, pictures, tmp_path):
    streamed, resident = (make(kind, pictures, tmp_path, s) for s in (True, False))
    passes = []
    for data in (streamed, resident):
        data.setup()
        batches = [*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()]
        batches += [*data.eval_batches(data.clients[1]), *data.eval_batches([3, 1, 3]), *data.eval_batches("train")]
        passes.append([*batches, *data.client_batches(0, 3, None, generator(0, "batches"), torch.float64)])
    for (x, y), (want_x, want_y) in zip(*passes, strict=True):
        assert torch.equal(x, want_x) and torch.equal(y, want_y)
        assert x.stride() == want_x.stride()
    assert torch.equal(streamed.sample_indices(9), resident.sample_indices(9))
    assert list(streamed.eval_batches([])) == []


class Counted(Samples):
    """Counts how often a sample is read; the gate, when closed, holds up the threads."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads, self.gate = [], threading.Event()
        self.gate.set()

    def __getitem__(self, index):
        self.reads.append(index)
        self.gate.wait()
        return self.array[index]


class CountedData(FederatedDataModule):
    def load(self):
        self.train, self.test = Counted(X), Counted(X[:12])
        return self.train, Y, self.test, Y[:12]


def counted(ahead, monkeypatch, **kwargs):
    monkeypatch.setattr(streaming, "AHEAD", ahead * X[0].nbytes)
    data = CountedData(**{"num_clients": 2, "batch_size": 4, "stream": True, "workers": 2, **kwargs})
    data.setup()
    assert data.train.reads == data.test.reads == []  # labels and partition need no pixels
    return data


def settle(data, n):
    """Waits until n samples have been asked for; no further ones come."""
    deadline = time.monotonic() + 300
    while len(data.train.reads) < n and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return len(data.train.reads)


@pytest.mark.parametrize("ahead", [1, 6, 100])
def test_memory_is_bounded(ahead, monkeypatch):
    monkeypatch.setattr("fl_lightning.data.minibatches.CHUNK", 4 * X[0].size * 4)  # one step
    data = counted(ahead, monkeypatch)
    steps = iter(data.client_batches(0, 1, None, generator(0, "batches"), torch.float32))
    for used in range(4, 25, 4):
        next(steps)
        assert settle(data, min(24, used + ahead)) == min(24, used + ahead)
    assert list(steps) == []
    assert len(data.train.reads) == 24  # each once


def test_epochs_read_once_what_fits(monkeypatch):
    data = counted(100, monkeypatch)
    list(data.client_batches(0, 5, None, generator(0, "batches"), torch.float32))
    assert sorted(data.train.reads) == sorted(data.clients[0].tolist())


def test_next_clients_are_read_meanwhile_and_kept(monkeypatch):
    data = counted(100, monkeypatch)
    first, second = (data.client_batches(k, 1, None, generator(0, "batches", k), torch.float32) for k in (0, 1))
    data.read_ahead([first.indices, second.indices])
    assert settle(data, 48) == 48  # both, before anything has been asked for
    list(first)
    data.read_ahead([second.indices, first.indices])
    list(second)
    assert settle(data, 72) == 72  # the second was kept, the first was read again
    data.read_ahead(())


@pytest.mark.parametrize("how", ["broken off", "evaluation", "stopped"])
def test_what_is_broken_off_reads_no_more(how, monkeypatch):
    earlier = readers()
    data = counted(40, monkeypatch)
    if how == "evaluation":
        data.eval_batch_size = 4
        batches = data.eval_batches(data.clients[0])
    else:
        batches = iter(data.client_batches(0, 1, None, generator(0, "batches"), torch.float32))
    if how == "stopped":
        data.train.gate.clear()
        data.read_ahead([data.client_batches(0, 1, None, generator(0, "batches"), torch.float32).indices])
        assert settle(data, 2) == 2  # two threads, each with a sample
        data.read_ahead(())
        data.train.gate.set()
        assert settle(data, 2) == 2
    else:
        next(batches)
        batches.close()
    del data, batches
    deadline = time.monotonic() + 300
    while readers() - earlier and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers() - earlier


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_broken_image_is_told_in_one_line(engine, pictures, tmp_path):
    data = ImageFolder(str(pictures), 8, stream=True, workers=2, **SETTINGS)
    data.setup()
    path = sorted(pictures.glob("train/*/*.png"))[int(data.clients[0][0])]
    content = path.read_bytes()
    path.write_bytes(b"rubbish")
    try:
        with pytest.raises(UserError, match=rf"^data.root = '{path}' is not a readable image [^\n]*; replace it$"):
            fit(data, tmp_path, engine, seed=1)
    finally:
        path.write_bytes(content)
    fit(ImageFolder(str(pictures), 8, stream=True, **SETTINGS), tmp_path, engine)  # nothing is left in the way


def test_faulty_values_of_a_memory_map_are_told_when_they_are_read(tmp_path):
    x = RNG.normal(size=(48, 4)).astype(np.float32)
    x[17, 2] = np.nan
    for name, array in {"x_train": x, "y_train": Y, "x_test": x[:9], "y_test": Y[:9]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    data = Arrays(str(tmp_path), stream=True, num_clients=2, batch_size=4)
    data.setup()
    assert len(list(data.eval_batches("test"))) == 1
    with pytest.raises(UserError, match=r"^x_train: row 17 holds NaN or infinity; clean or drop such rows$"):
        list(data.eval_batches("train"))


def test_faulty_folders_of_arrays(tmp_path):
    for name in ("x_train", "y_train", "x_test"):
        np.save(tmp_path / f"{name}.npy", Y)
    with pytest.raises(UserError, match=r"lacks y_test; it needs x_train.npy, y_train.npy, .*, y_test.npy$"):
        Arrays(str(tmp_path), stream=True).setup()
    (tmp_path / "y_test.npy").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"has no readable .npy files \([^\n]*\); write them again with np.save"):
        Arrays(str(tmp_path)).setup()
    with pytest.raises(UserError, match=r"data.workers = 0: give a whole number"):
        Arrays(str(tmp_path), workers=0)
