"""W&B's own agent, from ``wandb sweep`` to finished trials, against a server of its API on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning.results.metrics import read_metrics
from tests.runs import DIGITS
from tests.wandb_server import serving

FIXED = ["--model=FedSAM", *DIGITS, "--data.partition=Dirichlet", "--trainer.loggers=wandb"]
SWEEP = {
    "program": "fl-lightning",
    "method": "grid",
    "metric": {"name": "server/test/acc", "goal": "maximize"},
    "parameters": {"model.rho": {"values": [0.05, 0.1]}, "data.partition.alpha": {"values": [10.0, 0.5]}},
    "command": ["${env}", "fl-lightning", "fit", *FIXED, "${args}"],
}


@pytest.mark.slow
def test_the_agent_of_wandb_trains_what_the_server_asks(tmp_path: Path) -> None:
    """Each trial has its run folder with the trial's settings, and the server its metrics."""
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    trials = [{"model.rho": 0.05, "data.partition.alpha": 10.0}, {"model.rho": 0.1, "data.partition.alpha": 0.5}]
    with serving(*trials) as server:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "0", "NO_PROXY": "127.0.0.1"}
        for args in (["sweep", "--project=fl_lightning", "sweep.yaml"], ["agent", "me/fl_lightning/s1"]):
            env = {**kept, **own, "HOME": str(tmp_path), "PATH": path}
            done = subprocess.run(["wandb", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
    assert [name for name in server.asked if "Sweep" in name or "Agent" in name] == [
        "UpsertSweep", "SweepWithRuns", "CreateAgent",
    ]  # fmt: skip
    assert server.exits == {"trial1": 0, "trial0": 0}
    for version, (run, settings) in enumerate(zip(("trial1", "trial0"), trials, strict=True)):
        folder = tmp_path / "runs" / "FedSAM-Digits" / f"version_{version}"
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        told = json.loads(server.runs[run]["config"])
        for config in (saved, {part: told[part]["value"] for part in ("model", "data")}):
            assert config["model"]["init_args"]["rho"] == settings["model.rho"]
            assert config["data"]["init_args"]["partition"]["init_args"]["alpha"] == settings["data.partition.alpha"]
        assert server.runs[run]["sweep"] == "s1"
        for name, values in read_metrics(folder / "metrics.csv").items():
            logged = [(row["round"], row[name]) for row in server.history[run] if name in row]
            assert dict(logged) == pytest.approx(dict(values)) and len(logged) == len(values), name
        assert (folder / "summary.json").exists()
