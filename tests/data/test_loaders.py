"""The data module under a plain ``lightning.Trainer``: its DataLoaders, resumed runs, and two processes."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from fl_lightning import Arrays, Augment
from fl_lightning.core.rng import generator
from tests.runs import process

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def numbered(**kwargs: Any) -> Arrays:
    """Returns samples that hold their own number: 50 of two clients, 10 to validate, 9 to test."""
    x, y = np.arange(60.0, dtype=np.float32)[:, None], np.arange(60) % 3
    half = [(x[:30], y[:30]), (x[30:], y[30:])]
    test = (100 + np.arange(9.0, dtype=np.float32)[:, None], np.arange(9) % 3)
    settings = {"val_fraction": 1 / 6, "batch_size": 8, "eval_batch_size": 4, **kwargs}
    return Arrays(client_arrays=half, test=test, **settings)


class Recording(L.LightningModule):
    """Remembers the numbers of the samples of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 3)
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": []}

    def _loss(self, split: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        self.seen[split].append([int(v) for v in x[:, 0]])
        return nn.functional.cross_entropy(self.net(x / 60), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss("test", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_they_are_torchs_data_loaders() -> None:
    data = numbered()
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert all(isinstance(loader, DataLoader) for loader in loaders)
    assert [len(loader) for loader in loaders] == [7, 3, 3]
    for loader in loaders[1:]:
        assert isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
        assert torch.equal(loader.dataset[1][0], list(loader)[1][0])
    before = torch.get_rng_state()
    batches = list(loaders[0])
    assert torch.equal(torch.get_rng_state(), before)  # a DataLoader of torch's draws a seed in each pass
    assert torch.equal(loaders[0].dataset[6][0], batches[6][0])


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}])
def test_shares_of_the_batches_are_the_batches(options: Any) -> None:
    """They are also with augmentation: what is drawn for a minibatch stays with it."""
    x, y = np.arange(40 * 48, dtype=np.float32).reshape(40, 3, 4, 4), np.arange(40) % 3
    augment = Augment(1, mixup=1.0, granularity="batch")
    settings = {"batch_size": 6, "augment": augment, **options}
    data = Arrays(client_arrays=[(x, y)], test=(x[:3] + 1, y[:3]), **settings)
    data.setup()
    full = data.train_dataloader()
    for _ in range(2):
        want = list(full)
    shares: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(2):
        sampler: Any = DistributedSampler(full.dataset, 2, rank, shuffle=True, seed=3)
        sampler.set_epoch(1)
        loader = type(full)(full.dataset, sampler=sampler)
        shares |= zip(list(sampler), loader, strict=True)
    assert shares.keys() == set(range(len(want)))
    for number, batch in shares.items():
        assert all(torch.equal(a, b) for a, b in zip(batch, want[number], strict=True))


def test_a_resumed_run_sees_the_same_batches(tmp_path: Path) -> None:
    uninterrupted, first, second = Recording(), Recording(), Recording()
    L.Trainer(max_epochs=4, enable_checkpointing=False, **QUIET).fit(uninterrupted, datamodule=numbered())
    half = L.Trainer(max_epochs=2, enable_checkpointing=False, **QUIET)
    half.fit(first, datamodule=numbered())
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = L.Trainer(max_epochs=4, enable_checkpointing=False, **QUIET)
    resumed.fit(second, datamodule=numbered(), ckpt_path=tmp_path / "half.ckpt")
    assert first.seen["train"] + second.seen["train"] == uninterrupted.seen["train"]
    epochs = [[*chain(*uninterrupted.seen["train"][7 * t : 7 * t + 7])] for t in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len({tuple(e) for e in epochs}) == 4
    data = numbered()
    data.setup()
    union = data.clients.indices.sort().values
    assert epochs[3] == union[torch.randperm(50, generator=generator(0, "centralized", 3))].tolist()
    assert sorted(chain(*uninterrupted.seen["val"][-3:])) == data.val_indices.tolist()


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import lightning as L
import torch
from tests.data.test_loaders import QUIET, Recording, numbered

torch.manual_seed(0)
model, data = Recording(), numbered()
settings = dict(enable_checkpointing=False, num_sanity_val_steps=0, **QUIET)
trainer = L.Trainer(max_epochs=2, devices=2, strategy="ddp", **settings)
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data, verbose=False)
torch.save((model.seen, model.net.state_dict()), f"rank{{trainer.global_rank}}.pt")
"""


@pytest.mark.long
def test_two_processes_train_on_shares(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with process(sys.executable, str(tmp_path / "script.py"), cwd=tmp_path) as child:
        _, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    (a, net_a), (b, net_b) = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(net_a[name], net_b[name]) for name in net_a)
    data = numbered()
    data.setup()
    for epoch in range(2):
        batches = {tuple(batch) for seen in (a, b) for batch in seen["train"][4 * epoch : 4 * epoch + 4]}
        union = data.clients.indices.sort().values
        order = union[torch.randperm(50, generator=generator(0, "centralized", epoch))]
        assert batches == {tuple(part.tolist()) for part in order.split(8)}  # of 8 places one repeats a batch
    for split, want, count in (("val", data.val_indices.tolist(), 4), ("test", list(range(100, 109)), 2)):
        assert {number for seen in (a, b) for batch in seen[split] for number in batch} == set(want)
        assert len(a[split]) == len(b[split]) == count  # half of three batches, rounded up, in each evaluation
