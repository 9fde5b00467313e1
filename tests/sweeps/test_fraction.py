"""A fraction of the rounds: the same run in less time."""

from __future__ import annotations

from typing import Any

import pytest

from fl_lightning.algorithms.parts.server import SWA
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.core.errors import UserError
from fl_lightning.results.configs import setting_of
from fl_lightning.sweeps.reproduction import COUNTS, FACTORS, scaled


def config(**settings: Any) -> dict[str, Any]:
    return {"trainer": {"max_rounds": 10_000, "eval_every": 100, "eval_last": 100}, "model": {"init_args": settings}}


def test_rounds_and_evaluations() -> None:
    assert scaled(config(), 0.1) == {"trainer.max_rounds": 1000, "trainer.eval_every": 10, "trainer.eval_last": 10}
    assert scaled(config(), 0.00002) == {"trainer.max_rounds": 1, "trainer.eval_every": 1, "trainer.eval_last": 1}
    assert scaled(config(), 1) == {}


def test_what_else_counts_in_rounds() -> None:
    parts = {
        "W": 30,
        "warmup": 0,
        "ascent": {"class_path": "SAM", "init_args": {"rho": 0.1, "warmup": 2000}},
        "averaging": {"class_path": "SWA", "init_args": {"start": 7500, "cycle": 20}},
    }
    settings = {k: v for k, v in scaled(config(**parts), 0.1).items() if k.startswith("model")}
    assert settings == {
        "model.W": 3,
        "model.ascent.warmup": 200,
        "model.averaging.start": 750,
        "model.averaging.cycle": 2,
    }
    assert "model.averaging.start" not in scaled(config(averaging={"init_args": {"start": 0.75}}), 0.1)
    assert SWA(start=0.75).start_round(1000) == SWA(start=7500).start_round(10_000) // 10


def test_the_learning_rate_ends_at_the_same_value() -> None:
    original = config(optimizer={"init_args": {"lr_decay": 0.998}}, ema_alpha=0.95)
    settings = scaled(original, 0.1)
    assert settings["model.optimizer.lr_decay"] ** 1000 == pytest.approx(0.998**10_000)
    assert settings["model.ema_alpha"] ** 1000 == pytest.approx(0.95**10_000)
    assert "model.optimizer.lr_decay" not in scaled(config(optimizer={"init_args": {"lr_decay": 1.0}}), 0.1)


@pytest.mark.parametrize("fraction", [0, -1, 1.5])
def test_only_fractions(fraction: float) -> None:
    with pytest.raises(UserError, match=r"^rounds = .*: give a fraction of the paper's rounds"):
        scaled(config(), fraction)


def test_the_keys_are_settings() -> None:
    """Each key is one of some algorithm, so that a renamed parameter is noticed."""
    parts = [
        ["--model=FedGF"],
        ["--model=FedGMT"],
        ["--model=FedGloSS", "--model.ascent=SAM", "--model.averaging=SWA"],
        ["--model=FedAvg", "--model.averaging=EMA", "--model.optimizer.schedule=Cyclic"],
    ]
    cli = FederatedCLI("fit", "--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits")
    configs = [cli.make(*part, "--model.net=DigitsMLP", "--data=Digits").trainer.config for part in parts]
    keys = {*COUNTS, *FACTORS}
    assert {key for key in keys if any(setting_of(config, key) is not None for config in configs)} == keys
