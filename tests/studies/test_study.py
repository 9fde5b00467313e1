"""A study is tuned, trained and kept; called again, it goes on."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from fl_lightning.results.rows import Store
from tests.runs import DIGITS, cli

STUDY = {
    "title": "Small",
    "text": "Digits.",
    "reference": "FedAvg",
    "fit": " ".join([*DIGITS, "--trainer.callbacks=[Checkpoints]"]),
    "draws": 2,
    "tuning": "--data.val_fraction 0.3 --trainer.max_rounds 1",
    "rows": "--trainer.max_rounds 2",
    "columns": {"alpha 1": "--data.partition Dirichlet --data.partition.alpha 1"},
    "seeds": [3],
    "ranges": {
        "lr": {"key": "model.optimizer.lr", "min": 0.02, "max": 0.5},
        "rho": {"key": "model.rho", "values": [0.1, 0.2]},
    },
    "methods": {"FedAvg": ["--model FedAvg", "lr"], "FedSAM": ["--model FedSAM", "lr", "rho"]},
}


@pytest.mark.slow
def test_a_study_is_tuned_trained_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(STUDY))
    args = ["study", "run", str(tmp_path / "small.yaml"), f"--into={tmp_path / 'rows'}", f"--out={tmp_path / 'runs'}"]
    cli(*args, "--methods=FedSAM")
    cli(*args)
    store = Store(tmp_path / "rows")
    assert [(line["row"], line["column"], line["method"], line["seed"]) for line in store.lines] == [
        ("alpha_1/FedSAM/seed_3", "alpha_1", "FedSAM", 3), ("alpha_1/FedAvg/seed_3", "alpha_1", "FedAvg", 3),
    ]  # fmt: skip
    with (tmp_path / "rows" / "tuning.csv").open(newline="") as file:
        draws = [*csv.DictReader(file)]
    assert [draw["method"] for draw in draws] == ["FedAvg"] * 2 + ["FedSAM"] * 2
    for line in store.lines:
        own = [draw for draw in draws if draw["method"] == line["method"]]
        best = max(float(draw["server/val/acc"]) for draw in own)
        config = store.config(line)
        lr = config["model"]["init_args"]["optimizer"]["init_args"]["lr"]
        assert any(f"lr={lr}" in draw["settings"] and float(draw["server/val/acc"]) == best for draw in own)
        assert config["data"]["init_args"]["val_fraction"] == 0 and config["trainer"]["max_rounds"] == 2
    before = (tmp_path / "rows" / "rows.jsonl").read_bytes()
    capsys.readouterr()
    cli(*args)
    assert "added" not in capsys.readouterr().out
    assert (tmp_path / "rows" / "rows.jsonl").read_bytes() == before
