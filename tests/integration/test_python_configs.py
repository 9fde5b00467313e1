"""A run from Python has the config that the command line would give it, or says what only the program can make."""

from __future__ import annotations

import pickle
from dataclasses import InitVar, dataclass
from datetime import date
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import SAM, Digits, DigitsMLP, FedAvg, FederatedTrainer, FedSAM, LocalObjective, UserError
from fl_lightning.core import State, config_of, generator
from fl_lightning.core.made import as_setting
from fl_lightning.results.compare import compare
from fl_lightning.results.configs import only_python, read_config
from fl_lightning.trainer import Run
from fl_lightning.trainer.storage import checkpoint
from tests.runs import cli, newest


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def fit(root: Path, model: LocalObjective, seed: int = 0, rounds: int = 1, ckpt_path: str | None = None) -> Run:
    trainer = FederatedTrainer(
        max_rounds=rounds,
        clients_per_round=2,
        threads=1,
        seed=seed,
        engine="sequential",
        enable_progress_bar=False,
        default_root_dir=str(root),
    )
    return trainer.fit(model, Digits(num_clients=6, seed=seed), ckpt_path)


def test_config_of_a_run_from_python_gives_the_same_run(tmp_path: Path) -> None:
    torch.manual_seed(generator(3, "initial weights").initial_seed())
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    run = fit(tmp_path, FedSAM(net=DigitsMLP(hidden=8), rho=1, loss=loss), seed=3)
    config = run.folder.config
    cli("fit", f"--config={config}")
    rerun = newest(tmp_path)
    assert rerun != run.folder.path and read_config(rerun / "config.yaml") == read_config(config)
    one, other = (checkpoint.load(folder / "checkpoints/last.ckpt")["server"]["w"] for folder in (config.parent, rerun))
    assert torch.equal(one, other)
    assert run.how_to_continue[:3] == ["fl-lightning", "fit", "--config"]


def test_seeds_are_a_group_and_widths_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for width in (4, 8):
        for seed in (0, 1):
            torch.manual_seed(seed)
            run = fit(tmp_path, FedAvg(Net(width)), seed)
    groups = compare(tmp_path)
    assert [group.seeds for group in groups] == [[(0, 0), (1, 1)]] * 2
    assert [group.settings["net"].split(" (")[1][:11] for group in groups] == ["310 weights", "610 weights"]
    # no config can make the net: nothing says that one could
    assert run.how_to_continue == [] and [*only_python(run.config)] == ["model.net"]
    with pytest.raises(SystemExit, match=r"model.net = .*Net .* run the program"):
        cli("fit", f"--config={run.folder.config}")
    with pytest.raises(SystemExit, match="a program has made"):
        cli("study", "add", str(run.folder.path), f"--into={tmp_path / 'ledger'}")
    fit(tmp_path, FedAvg(Net(8)), seed=1, rounds=2, ckpt_path="last")
    assert "settings changed after round 1" in capsys.readouterr().out


def test_settings_that_are_set_later_count() -> None:
    model, net = FedAvg(DigitsMLP()), DigitsMLP()
    model.optimizer.lr = 0.5
    assert as_setting(model)["init_args"]["optimizer"]["init_args"]["lr"] == 0.5
    net[-1] = nn.Linear(64, 3)
    assert isinstance(as_setting(net), str) and isinstance(as_setting(model.net), dict)


def test_settings_of_what_a_class_has_made_count() -> None:
    base, changed, other = (as_setting(make())["init_args"] for make in (sam, lambda: sam(0.5), lambda: sam(SAM(0.5))))
    assert changed == other == base | {"ascent": as_setting(SAM(0.5))}
    assert as_setting(pickle.loads(pickle.dumps(sam())))["init_args"] == base


def sam(ascent: float | SAM = 0.1) -> FedSAM:
    model = FedSAM(DigitsMLP(), rho=0.1)
    if isinstance(ascent, SAM):
        model.ascent = ascent
    else:
        model.ascent.rho = ascent
    return model


def test_setting_that_changes_nothing_is_not_in_the_config() -> None:
    model, trainer = FedSAM(DigitsMLP(), rho=0.1), FederatedTrainer(clients_per_round=2, accelerator="cpu")
    vars(model)["rho"] = vars(trainer)["clients_per_round"] = 5
    for owner, name, value in (model, "rho", 0.1), (trainer, "clients_per_round", 2):
        message = (
            rf"^{type(owner).__name__}\.{name} = 5: set later, it changes nothing; give it to {type(owner).__name__}$"
        )
        with pytest.warns(UserWarning, match=message):
            assert as_setting(owner)["init_args"][name] == value


def test_precision_is_that_of_the_devices() -> None:
    trainer: Any = FederatedTrainer(accelerator="cpu")
    with pytest.raises(AttributeError, match="precision"):
        trainer.precision = "64-true"


class Pulled(LocalObjective):
    beta = 0.1

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.gamma = 0.1


def test_attributes_that_are_set_later_count() -> None:
    model, other = Pulled(DigitsMLP()), Pulled(DigitsMLP())
    other.beta = 10.0
    settings, changed = (as_setting(objective)["init_args"] for objective in (model, other))
    assert "beta" not in settings and changed == settings | {"beta": 10.0}
    model.gamma = 0.5
    assert as_setting(model.eval())["init_args"] == settings | {"gamma": 0.5}


def scaled(x: Any, k: float) -> Any:
    return k * x


def by(k: float) -> Any:
    return lambda x: k * x


class Private:
    def __init__(self, k: int) -> None:
        self._k, self.__k, self._cache = k, k, object()


@dataclass(slots=True)
class Slots:
    k: int


@dataclass
class Derived:
    k: InitVar[int]

    def __post_init__(self, k: int) -> None:
        self.twice = 2 * k


@pytest.mark.parametrize(
    "make",
    [
        Net,
        by,
        lambda k: partial(scaled, k=k),
        lambda k: torch.full((3,), k),
        lambda k: {"a": torch.zeros(k)},
        Private,
        Slots,
        Derived,
        date.fromordinal,
        lambda k: np.array([f"class {k}"]),
        lambda k: np.array([(k, 0.5)], dtype=[("dose", ">i4"), ("weight", float)]),
        lambda k: np.array([k, 0.5], ">f4"),
    ],
    ids=[
        "net", "closure", "partial", "tensor", "state_dict", "private", "slots", "derived", "date", "text", "fields",
        "order of bytes",
    ],
)  # fmt: skip
def test_description_tells_things_apart_by_their_content(make: Any) -> None:
    one, same, other = (as_setting(make(k), weights=make is not Net) for k in (2, 2, 3))
    assert one == same != other and only_python({"x": one}) and "0x" not in one


class How(StrEnum):
    ONE = "one"


class Told(LocalObjective):
    def __init__(self, net: nn.Module, how: How) -> None:
        super().__init__(net)
        self.how = how


def test_an_option_of_an_enum_is_in_the_config_and_no_hindrance_for_checkpoints(tmp_path: Path) -> None:
    run = fit(tmp_path, Told(DigitsMLP(), How.ONE))
    assert read_config(run.folder.path / "config.yaml")["model"]["init_args"]["how"] == "ONE"
    assert checkpoint.load(str(run.folder.last))["round"] == 1


def test_secrets_are_hidden() -> None:
    class Mine(SAM):
        def __init__(self, api_key: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)

    model = FedAvg(DigitsMLP(), ascent=Mine(api_key="s3cret-s3cret", rho=0.1))
    assert "s3cret" not in repr(config_of(FederatedTrainer(), model, Digits()))


def test_hook_with_other_arguments_is_named() -> None:
    class Short(LocalObjective):
        def local_end(self, w: Any, client: State, ctx: Any) -> Any:  # type: ignore[override]
            return {"w": w}, client

    with pytest.raises(UserError, match=r"^Short.local_end\(self, w, client, ctx\): .* client, received, ctx\)$"):
        Short(DigitsMLP())
