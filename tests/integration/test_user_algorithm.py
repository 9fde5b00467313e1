"""A class of one's own, in a file of one's own, is used like those of the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.commands.shared.cli import FederatedCLI
from tests.runs import SCRIPT, assert_same, cli, last, metrics, newest, process, run, state

MYPROX = '''
from fl_lightning import LocalObjective


class MyProx(LocalObjective):
    """A proximal term mu/2 |w - w_t|^2 (Li et al., MLSys 2020)."""

    def __init__(self, mu: float = 0.01, **kwargs):
        super().__init__(**kwargs)
        self.mu = mu

    def local_step(self, w, grad, client, received, ctx):
        return self.local_gradient(w, grad, client, received, ctx) + self.mu * (w - client.start), client
'''
REMEMBER = '''
from fl_lightning import LocalObjective


class Remember(LocalObjective):
    """Clients that keep the weights they ended with, and a server that counts them."""

    client_state = {"own": "w"}
    server_state = {"seen": 0.0}

    def local_end(self, w, client, received, ctx):
        return {"w": w}, client.replace(own=w)

    def server_step(self, server, sent, uploads, ctx):
        return super().server_step(server.replace(seen=server.seen + uploads.n), sent, uploads, ctx)
'''
LAMBDA = {"class_path": "LambdaMax", "init_args": {"samples": 100}}
MONITOR = {"class_path": "FlatnessMonitor", "init_args": {"every_n_rounds": 1, "metrics": [LAMBDA]}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a user's folder with one file of code and one config."""
    (tmp_path / "mine.py").write_text(MYPROX)
    config = {
        "model": {"class_path": "mine.MyProx", "init_args": {"mu": 0.5, "net": "DigitsMLP", "ascent": "SAM"}},
        "data": {"class_path": "Digits", "init_args": {"num_clients": 6, "batch_size": 32}},
        "trainer": {
            "max_rounds": 2,
            "clients_per_round": 3,
            "threads": 1,
            "engine": "sequential",
            "callbacks": [MONITOR],
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("first", ["net", "net=None", "*args", "net: nn.Module"])
def test_a_constructor_without_annotations_is_made_from_a_config(first: str, folder: Path) -> None:
    """Its net and optimizer are those of the class below it; the range of its number is its own."""
    argument = first.partition(":")[0].partition("=")[0]
    (folder / "mine.py").write_text(
        "from torch import nn\nfrom fl_lightning import FedProx\n\n\nclass MyProx(FedProx):\n"
        f"    def __init__(self, {first}, optimizer=None, mu=-1, **kwargs):\n"
        f"        super().__init__({argument}, optimizer=optimizer, mu=abs(mu), **kwargs)\n"
    )
    settings = ["--model.mu=-3", "--model.net.hidden=5", "--model.optimizer.lr=0.3"]
    command = FederatedCLI("fit", "--config=mine.yaml", *settings)
    model = command.build().model
    assert (model.mu, model.optimizer.lr, model.net[1].out_features) == (3, 0.3, 5)


@pytest.mark.slow
def test_in_a_new_process(folder: Path) -> None:
    """The file lies in the working folder, and nothing is installed."""
    with process(SCRIPT, "fit", "--config", "mine.yaml", cwd=folder) as child:
        _, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    run_folder = newest(folder / "runs")
    assert run_folder.parent.name == "MyProx-Digits"
    assert [at for at, _ in metrics(run_folder)["server/test/acc"]] == [1, 2]
    assert "flatness/lambda_max" in metrics(run_folder)
    quiet = ["--config", "mine.yaml", "--trainer.max_rounds=4", "--trainer.enable_progress_bar=false"]
    cli("fit", *quiet, "--ckpt_path=last")
    assert last(run_folder)["round"] == 4
    cli("fit", *quiet, "--trainer.default_root_dir=whole")
    assert_same(state(newest(folder / "whole")), state(run_folder))
    assert metrics(newest(folder / "whole")) == metrics(run_folder)


def test_proximal_term(folder: Path) -> None:
    """Without its term it is FedAvg to the bit, with it clients stay nearer to the global model."""
    fedavg = run("fit", root=folder / "a")
    assert_same(state(run("fit", "--model.mu=0", root=folder / "b", model="mine.MyProx")), state(fedavg))
    prox = state(run("fit", "--model.mu=1", root=folder / "c", model="mine.MyProx"))
    start = state(run("fit", "--model.optimizer.lr=1e-30", root=folder / "d"))["server.w"]
    distances = [float((s["server.w"] - start).norm()) for s in (prox, state(fedavg))]
    assert 0 < distances[0] < 0.95 * distances[1]


def test_state_of_ones_own(folder: Path) -> None:
    (folder / "mine.py").write_text(REMEMBER)
    run_folder = run("fit", root=folder, model="mine.Remember")
    checkpoint = last(run_folder)
    assert float(checkpoint["server"]["seen"]) == 6
    assert checkpoint["clients"]["rows"]["own"].shape == (len(checkpoint["clients"]["ids"]), 610)
    fedavg = run("fit", root=folder / "fedavg")
    assert torch.equal(checkpoint["server"]["w"], last(fedavg)["server"]["w"])
