"""Frozen parameters lie once in a run folder; a checkpoint loads with them, and resumes with the same only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import Digits, DigitsMLP, FedAvg, FedDyn, FederatedTrainer, Frozen, UserError, load_net
from fl_lightning.core.files import FROZEN as FILE
from fl_lightning.core.weights import constants, digest
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.storage import checkpoint
from tests.runs import DIGITS, assert_same, cli, ended, group, last, metrics, newest, run, state

FROZEN = ["--model.net=Frozen", "--model.net.net=DigitsMLP", "--model.net.net.hidden=8", "--model.net.trained=[3]"]


def ckpt(folder: Path) -> str:
    return str(folder / "checkpoints/last.ckpt")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedDyn's run of 4 rounds: a head of 90 weights on a frozen layer of 520."""
    return run("fit", *FROZEN, "--trainer.max_rounds=4", root=tmp_path_factory.mktemp("done"), model="FedDyn")


def test_a_run_continues_to_the_same_bits(done: Path, tmp_path: Path) -> None:
    half = run("fit", *FROZEN, root=tmp_path, model="FedDyn")
    (half / "checkpoints" / FILE).write_text("damaged")
    cli("fit", "--ckpt_path", ckpt(half), "--trainer.max_rounds=4")
    assert_same(state(half), state(done))
    assert set(last(done)["state_dict"]) == {"net.net.3.weight", "net.net.3.bias"}
    for folder in (half, done):
        assert sorted(torch.load(folder / "checkpoints" / FILE)) == ["net.1.bias", "net.1.weight"]
    assert metrics(done)["comm/total_bits"][-1] == (4, 2 * 90 * 32 * 3 * 4)


def test_a_checkpoint_loads_by_itself(done: Path, tmp_path: Path) -> None:
    net = load_net(done)
    assert digest(constants(net)) == last(done)["frozen"]
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    assert_same({name: tensors[name] for name in last(done)["state_dict"]}, last(done)["state_dict"])
    cli("export", ckpt(done), str(tmp_path / "net.pt"))
    assert_same(torch.load(tmp_path / "net.pt"), net.state_dict())
    # Lightning's own way, with a net that has the same frozen parameters, and with one that has others
    torch.manual_seed(5)
    fresh = Frozen(DigitsMLP(8), ["3"])
    with pytest.raises(UserError, match="load_from_checkpoint: net has other frozen parameters"):
        FedDyn.load_from_checkpoint(ckpt(done), net=fresh)
    loaded = FedDyn.load_from_checkpoint(ckpt(done), net=load_net(done))
    assert_same(loaded.net.state_dict(), net.state_dict())
    # as initial weights, of the wrapper or of the net in it
    assert_same(FedAvg(fresh, init_weights=ckpt(done)).net.state_dict(), net.state_dict())
    plain = {name.removeprefix("net."): value for name, value in net.state_dict().items()}
    torch.save(plain, tmp_path / "plain.pt")
    assert_same(Frozen(DigitsMLP(8), ["3"], weights=str(tmp_path / "plain.pt")).state_dict(), net.state_dict())
    # to be looked at, the checkpoint's frozen parameters replace those of the model
    data, trainer = (
        Digits(num_clients=6, batch_size=32),
        FederatedTrainer(clients_per_round=3, accelerator="cpu", threads=1),
    )
    torch.manual_seed(6)
    scores = trainer.test(FedDyn(Frozen(DigitsMLP(8), ["3"])), data, ckpt(done))
    assert scores["server/test/acc"] == pytest.approx(metrics(done)["server/test/acc"][-1][1], abs=1e-5)
    unbiased = Frozen(nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 10)), ["3"])
    with pytest.raises(UserError, match=r"does not fit Frozen: its frozen 'net\.1\.bias' is missing, unknown or of"):
        trainer.test(FedDyn(unbiased), data, ckpt(done))
    # the frozen parameters next to it must be there, and be its own
    folder = tmp_path / "FedDyn-Digits/version_0/checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(ckpt(done), folder)
    with pytest.raises(UserError, match=r"ckpt_path = .*frozen\.pt, are not next to it; copy both"):
        checkpoint.state_dict(folder / "last.ckpt")
    for wrong in ({name: value + 1 for name, value in constants(net).items()}, [1], {"net.1.bias": 1}):
        torch.save(wrong, folder / FILE)
        with pytest.raises(UserError, match=r"frozen\.pt next to it holds the frozen parameters of another net"):
            checkpoint.state_dict(folder / "last.ckpt")


def test_other_frozen_parameters_are_refused(done: Path, tmp_path: Path) -> None:
    """Initial weights follow the seed; with the same, a file of other weights is another net, too."""
    torch.save(DigitsMLP(8).state_dict(), tmp_path / "other.pt")
    option = f"--model.net.weights={tmp_path / 'other.pt'}"
    before = sorted(done.rglob("*"))
    with pytest.raises(SystemExit, match=r"with model\.net \(its frozen parameters\) = \w{32}, this run has \w{32}"):
        cli("fit", "--ckpt_path", ckpt(done), "--trainer.max_rounds=5", option)
    assert sorted(done.rglob("*")) == before


class Projected(nn.Module):
    """A layer on random features, whose order and directions are drawn with the net."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.last, self.cache = nn.Linear(64, 10), nn.Module()
        self.register_buffer("order", torch.randperm(64), persistent=persistent)
        self.register_buffer("directions", torch.randn(64, 64), persistent=False)
        self.register_buffer("zeros", torch.zeros(1).expand(10), persistent=False)
        self.cache.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.seen = torch.zeros(len(x))
        return self.last((x.flatten(1)[:, self.order] @ self.directions).cos()) + self.zeros  # type: ignore[no-any-return]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_drawn_into_buffers_is_that_of_the_run(persistent: bool, tmp_path: Path) -> None:
    """A program that does not seed its net draws another one when it goes on, or tests a checkpoint."""
    data, buffers = Digits(num_clients=6, batch_size=32), "average" if persistent else None

    def made(seed: int, rounds: int, name: str) -> Any:
        torch.manual_seed(seed)
        options = {"accelerator": "cpu", "threads": 1, "enable_progress_bar": False, "engine": "sequential"}
        root = {"default_root_dir": str(tmp_path), "name": name}
        trainer = FederatedTrainer(max_rounds=rounds, clients_per_round=3, **options, **root)  # type: ignore[arg-type]
        return trainer, FedAvg(Projected(persistent), buffers=buffers), data  # type: ignore[arg-type]

    trainer, *pair = made(0, 3, "whole")
    whole = trainer.fit(*pair)
    trainer, *pair = made(0, 2, "broken off")
    trainer.fit(*pair)
    trainer, *pair = made(1, 3, "broken off")
    assert_same(dict(trainer.fit(*pair, ckpt_path="last").server), dict(whole.server))
    trainer, *pair = made(2, 3, "whole")
    assert trainer.test(*pair, ckpt_path="last")["server/test/loss"] == whole.metrics["server/test/loss"]


class Tied(nn.Sequential):
    """Two layers that share their weight, as embedding and output do."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10))
        self[4].weight = self[3].weight


@pytest.mark.parametrize("trained", [["4"], ["3"], ["1", "3", "4"]])
def test_a_shared_weight_is_trained_and_saved_by_each_of_its_names(trained: list[str], tmp_path: Path) -> None:
    net = ["--model.net=Frozen", f"--model.net.net={__name__}.Tied", f"--model.net.trained={json.dumps(trained)}"]
    args = [arg for arg in DIGITS if "net" not in arg]
    cli("fit", "--model=FedAvg", *args, *net, f"--trainer.default_root_dir={tmp_path}")
    folder = newest(tmp_path)
    assert {"net.net.3.weight", "net.net.4.weight"} <= last(folder)["state_dict"].keys()
    loaded = load_net(folder).net
    assert loaded[3].weight is loaded[4].weight
    assert torch.equal(loaded[4].weight, last(folder)["state_dict"]["net.net.4.weight"])


def test_seeds_with_other_frozen_parameters_are_runs_of_their_own(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[FederatedTrainer, FedAvg]:
        torch.manual_seed(seed)
        options = {"accelerator": "cpu", "threads": 1, "enable_progress_bar": False, "engine": "batched"}
        trainer = FederatedTrainer(
            seed=seed, max_rounds=1, clients_per_round=3, default_root_dir=str(tmp_path), **options
        )  # type: ignore[arg-type]
        return trainer, FedAvg(Frozen(DigitsMLP(8), ["3"]))

    trainers, models = zip(*map(pair, (0, 1)), strict=True)
    with pytest.raises(UserError, match="its frozen parameters differ between the runs"):
        parallel_runs.fit(trainers, models, Digits(num_clients=6, batch_size=32))
    assert not any(tmp_path.iterdir())
    for model in models:
        with torch.no_grad():
            model.net.net[1].weight.fill_(0.5)
            model.net.net[1].bias.fill_(0)
    runs = parallel_runs.fit(trainers, models, Digits(num_clients=6, batch_size=32))
    assert not torch.equal(runs[0].server.w, runs[1].server.w)


@pytest.mark.slow
def test_two_processes(done: Path, tmp_path: Path) -> None:
    args = ["fit", "--model=FedDyn", *DIGITS, *FROZEN, "--trainer.max_rounds=4", "--trainer.strategy=ddp"]
    with group(2, *args, "--trainer.devices=2", f"--trainer.default_root_dir={tmp_path}", cwd=tmp_path) as children:
        ended(children)
    assert_same(state(newest(tmp_path)), state(done))
