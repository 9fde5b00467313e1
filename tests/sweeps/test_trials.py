"""Trials: kept when finished, continued when interrupted, one program where that pays, ended early without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import SGD, Digits, DigitsMLP, FederatedTrainer, FedSAM
from fl_lightning.sweeps import trials
from fl_lightning.sweeps.hyperband import Hyperband, StopEarly
from fl_lightning.sweeps.trials import Built, Trial, newest_run, run_trials
from fl_lightning.trainer.run import Callback, Run
from tests.runs import assert_same, metrics, state

ROUNDS = 6


class Interrupt(Callback):
    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.rounds_done == 3:
            raise KeyboardInterrupt


def build(trial: Trial, folder: Path, **more: Any) -> Built:
    given = dict(arg.removeprefix("--").split("=") for arg in trial.args)
    options: dict[str, Any] = {"accelerator": "cpu", "threads": 1, "engine": "batched", "enable_progress_bar": False}
    trainer = FederatedTrainer(
        max_rounds=ROUNDS, clients_per_round=3, seed=int(given.get("trainer.seed", 0)), name=trial.name,
        default_root_dir=str(folder), **{**options, **more},
    )  # fmt: skip
    rho = float(given["model.rho"])
    torch.manual_seed(0)
    model = FedSAM(DigitsMLP(hidden=8), rho=rho, optimizer=SGD(lr=1e200 if rho > 1 else 0.1))
    return Built(trainer, model, Digits(num_clients=6, batch_size=32))


def trial(rho: float, seed: int = 0) -> Trial:
    return Trial(f"rho_{rho}_seed_{seed}", (f"--model.rho={rho}", f"--trainer.seed={seed}"))


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says."""
    monkeypatch.setattr("fl_lightning.trainer.parallel_runs.pays", lambda runs: True)


def run_folder(folder: Path, of: Trial) -> Path:
    found = newest_run(of, folder)
    assert found is not None
    return found


def test_finished_trials_are_kept_and_the_interrupted_one_goes_on(tmp_path: Path) -> None:
    asked = [trial(0.05), trial(0.1), trial(0.2)]
    alone = partial(build, engine="sequential")
    list(run_trials(asked[:1], tmp_path, alone))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    with pytest.raises(KeyboardInterrupt):
        list(run_trials(asked[1:2], tmp_path, partial(alone, callbacks=[Interrupt()])))
    found = list(run_trials(asked, tmp_path, alone))
    assert [o.trial for o in found] == asked and not any(o.error for o in found)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(tmp_path.glob("*/version_*"))) == 3, "the interrupted run went on in its own folder"
    whole = list(run_trials(asked, tmp_path / "whole", alone))
    for one, other in zip(found, whole, strict=True):
        assert one.folder and other.folder and metrics(one.folder) == metrics(other.folder)


def test_without_resume_each_gets_a_new_folder(tmp_path: Path) -> None:
    for _ in range(2):
        list(run_trials([trial(0.1)], tmp_path, build, resume=False))
    assert sorted(path.name for path in tmp_path.glob("*/version_*")) == ["version_0", "version_1"]


@pytest.mark.usefixtures("one_program")
def test_a_failed_trial_is_not_repeated_and_the_others_finish(tmp_path: Path) -> None:
    asked = [trial(0.1), trial(2.0), trial(0.2)]
    for _ in range(2):
        found = list(run_trials(asked, tmp_path, build))
        errors = {o.trial.name: o.error for o in found}
        assert [name for name, error in errors.items() if error] == [asked[1].name]
        assert "not finite" in str(errors[asked[1].name])
    assert len(list(tmp_path.glob("*/version_*"))) == 3


def test_trials_are_one_program_only_if_they_differ_in_numbers() -> None:
    other = Trial("other", ("--model=FedAvg", "--trainer.seed=0"))
    groups = trials._groups([trial(0.1, 0), other, trial(0.2, 0), trial(0.1, 1)], 32)
    assert [[t.name for t in group] for group in groups] == [
        ["rho_0.1_seed_0", "rho_0.2_seed_0", "rho_0.1_seed_1"], ["other"],
    ]  # fmt: skip
    assert [len(group) for group in trials._groups([trial(0.1, seed) for seed in range(5)], 2)] == [2, 2, 1]
    heads = [Trial(str(n), (f"--model.net.heads={n}",)) for n in (1, 2)]  # of the same shapes, but another net
    assert trials._groups(heads, 32) == [heads[:1], heads[1:]]


@pytest.mark.parametrize("engine", ["batched", "graphed"])
@pytest.mark.usefixtures("one_program")
def test_those_that_end_early_leave_the_others_to_the_bit(engine: str, tmp_path: Path) -> None:
    """Three brackets; of three trials one goes on. The others are compared with the same program without a rule."""
    asked = [trial(rho) for rho in (0.01, 0.5, 0.9)]
    early = StopEarly(Hyperband(min_iter=2), "server/test/acc", -1, tmp_path / "early")

    make = partial(build, engine=engine)

    list(run_trials(asked, tmp_path / "early", make, early=early))
    list(run_trials(asked, tmp_path / "whole", make))
    rounds = []
    for of in asked:
        ended, whole = (metrics(run_folder(tmp_path / name, of)) for name in ("early", "whole"))
        rounds.append(ended["server/test/acc"][-1][0])
        for name, values in ended.items():
            assert values == whole[name][: len(values)], f"{of.name}: {name}"
    assert max(rounds) == ROUNDS and min(rounds) == 2
    finished = asked[rounds.index(ROUNDS)]
    assert_same(*(state(run_folder(tmp_path / name, finished)) for name in ("early", "whole")))


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    asked = [trial(0.05), trial(0.1)]
    found = list(run_trials(asked, tmp_path / "two", build, jobs=2))
    assert sorted(o.trial.name for o in found) == sorted(t.name for t in asked)
    list(run_trials(asked, tmp_path / "one", build, jobs=1))
    for of in asked:
        assert metrics(run_folder(tmp_path / "two", of)).keys() == metrics(run_folder(tmp_path / "one", of)).keys()
