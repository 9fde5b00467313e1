"""A stateless local objective under a plain lightning.Trainer: the papers' centralized baselines."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from fl_lightning import (
    ASAM,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    Arrays,
    Digits,
    DigitsMLP,
    FedAvg,
    FedAvgM,
    FederatedTrainer,
    FedGloSS,
    FedNTD,
    FedProx,
    FedSAM,
    STildeAM,
    Trajectory,
    UserError,
)
from fl_lightning.commands.main import main
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.runtime.environment import LOGGERS
from tests.problem import Golden
from tests.runs import run


def trainer(folder: Path, epochs: int, **options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


class Projected(FedAvg):
    """Has the other two hooks of a local step."""

    def step_lr(self, client: Any, ctx: Any) -> float:
        return float(0.5 * ctx.lr)

    def after_step(self, w: torch.Tensor, client: Any, received: Any, ctx: Any) -> torch.Tensor:
        return w.clamp(-0.1, 0.1)


@pytest.mark.parametrize(
    ("kind", "ascent"),
    [(FedAvg, None), (FedAvg, SAM(0.1)), (FedAvg, ASAM(0.5)), (Projected, None)],
    ids=["SGD", "SAM", "ASAM", "own hooks"],
)
def test_is_the_federation_of_one_client(golden: Golden, tmp_path: Path, kind: Any, ascent: Any) -> None:
    """Full batches: E epochs of lightning.Trainer are E local steps of the only client, momentum and decay included."""
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
    x, y = golden.arrays[0]
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=None)

    central = kind(net=golden.net(), optimizer=optimizer, ascent=ascent)
    trainer(tmp_path, epochs=6).fit(central, datamodule=data)

    record = Trajectory()
    federated = FederatedTrainer(
        max_rounds=1, clients_per_round=1, local_steps=6, accelerator="cpu", callbacks=[record],
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    federated.fit(kind(net=golden.net(), optimizer=optimizer, ascent=ascent), data)

    w = central.flat.vector(central.net)
    torch.testing.assert_close(w, record.server[-1].w, rtol=0, atol=1e-6)
    assert (w - record.server[0].w).abs().max() > 1e-2


def test_sgd_is_torch_sgd(golden: Golden, tmp_path: Path) -> None:
    """So it is with learning-rate decay by epoch."""
    x, y = (torch.from_numpy(a) for a in golden.arrays[1])
    net = golden.net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for epoch in range(4):
        sgd.param_groups[0]["lr"] = 0.1 * 0.5**epoch
        sgd.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        sgd.step()

    ours = FedAvg(net=golden.net(), optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-2, lr_decay=0.5))
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=None)
    trainer(tmp_path, epochs=4).fit(ours, datamodule=data)
    for a, b in zip(ours.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_sam_evaluates_the_closure_twice(tmp_path: Path) -> None:
    batches = []

    class Counting(FedSAM):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            batches.append(batch[0])
            return super().training_step(batch, batch_idx)

    data = Digits(batch_size=32)
    fit = trainer(tmp_path, epochs=1, limit_train_batches=3)
    fit.fit(Counting(net=DigitsMLP()), datamodule=data)
    assert len(batches) == 6 and all(torch.equal(batches[2 * i], batches[2 * i + 1]) for i in range(3))


def test_learns_digits_and_logs(tmp_path: Path) -> None:
    objective, data = FedSAM(net=DigitsMLP(), optimizer=SGD(lr=0.3)), Digits(batch_size=32, val_fraction=0.2)
    fit = trainer(tmp_path, epochs=5)
    fit.fit(objective, datamodule=data)
    assert {"train/loss", "val/loss", "val/acc"} <= fit.callback_metrics.keys()
    (metrics,) = fit.test(objective, datamodule=data, verbose=False)
    assert metrics["test/acc"] > 0.9


@pytest.mark.parametrize(
    ("objective", "state"),
    [
        (SCAFFOLD(net=DigitsMLP()), "c"),
        (FedGloSS(net=DigitsMLP()), "lam"),
        (FedAvgM(net=DigitsMLP()), "server_v"),
        (FedAvg(net=DigitsMLP(), averaging=SWA()), "swa_w"),
        (FedNTD(net=DigitsMLP()), "the received model"),
        (FedProx(net=DigitsMLP()), "the received model"),
    ],
)
def test_federated_state_refuses_lightning_trainer(tmp_path: Path, objective: Any, state: str) -> None:
    with pytest.raises(
        UserError, match=rf"{type(objective).__name__} keeps federated state .*{state}.*FederatedTrainer"
    ):
        trainer(tmp_path, epochs=1).fit(objective, datamodule=Digits())


def test_stildeam_against_its_definition(golden: Golden, tmp_path: Path) -> None:
    """e_i = rho g_(i-1) / ||g_(i-1)||, g_i = grad(w_i + e_i): one pass a step, across epochs."""
    x, y = (torch.from_numpy(a) for a in golden.arrays[0])
    net, rho, lr = golden.net(), 0.1, 0.1
    params = list(net.parameters())
    w, g = torch.nn.utils.parameters_to_vector(params).detach(), torch.zeros(1220)
    for _ in range(5):
        e = rho * g / (g.norm() + 1e-12)
        torch.nn.utils.vector_to_parameters(w + e, params)
        g = torch.cat([v.reshape(-1) for v in torch.autograd.grad(nn.functional.cross_entropy(net(x), y), params)])
        w = w - lr * g
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=None)
    ours = STildeAM(net=golden.net(), rho=rho, optimizer=SGD(lr=lr))
    trainer(tmp_path, epochs=5).fit(ours, datamodule=data)
    torch.testing.assert_close(ours.flat.vector(ours.net), w, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(slow=2, start=1)
@pytest.mark.parametrize("name", ["FedAvg", "FedSAM", "FedASAM", "STildeAM"])
def test_command_line_of_centralized(tmp_path: Path, name: str, capsys: Any) -> None:
    """Data, names of metrics and callbacks are the same; SWA's average is what is evaluated."""
    root = f"--trainer.default_root_dir={tmp_path}"
    common = ["--data=Digits", "--data.batch_size=32", "--trainer.max_rounds=6", root]
    monitor = ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.every_n_rounds=3"]
    swa = ["--model.averaging=SWA", "--model.averaging.start=3"]
    model = [f"--model={name}", "--model.net=DigitsMLP", "--model.optimizer=SGD", "--model.optimizer.lr=0.3"]
    main(["centralized", *model, *swa, *common, *monitor])
    (folder,) = tmp_path.glob("*/version_0")
    metrics = read_metrics(folder / "metrics.csv")
    assert [t for t, _ in metrics["server/test/acc"]] == [1, 2, 3, 4, 5, 6]
    assert metrics["server/test/acc"][-1][1] > 0.9
    assert [t for t, _ in metrics["flatness/lambda_max"]] == [3, 6]
    assert "flatness/discrepancy" not in metrics
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert not torch.equal(state["server"]["swa_w"], state["server"]["w"])
    assert "at round" in capsys.readouterr().out


def test_command_line_refuses_federated_state(tmp_path: Path) -> None:
    args = ["--model=SCAFFOLD", "--model.net=DigitsMLP", "--data=Digits", f"--trainer.default_root_dir={tmp_path}"]
    with pytest.raises(SystemExit, match=r"error: SCAFFOLD keeps federated state \(c\)"):
        main(["centralized", *args])


def test_warm_up_counts_epochs(golden: Golden, tmp_path: Path) -> None:
    radii = []

    class Watched(SAM):
        def radius(self, t: int) -> float:
            radii.append(super().radius(t))
            return radii[-1]

    data = Arrays(client_arrays=[golden.arrays[0]], test=golden.test, batch_size=None)
    objective = FedAvg(net=golden.net(), ascent=Watched(0.4, warmup=4, rho0=0.0))
    trainer(tmp_path, epochs=6).fit(objective, datamodule=data)
    assert radii == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_nothing_of_lightnings_is_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tip, warning of a validation step without data or advice on SLURM is shown; afterwards all is as before."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.touch(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)
    before = [logging.getLogger(name).level for name in LOGGERS]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        folder = run("centralized", "--trainer.max_rounds=1", root=tmp_path / "runs", model="FedSAM")
    assert capsys.readouterr() == (f"results: {folder}\n", "")
    assert not [record for record in caplog.records if record.name.startswith("lightning")]
    seen = [warning for warning in shown if not issubclass(warning.category, DeprecationWarning)]  # Python hides those
    assert not [str(warning.message) for warning in seen if "lightning/" in warning.filename]
    assert [logging.getLogger(name).level for name in LOGGERS] == before
