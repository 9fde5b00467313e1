"""A local objective is an ordinary LightningModule: real runs of lightning.Trainer."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from fl_lightning import (
    ASAM,
    SGD,
    Arrays,
    Digits,
    DigitsMLP,
    FedAvg,
    FedDyn,
    FederatedTrainer,
    FedSAM,
    LocalObjective,
    PixelCrossEntropy,
    STildeAM,
    UserError,
)
from fl_lightning.data.segmentation import MeanIoU


def trainer(folder: Path, epochs: int = 1, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "max_epochs": epochs, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder, **options,
        }
    )  # fmt: skip


class Lines(L.LightningDataModule):
    """Two classes in the plane, 96 samples; 32 of each split."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        x = torch.randn(96, 2, generator=torch.Generator().manual_seed(0))
        self.x, self.y = x, (x.sum(1) > 0).long()

    def loader(self, part: int) -> DataLoader[Any]:
        rows = slice(32 * part, 32 * part + 32)
        return DataLoader(TensorDataset(self.x[rows], self.y[rows]), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(0)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(2)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


# Callbacks, checkpoints


def test_checkpoint_and_early_stopping(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/acc", mode="max")
    stop = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    objective, data = FedSAM(net=DigitsMLP(8), rho=0.2), Digits(batch_size=32, val_fraction=0.1)
    fit = trainer(tmp_path, epochs=9, callbacks=[best, stop], enable_checkpointing=True)
    fit.fit(objective, data)
    assert fit.current_epoch == 2 and {"train/loss", "val/loss", "val/acc"} <= fit.callback_metrics.keys()
    loaded = FedSAM.load_from_checkpoint(best.best_model_path, net=DigitsMLP(8))
    assert loaded.hparams == {"rho": 0.2} and loaded.ascent is not None and vars(loaded.ascent)["rho"] == 0.2
    (scores,) = fit.validate(loaded, data, verbose=False)
    assert scores["val/acc"] == pytest.approx(float(best.best_model_score or 0))


def test_lightning_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Momentum and S~AM's last gradient are in the optimizer's state."""
    data, options = Lines(), {"optimizer": SGD(momentum=0.9)}
    for algorithm in (FedAvg, STildeAM):
        uninterrupted, half = algorithm(net=linear(), **options), algorithm(net=linear(), **options)
        trainer(tmp_path, 4).fit(uninterrupted, data)
        first = trainer(tmp_path, 2)
        first.fit(half, data)
        first.save_checkpoint(tmp_path / "half.ckpt")
        resumed = algorithm(net=nn.Linear(2, 2), **options)
        trainer(tmp_path, 4).fit(resumed, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
        assert torch.equal(uninterrupted.net.weight, resumed.net.weight)


class Tuned(FedDyn):
    """Passes an argument of its parent on, and has one of its own."""

    def __init__(self, net: nn.Module, gain: float = 1.0, note: Any = None, **kwargs: Any) -> None:
        super().__init__(net, prox="unsquared", **kwargs)
        self.gain = gain


def test_hyperparameters_are_those_of_the_outermost_constructor() -> None:
    class Owner(L.LightningModule):
        def __init__(self, rho: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = Tuned(linear(), 2.0, note=object(), beta=5.0, optimizer=SGD())

    assert Tuned(linear(), gain=2.0, beta=5.0).hparams == {"gain": 2.0, "note": None, "beta": 5.0}
    owner = Owner(0.1)
    assert owner.hparams == {"rho": 0.1} and owner.model.hparams == {"gain": 2.0, "beta": 5.0}


def test_any_checkpoint_with_the_two_keys_loads(tmp_path: Path) -> None:
    """Lightning reads a checkpoint of fl_lightning by its version, hparams and a state_dict."""
    saved = Tuned(linear(), gain=2.0, beta=5.0)
    content = {
        "pytorch-lightning_version": L.__version__,
        saved.CHECKPOINT_HYPER_PARAMS_KEY: dict(saved.hparams),
        "state_dict": saved.state_dict(),
    }
    torch.save(content, tmp_path / "any.ckpt")
    loaded = Tuned.load_from_checkpoint(tmp_path / "any.ckpt", net=nn.Linear(2, 2), weights_only=True)
    assert (loaded.gain, loaded.beta, loaded.prox) == (2.0, 5.0, "unsquared")
    assert torch.equal(loaded.net.weight, saved.net.weight)


# Losses and metrics


@pytest.mark.parametrize("ascent", [None, ASAM(0.5)])
def test_train_loss_is_at_the_weights(tmp_path: Path, ascent: Any) -> None:
    """It is the mean over the epoch of the losses before each step; SAM's second pass does not count."""
    objective, seen = FedAvg(net=linear(), optimizer=SGD(0.5), ascent=ascent), []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                seen.append(float(nn.functional.cross_entropy(pl_module.net(batch[0]), batch[1])))

    fit = trainer(tmp_path, callbacks=[Watch()])
    fit.fit(objective, Lines())
    assert float(fit.callback_metrics["train/loss"]) == pytest.approx(sum(seen) / 4, rel=1e-6)


def test_metric_of_an_epoch_is_no_mean_over_batches(tmp_path: Path) -> None:
    """The data module's metric object is updated by batch and computed once."""

    class Largest(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(float("-inf")), "max")

        def update(self, logits: Tensor, target: Tensor) -> None:
            self.value = torch.maximum(self.value, logits.max())

        def compute(self) -> Tensor:
            return self.value

    class Data(Lines):
        def metric(self) -> tuple[str, Metric]:
            return "largest", Largest()

    objective, data = FedAvg(net=linear()), Data()
    fit = trainer(tmp_path)
    fit.fit(objective, data)
    (scores,) = fit.test(objective, data, verbose=False)
    assert scores["test/largest"] == pytest.approx(float(objective.net(data.x[64:]).detach().max()))
    (scores,) = fit.test(objective, Lines(), verbose=False)  # without a metric of the data: accuracy
    assert scores["test/acc"] == pytest.approx(
        float((objective.net(data.x[64:]).argmax(1) == data.y[64:]).float().mean())
    )


def test_segmentation_logs_its_iou(tmp_path: Path) -> None:
    """Ignored pixels do not count, neither in the data's metric nor in accuracy."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8, generator=draw), torch.randint(0, 4, (4, 8, 8), generator=draw)
    y[:, :4] = 255

    class Scenes(L.LightningDataModule):
        def test_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(x, y), batch_size=3)

    class WithMetric(Scenes):
        def metric(self) -> tuple[str, Metric]:
            return "miou", MeanIoU(4)

    objective = FedAvg(net=nn.Conv2d(3, 4, 1), loss=PixelCrossEntropy())
    iou = MeanIoU(4)
    iou.update(objective.net(x), y)
    (scores,) = trainer(tmp_path).test(objective, WithMetric(), verbose=False)
    assert scores["test/miou"] == pytest.approx(float(iou.compute()))
    (scores,) = trainer(tmp_path).test(objective, Scenes(), verbose=False)
    predictions = objective.net(x).argmax(1)
    assert scores["test/acc"] == pytest.approx(float((predictions == y)[:, 4:].float().mean()))


def test_the_callers_loss_does_not_change() -> None:
    for loss in (nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), nn.CrossEntropyLoss(label_smoothing=0.1)):
        before = deepcopy(vars(loss))
        objective = FedAvg(net=linear(), loss=loss).double()
        assert loss.reduction == before["reduction"] == "mean" and objective.loss.reduction == "none"
        assert getattr(loss, "pos_weight", None) is None or loss.pos_weight.dtype == torch.float32
    unreduced = nn.CrossEntropyLoss(reduction="none")
    assert FedAvg(net=linear(), loss=unreduced).loss is unreduced


def test_engines_log_nothing_after_lightning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """An objective that lightning.Trainer has trained is trained by a federation, silently."""
    x, y = Lines().x.numpy(), Lines().y.numpy()
    objective = FedAvg(net=linear())
    trainer(tmp_path).fit(objective, Lines())
    FederatedTrainer(
        max_rounds=1, clients_per_round=1, accelerator="cpu", engine="sequential", enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    ).fit(objective, Arrays(client_arrays=[(x[:64], y[:64])], test=(x[64:], y[64:]), batch_size=8))  # fmt: skip
    assert not [w for w in recwarn if "self.log" in str(w.message)]


# Accumulated gradients, several processes


def test_accumulated_gradients(tmp_path: Path) -> None:
    """Four batches of 8, two a step, are two batches of 16; train/loss stays the mean of the losses."""
    one, other = (FedAvg(net=linear(), optimizer=SGD(0.3, momentum=0.9)) for _ in range(2))
    fit = trainer(tmp_path, 3, accumulate_grad_batches=2)
    fit.fit(one, Lines(8))
    reference = trainer(tmp_path, 3)
    reference.fit(other, Lines(16))
    torch.testing.assert_close(one.net.weight, other.net.weight, rtol=0, atol=1e-6)
    assert float(fit.callback_metrics["train/loss"]) == pytest.approx(
        float(reference.callback_metrics["train/loss"]), rel=1e-5
    )


@pytest.mark.parametrize("algorithm", [FedSAM, STildeAM])
def test_accumulation_is_refused_where_it_would_be_wrong(tmp_path: Path, algorithm: Any) -> None:
    with pytest.raises(UserError, match=r"accumulate_grad_batches = 2: .* set it to 1"):
        trainer(tmp_path, 2, accumulate_grad_batches=2).fit(algorithm(net=linear()), Lines())


class Other(LocalObjective):
    """Needs the gradient of another loss."""

    def local_step(self, w: Any, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return grad(w) + grad(w, self.losses), client


def test_gradients_of_other_losses_need_an_engine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^grad\(v, losses\): .* train with fl_lightning\.FederatedTrainer$"):
        trainer(tmp_path, 1).fit(Other(net=linear()), Lines())


DDP = """
import json, sys
from pathlib import Path
from fl_lightning import FedSAM, SGD
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tests.algorithms.test_lightning import Lines, linear, trainer

folder, devices = Path(sys.argv[1]), int(sys.argv[2])
callbacks = [ModelCheckpoint(folder, monitor="val/loss"), EarlyStopping("train/loss")]
objective = FedSAM(net=linear(), rho=0.1, optimizer=SGD(0.3))
fit = trainer(folder, 5, devices=devices, strategy="ddp" if devices > 1 else "auto", callbacks=callbacks,
              enable_checkpointing=True)
fit.fit(objective, Lines(32 // devices))
if fit.is_global_zero:
    values = {name: float(v) for name, v in fit.callback_metrics.items()}
    (folder / "result.json").write_text(json.dumps({**values, "w": objective.net.weight.tolist()}))
"""


@pytest.mark.long
def test_two_ddp_processes_train_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM's two passes on 2 x 16 samples are those on 32: the same weights, losses and metrics."""
    root, results = Path(__file__).parents[2], []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    (tmp_path / "run.py").write_text(DDP)
    for devices in (1, 2):
        (tmp_path / str(devices)).mkdir()
        command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / str(devices)), str(devices)]
        if devices == 1:
            monkeypatch.setattr(sys, "argv", command[1:])
            runpy.run_path(command[1], run_name="__main__")
        else:
            subprocess.run(command, check=True, timeout=300, cwd=root, env=env)
        results.append(json.loads((tmp_path / str(devices) / "result.json").read_text()))
    assert results[0].keys() == results[1].keys() >= {"train/loss", "val/loss", "val/acc"}
    for name, value in results[0].items():
        torch.testing.assert_close(torch.tensor(results[1][name]), torch.tensor(value), rtol=1e-5, atol=1e-6, msg=name)
