"""Trials: kept when finished, continued when interrupted, one program where that pays, ended early without a trace."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning import SGD, Checkpoints, Digits, DigitsMLP, FederatedTrainer, FedSAM, UserError
from fl_lightning.core import DivergenceError
from fl_lightning.sweeps import trials, workers
from fl_lightning.sweeps.controller import StopEarly
from fl_lightning.sweeps.file import Hyperband
from fl_lightning.sweeps.trials import Built, Group, Trial, name_of, newest_run, run_trials
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.storage.run_folder import locked
from tests.runs import FORKS, assert_same, metrics, state

ROUNDS = 6


class Interrupt(Callback):
    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.rounds_done == 3:
            raise KeyboardInterrupt


def build(trial: Trial, folder: Path, **more: Any) -> Built:
    settings = dict(arg.removeprefix("--").split("=") for arg in trial.args)
    options: dict[str, Any] = {"accelerator": "cpu", "threads": 1, "engine": "batched", "enable_progress_bar": False}
    trainer = FederatedTrainer(
        max_rounds=ROUNDS, clients_per_round=3, seed=int(settings.get("trainer.seed", 0)), name=trial.name,
        default_root_dir=str(folder), **{**options, **more},
    )  # fmt: skip
    rho = float(settings["model.rho"])
    torch.manual_seed(0)
    model = FedSAM(DigitsMLP(hidden=8), rho=rho, optimizer=SGD(lr=1e200 if rho > 1 else 0.1))
    return Built(trainer, model, Digits(num_clients=6, batch_size=32))


def trial(rho: float, seed: int = 0) -> Trial:
    return Trial(f"rho_{rho}_seed_{seed}", (f"--model.rho={rho}", f"--trainer.seed={seed}"))


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes trials one program, whatever the clock says."""
    monkeypatch.setattr("fl_lightning.trainer.parallel_runs.pays", lambda runs: True)


def run_folder(folder: Path, trial: Trial) -> Path:
    path = newest_run(trial, folder)
    assert path is not None
    return path


@pytest.mark.slow
def test_finished_trials_are_kept_and_the_interrupted_one_goes_on(tmp_path: Path) -> None:
    requested = [trial(0.05), trial(0.1), trial(0.2)]
    sequential = partial(build, engine="sequential")
    list(run_trials(requested[:1], tmp_path, sequential))
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    with pytest.raises(KeyboardInterrupt):
        list(run_trials(requested[1:2], tmp_path, partial(sequential, callbacks=[Interrupt()])))
    outcomes = list(run_trials(requested, tmp_path, sequential))
    assert [outcome.trial for outcome in outcomes] == requested and not any(outcome.error for outcome in outcomes)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert [outcome.kept for outcome in outcomes] == [True, False, False]
    assert len(list(tmp_path.glob("*/version_*"))) == 3, "the interrupted run went on in its own folder"
    uninterrupted = list(run_trials(requested, tmp_path / "whole", sequential))
    for one, other in zip(outcomes, uninterrupted, strict=True):
        assert one.folder and other.folder and metrics(one.folder) == metrics(other.folder)


def test_without_resume_each_gets_a_new_folder(tmp_path: Path) -> None:
    for _ in range(2):
        list(run_trials([trial(0.1)], tmp_path, build, resume=False))
    assert sorted(path.name for path in tmp_path.glob("*/version_*")) == ["version_0", "version_1"]


@pytest.mark.usefixtures("one_program")
def test_a_failed_trial_is_not_repeated_and_the_others_finish(tmp_path: Path) -> None:
    requested = [trial(0.1), trial(2.0), trial(0.2)]
    for _ in range(2):
        outcomes = list(run_trials(requested, tmp_path, build))
        errors = {outcome.trial.name: outcome.error for outcome in outcomes}
        assert [name for name, error in errors.items() if error] == [requested[1].name]
        assert "not finite" in str(errors[requested[1].name])
    assert len(list(tmp_path.glob("*/version_*"))) == 3


class Diverge(Callback):
    def on_round_end(self, run: Run) -> None:
        raise DivergenceError(f"round {run.rounds_done}: not finite")


def test_a_trial_that_fails_after_it_was_continued_is_not_repeated(tmp_path: Path) -> None:
    sequential = partial(build, engine="sequential")
    with pytest.raises(KeyboardInterrupt):
        list(run_trials([trial(0.1)], tmp_path, partial(sequential, callbacks=[Interrupt()])))
    for make in (partial(sequential, callbacks=[Diverge()]), sequential):
        (outcome,) = run_trials([trial(0.1)], tmp_path, make)
        assert outcome.error == "round 3: not finite" and outcome.folder == run_folder(tmp_path, trial(0.1))


@pytest.mark.usefixtures("one_program")
def test_a_mistake_in_the_first_round_is_that_of_each_trial(tmp_path: Path) -> None:
    """It leaves no folder."""
    wrong = partial(build, callbacks=[Checkpoints(monitor="server/tset/acc")])
    outcomes = list(run_trials([trial(0.1), trial(0.2)], tmp_path, wrong))
    assert all("monitor = server/tset/acc: no such metric" in str(outcome.error) for outcome in outcomes)


def test_a_trial_takes_one_process(tmp_path: Path) -> None:
    """Others would wait for it forever."""
    (outcome,) = run_trials([trial(0.1)], tmp_path, partial(build, devices=2, strategy="ddp"))
    assert str(outcome.error).startswith("trainer.devices: 2 processes; each of several runs is trained by one")


def test_a_trial_goes_on_once_the_disk_has_room(tmp_path: Path) -> None:
    class Full(Callback):
        def on_round_end(self, run: Run) -> None:
            if run.rounds_done == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

    sequential = partial(build, engine="sequential")
    (failed,) = run_trials([trial(0.1)], tmp_path, partial(sequential, callbacks=[Full()]))
    assert "cannot be written (No space left on device)" in str(failed.error)
    (resumed,) = run_trials([trial(0.1)], tmp_path, sequential)
    assert not resumed.error and resumed.folder == failed.folder


def test_trials_are_one_program_only_if_they_differ_in_numbers() -> None:
    fedavg = Trial("other", ("--model=FedAvg", "--trainer.seed=0"))
    groups = trials._groups([trial(0.1, 0), fedavg, trial(0.2, 0), trial(0.1, 1)], 32)
    assert [[t.name for t in group] for group in groups] == [
        ["rho_0.1_seed_0", "rho_0.2_seed_0", "rho_0.1_seed_1"], ["other"],
    ]  # fmt: skip
    assert [len(group) for group in trials._groups([trial(0.1, seed) for seed in range(5)], 2)] == [2, 2, 1]
    heads = [Trial(str(n), (f"--model.net.heads={n}",)) for n in (1, 2)]  # of the same shapes, but another net
    assert trials._groups(heads, 32) == [heads[:1], heads[1:]]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("engine", ["batched", "graphed"])
@pytest.mark.usefixtures("one_program")
def test_those_that_end_early_leave_the_others_to_the_bit(engine: str, tmp_path: Path) -> None:
    """Of three trials one goes on after the first bracket. All are compared with the same program without a rule."""
    candidates = [trial(rho) for rho in (0.01, 0.5, 0.9)]
    rule = Hyperband("hyperband", min_iter=2)
    early = partial(StopEarly, rule, "server/test/acc", -1, tmp_path / "early", candidates)
    make = partial(build, engine=engine)

    list(run_trials(candidates, tmp_path / "early", make, early=early))
    list(run_trials(candidates, tmp_path / "whole", make))
    rounds = []
    for candidate in candidates:
        ended, complete = (metrics(run_folder(tmp_path / name, candidate)) for name in ("early", "whole"))
        rounds.append(ended["server/test/acc"][-1][0])
        for name, values in ended.items():
            assert values == complete[name][: len(values)], f"{candidate.name}: {name}"
    assert max(rounds) == ROUNDS and min(rounds) == 2
    finished = candidates[rounds.index(ROUNDS)]
    assert_same(*(state(run_folder(tmp_path / name, finished)) for name in ("early", "whole")))


def test_names_of_different_settings_differ() -> None:
    path = "model.init_weights"
    cases = [
        {path: "a/b"},
        {path: "a-b"},
        {path: "a_b"},
        {path: "x" * 300},
        {path: "x" * 301},
        {path: 0.1},
        {path: 0.1 + 1e-16},
    ]
    cases += [{"x": "1_y_2", "y": "3"}, {"x": "1", "y": "2_y_3"}, {path: {"class_path": "SGD", "init_args": {"lr": 1}}}]
    cases += [{path: {"class_path": "SGD", "init_args": [1]}}]
    names = [name_of(settings) for settings in cases]
    assert len({*names}) == len(cases) and max(map(len, names)) < 200
    assert name_of({"model.rho": 0.1, "trainer.seed": 0}) == "rho_0.1_seed_0"
    assert name_of({"rho": 100.0, "lr": 1e-05, "mu": 0.123456}) == "rho_100.0_lr_1e-05_mu_0.123456"
    assert re.fullmatch(r"rho_0\.0922764_lr_0\.18_[0-9a-f]{8}", name_of({"rho": 0.0922764057884, "lr": 0.18}))


def test_foreign_folders_do_no_harm(tmp_path: Path) -> None:
    list(run_trials([trial(0.1)], tmp_path, build))
    for name in ("version_0_backup", "version_", "version_x"):
        (tmp_path / trial(0.1).name / name).mkdir()
    assert run_folder(tmp_path, trial(0.1)).name == "version_0"
    assert [outcome.error for outcome in run_trials([trial(0.1)], tmp_path, build)] == [None]


def test_a_run_that_somebody_else_trains_stays(tmp_path: Path) -> None:
    """It has no checkpoint yet; a process holds its lock."""
    folder = tmp_path / trial(0.1).name / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("round\n1\n")
    with locked(folder):
        (outcome,) = run_trials([trial(0.1)], tmp_path, build)
    assert "used by another run" in str(outcome.error) and (folder / "metrics.csv").exists()
    (outcome,) = run_trials([trial(0.1)], tmp_path, build)
    assert outcome.error is None and outcome.folder == folder


def test_a_trial_that_another_process_trains_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "POLL_S", 0.01)
    folder = tmp_path / trial(0.1).name
    folder.mkdir()
    names = []
    with ExitStack() as lock:
        lock.enter_context(locked(folder, trials.LOCK))
        for outcome in run_trials([trial(0.1), Trial("other", trial(0.2).args, "fit")], tmp_path, build):
            names.append(outcome.trial.name)
            lock.close()
    assert names == ["other", trial(0.1).name]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    list(run_trials([trial(0.1)], tmp_path, build))
    config = run_folder(tmp_path, trial(0.1)) / "config.yaml"
    config.write_text("trainer: {max_rounds: 6, threads: 1}\n")
    outcomes = [
        *run_trials([trial(0.1)], tmp_path, build, check=lambda _: {"trainer": {"max_rounds": 6, "threads": 2}})
    ]
    assert outcomes[0].error is None
    with pytest.raises(UserError, match=r"version_0 was trained with trainer.max_rounds = 6 \(here: 7\)"):
        next(run_trials([trial(0.1)], tmp_path, build, check=lambda _: {"trainer": {"max_rounds": 7, "threads": 1}}))


class Crash(Callback):
    def on_round_end(self, run: Run) -> None:
        raise RuntimeError("a mistake\nof the user")


def test_an_unexpected_error_is_that_of_its_trial_alone(tmp_path: Path) -> None:
    def crashing(current: Trial, folder: Path) -> Built:
        return build(current, folder, engine="sequential", callbacks=[Crash()] if current == trial(0.1) else [])

    first, second = run_trials([trial(0.1), trial(0.2)], tmp_path, crashing)
    assert (first.error, second.error) == ("RuntimeError: a mistake of the user", None)
    assert [outcome.error for outcome in run_trials([trial(0.1)], tmp_path, build)] == [None], "it is tried again"


class Kill(Callback):
    """Kills its process at a round, as often as the file's number says."""

    def __init__(self, file: Path, round: int) -> None:
        self.file, self.round = file, round

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.rounds_done == self.round and (left := int(self.file.read_text())):
            self.file.write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)


START = multiprocessing.get_context("fork" if FORKS else "spawn")
"""How processes of these tests begin: one that begins anew loads torch and Lightning first."""


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the processes of a sweep in the same way; they begin anew otherwise."""
    stub = SimpleNamespace(get_context=lambda _: START, parent_process=multiprocessing.parent_process)
    monkeypatch.setattr(workers, "multiprocessing", stub)


def build_killed(current: Trial, folder: Path) -> Built:
    """Builds a run whose process is killed once with rho 0.1, and at every start with rho 0.3."""
    callbacks: list[Callback] = [Checkpoints(every_n_rounds=2)]
    for rho, times, round in ((0.1, 1, 5), (0.3, 99, 1)):
        file = folder.parent / f"kills_{rho}"
        if current == trial(rho):
            if not file.exists():
                file.write_text(str(times))
            callbacks.append(Kill(file, round))
    return build(current, folder, engine="sequential", callbacks=callbacks)


@pytest.mark.long
def test_a_process_begins_anew(tmp_path: Path) -> None:
    """It gets what is pickled, and nothing else of the process that starts it."""
    train = partial(trials._train, tmp_path, build, True, None)
    [(group, outcomes)] = workers.train_in_processes(train, deque([Group([trial(0.1)], set())]), 1, tmp_path / "log")
    assert [(outcome.trial, outcome.error) for outcome in outcomes or ()] == [(trial(0.1), None)]
    assert run_folder(tmp_path, group.trials[0]).name == "version_0"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    requested = [trial(0.1), trial(0.2), trial(0.3), trial(0.4)]
    errors = {
        outcome.trial.name: outcome.error for outcome in run_trials(requested, tmp_path / "two", build_killed, jobs=2)
    }
    assert errors.pop(trial(0.3).name) == "its process was killed 3 times after round 1; has it memory enough?"
    assert errors == dict.fromkeys([trial(0.1).name, trial(0.2).name, trial(0.4).name])
    assert (tmp_path / "kills_0.1").read_text() == "0"
    list(run_trials([*requested[:2], requested[3]], tmp_path / "one", partial(build, engine="sequential")))
    for name in errors:
        runs = [tmp_path / place / name / "version_0" for place in ("one", "two")]
        one, two = map(metrics, runs)
        timed = {key for key in one if key.startswith("time/")}
        assert {key: one[key] for key in one.keys() - timed} == {key: two[key] for key in two.keys() - timed}
        assert_same(*map(state, runs))


def sweep_in_a_process(folder: Path, queue: Any) -> None:
    requested = [trial(rho) for rho in (0.1, 0.2, 0.3)]
    queue.put(
        [
            (outcome.trial.name, outcome.error)
            for outcome in run_trials(requested, folder, partial(build, engine="sequential"))
        ]
    )


@pytest.mark.slow
def test_two_processes_share_the_trials_of_a_folder(tmp_path: Path) -> None:
    queue = START.Queue()
    processes = [START.Process(target=sweep_in_a_process, args=(tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    outcomes = [sorted(queue.get()) for _ in processes]
    assert outcomes[0] == outcomes[1] == [(trial(rho).name, None) for rho in (0.1, 0.2, 0.3)]
    assert sorted(path.name for path in tmp_path.glob("*/version_*")) == ["version_0"] * 3
    for process in processes:
        process.join()
