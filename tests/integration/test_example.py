"""The examples: FedSAM in one file gives the package's weights, bit for bit, and LoRA goes from texts to a round."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import SGD, Digits, DigitsMLP, Dirichlet, FederatedTrainer, FedSAM
from tests.runs import cli

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "fedsam_from_scratch.py"


@pytest.mark.parametrize(
    ("rho", "epochs", "sgd"),
    [
        (0.05, 1, {"weight_decay": 4e-4}),
        (0.2, 2, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    ],
    ids=["defaults", "momentum"],
)
def test_fedsam_from_scratch_is_the_package(
    rho: float, epochs: int, sgd: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    w = main(rounds=5, epochs=epochs, rho=rho, seed=3, **sgd)
    printed = capsys.readouterr().out

    torch.manual_seed(3)
    model = FedSAM(DigitsMLP(), rho=rho, optimizer=SGD(**sgd))
    trainer = FederatedTrainer(
        max_rounds=5,
        local_epochs=epochs,
        precision="64-true",
        accelerator="cpu",
        engine="sequential",
        seed=3,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    )
    run = trainer.fit(model, Digits(num_clients=50, partition=Dirichlet(alpha=0.05), batch_size=16))

    assert torch.equal(w, run.server.w), f"differs by {(w - run.server.w).abs().max()}"
    assert f"test accuracy {run.metrics['server/test/acc']:.4f}" in printed


@pytest.mark.long
def test_lora_on_a_body_that_other_texts_have_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of a text is its first word: the body learns it on one half, and the head on the other half."""
    monkeypatch.chdir(tmp_path)
    with open("texts.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [i % 4 + 1, ["war", "sport", "market", "science"][i % 4], "and so on"] for i in range(2400)
        )
    example = runpy.run_path(str(EXAMPLES / "lora_agnews.py"))
    example["data"]("texts.csv")
    cli("centralized", "--config", str(EXAMPLES / "lora_agnews_body.yaml"))
    example["body"]("runs/body/version_0/checkpoints/last.ckpt")
    few = ["--trainer.max_rounds=5", "--data.num_clients=10", "--trainer.loggers=[]", "--model.optimizer.lr=0.5"]
    cli("fit", "--config", str(EXAMPLES / "lora_agnews.yaml"), "--trainer.name=lora", *few)
    summary = json.loads(Path("runs/lora/version_0/summary.json").read_text())
    assert summary["final"] > 0.5
