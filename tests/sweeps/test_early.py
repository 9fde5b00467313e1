"""Hyperband decides by what trials have reached, in an order that does not depend on processes or kills."""

import os
import signal
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_lightning import Checkpoints
from fl_lightning.results import metrics
from fl_lightning.sweeps import trials
from fl_lightning.sweeps.controller import StopEarly
from fl_lightning.sweeps.file import Hyperband
from fl_lightning.sweeps.trials import Built, MustWaitError, Trial, run_trials
from fl_lightning.trainer import Callback, Run, RunFolder, locked
from tests.runs import metrics as metrics_of
from tests.sweeps.test_trials import START, build, quick_start, run_folder, trial

__all__ = ["quick_start"]
ACC = "server/test/acc"
RULE = Hyperband("hyperband", min_iter=2, eta=4)
ORDER = [Trial(f"t{k}", ()) for k in range(3)]


def wrote(folder: Path, k: int, *values: float) -> Path:
    """Writes the values of a trial that runs."""
    run = folder / f"t{k}" / "version_0"
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.csv").write_text("round,a\n" + "".join(f"{n + 1},{value}\n" for n, value in enumerate(values)))
    return run


def stops(folder: Path, k: int, value: float, not_awaited: tuple[str, ...] = ()) -> bool:
    """Returns whether trial k ends with this value at its second evaluation; its file has the first one alone."""
    early = StopEarly(RULE, "a", 1, folder, ORDER, ORDER[k], not_awaited)
    run: Any = SimpleNamespace(
        should_stop=False, rounds_done=1, round_metrics={"a": value}, folder=RunFolder(wrote(folder, k, 0.5))
    )
    early.on_fit_start(run)
    run.rounds_done = 2
    early.on_round_end(run)
    return bool(run.should_stop)


def test_a_trial_is_compared_with_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is read once; what is not finite is the worst, and a run that somebody removes does no harm."""
    read: list[Path] = []
    monkeypatch.setattr(
        metrics, "read_metrics", lambda path, real=metrics.read_metrics: read.append(path) or real(path)
    )
    assert not stops(tmp_path, 0, 0.5)
    first = wrote(tmp_path, 0, 0.5, 0.5)
    assert not stops(tmp_path, 1, 0.4) and stops(tmp_path, 1, 0.6) and stops(tmp_path, 1, float("nan"))
    assert read.count(first / "metrics.csv") == 2, "before and after it has changed"
    wrote(tmp_path, 1, 0.5, 0.6)
    assert stops(tmp_path, 2, 0.55) and not stops(tmp_path, 2, 0.5)
    wrote(tmp_path, 2, 0.5, 0.1)
    assert not stops(tmp_path, 1, 0.4), "those after it do not count"
    (first / "metrics.csv").unlink()
    assert not stops(tmp_path, 1, 0.9, not_awaited=("t0",))


def test_a_trial_waits_for_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "POLL_S", 0.01)
    run = wrote(tmp_path, 0, 0.1)
    with pytest.raises(MustWaitError, match="t0 comes first"):
        stops(tmp_path, 1, 0.2)
    with locked(run.parent, trials.LOCK):  # somebody trains it
        reaches = threading.Timer(0.1, wrote, (tmp_path, 0, 0.1, 0.1))
        reaches.start()
        assert stops(tmp_path, 1, 0.2)
        reaches.join()
    wrote(tmp_path, 0, 0.1)
    (run / trials.FAILED).write_text("diverged\n")
    assert not stops(tmp_path, 1, 0.2)


class Kill(Callback):
    """Kills its process once, when a run reaches a round: before or after what the other callbacks do then."""

    def __init__(self, file: Path, round: int, late: bool) -> None:
        self.file, self.round, self.late = file, round, late

    def on_round_end(self, run: Run) -> None:
        self.kill(run, late=False)

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.kill(run, late=True)

    def on_fit_end(self, run: Run) -> None:
        self.kill(run, late=True)

    def kill(self, run: Run, late: bool) -> None:
        if run.rounds_done == self.round and late is self.late and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def build_killed(trial: Trial, folder: Path, engine: str, which: Trial, round: int, late: bool) -> Built:
    callbacks: list[Callback] = [Checkpoints(every_n_rounds=2)]
    if trial == which:
        callbacks.append(Kill(folder / "killed", round, late))
    return build(trial, folder, engine=engine, callbacks=callbacks)


ASKED = [trial(rho) for rho in (0.5, 0.9, 0.01, 0.7, 0.3)]


def sweep(folder: Path, make: trials.Build, jobs: int) -> None:
    rule = partial(StopEarly, Hyperband("hyperband", min_iter=1, eta=3), ACC, -1, folder, ASKED)
    list(run_trials(ASKED, folder, make, jobs, early=rule))


def decided(folder: Path) -> dict[str, list[float]]:
    return {trial.name: [value for _, value in metrics_of(run_folder(folder, trial))[ACC]] for trial in ASKED}


@pytest.mark.long
@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_kills_change_no_decision(engine: str, jobs: int, tmp_path: Path) -> None:
    """A process is killed at a bracket, before and after the decision, and between brackets; so is the sweep's own."""
    sweep(tmp_path / "whole", partial(build, engine="sequential"), 1)
    expected = decided(tmp_path / "whole")
    assert len({len(values) for values in expected.values()}) > 1, "some end early"
    for n, (k, round, late) in enumerate([(1, 1, False), (1, 1, True), (2, 3, False), (3, 2, True), (4, 1, True)]):
        folder = tmp_path / str(n)
        make = partial(build_killed, engine=engine, which=ASKED[k], round=round, late=late)
        for _ in range(2):  # with one job the first call is killed
            process = START.Process(target=sweep, args=(folder, make, jobs))
            process.start()
            process.join()
        assert decided(folder) == {name: pytest.approx(values, abs=0.01) for name, values in expected.items()}
