"""The controller of a sweep: what it proposes, what counts as failed, and what is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.core import UserError
from fl_lightning.sweeps.controller import Controller
from fl_lightning.sweeps.file import Sweep
from fl_lightning.sweeps.trials import Built, Trial
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.storage.run_folder import locked
from tests.sweeps.test_trials import build


def controller(folder: Path, rhos: Sequence[float], **changes: Any) -> Controller:
    file = folder / "mine.yaml"
    text = {
        "method": "grid",
        "metric": {"name": "server/test/loss", "goal": "minimize"},
        "parameters": {"model.rho": {"values": list(rhos)}},
        "command": ["fit", "${args}"],
    }
    file.write_text(yaml.safe_dump({**text, **changes}))
    return Controller(Sweep.read(file), folder / "out", [0], 0)


class Spoil(Callback):
    def on_round_end(self, run: Run) -> None:
        run.log({"server/test/loss": math.nan})


def diverging(trial: Trial, folder: Path) -> Built:
    """The loss on the test set of one trial is NaN, though its weights are finite."""
    spoiled = trial.settings["model.rho"] == 0.2
    return build(trial, folder, engine="sequential", callbacks=[Spoil()] if spoiled else [])


def test_a_trial_whose_metric_is_not_finite_has_failed(tmp_path: Path) -> None:
    sweep = controller(tmp_path, [0.2, 0.1])
    outcomes = {outcome.trial.settings["model.rho"]: outcome.error for outcome in sweep.run(diverging)}
    assert outcomes == {0.1: None, 0.2: "server/test/loss = nan: not finite"}
    best = sweep.best()
    assert best is not None and best[0] == {"model.rho": 0.1}
    states = {trial.settings["model.rho"]: sweep.state(trial)[0] for trial in sweep.trials}
    assert states == {0.1: "finished", 0.2: "failed"}


class Guess(Callback):
    """The accuracy of one that guesses digits, or that of a model that has learned them."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_round_end(self, run: Run) -> None:
        run.log({"server/test/acc": self.value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accuracies", "doubts"),
    [
        (
            {0.1: 0.1, 0.2: 0.1},
            ["a tie: 2 of 2 settings reach it, ", "at chance: a guess among 10 classes is right in 0.1 "],
        ),
        ({0.1: 0.05, 0.2: 0.103}, ["at chance: "]),
        ({0.1: 0.8, 0.2: 0.8}, ["a tie: 2 of 2 "]),
        ({0.1: 0.8, 0.2: 0.2}, []),
    ],
)
def test_a_best_that_is_no_better_than_others_or_a_guess_says_so(
    accuracies: dict[float, float], doubts: list[str], tmp_path: Path
) -> None:
    def guessing(trial: Trial, folder: Path) -> Built:
        return build(trial, folder, engine="sequential", callbacks=[Guess(accuracies[trial.settings["model.rho"]])])

    sweep = controller(tmp_path, [*accuracies], metric={"name": "server/test/acc", "goal": "maximize"})
    assert sweep.doubts() == [] and all(outcome.error is None for outcome in sweep.run(guessing))
    actual = sweep.doubts()
    assert len(actual) == len(doubts) and all(map(str.startswith, actual, doubts))


def test_calls_on_one_folder_write_its_table_at_the_same_time(tmp_path: Path) -> None:
    sweep = controller(tmp_path, [0.1])
    for _ in sweep.run(build):
        pass
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: sweep.write(), range(40)))
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert not {"name", "default_root_dir", "enable_progress_bar"} & best["trainer"].keys()


def test_settings_that_are_drawn_again_are_one_trial(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "random", "run_cap": 6}
    sweep = controller(tmp_path, [0.1, 0.2], **options)
    rhos = [outcome.trial.settings["model.rho"] for outcome in sweep.run(build)]
    assert sorted(rhos) == [0.1, 0.2]
    assert len((tmp_path / "out" / "sweep.csv").read_text().splitlines()) == 3


def test_a_target_ends_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.trainer.parallel_runs.pays", lambda runs: False)
    metric = {"name": "server/test/acc_headline", "goal": "maximize", "target": 0.01}
    for _ in range(2):
        sweep = controller(tmp_path, [0.1, 0.2, 0.3], metric=metric)
        assert len(list(sweep.run(partial(build, engine="sequential")))) == 1
        assert [sweep.state(trial)[0] for trial in sweep.trials] == ["finished", "waiting", "waiting"]
        assert sweep.label == "server/test/acc, last 1"


def test_what_does_not_vary_is_in_no_name(tmp_path: Path) -> None:
    lr = {"model.optimizer.lr": {"value": 0.05}}
    sweep = controller(tmp_path, [0.1], parameters={"model.rho": {"value": 0.1}, **lr, "model.mu": {"values": [1, 2]}})
    names = [sweep._trial(settings, 0).name for settings in sweep.search.propose(2)]
    assert names == ["mu_1_seed_0", "mu_2_seed_0"]


@pytest.mark.parametrize(
    "entry", [{"min": 0, "max": 10**9}, {"distribution": "q_uniform", "min": 0, "max": 1, "q": 1e-9}]
)
def test_a_grid_without_end_is_refused_at_once(entry: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"grid"):
        controller(tmp_path, [], parameters={"model.rho": entry})


def test_a_second_sweep_by_bayes_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sweep = controller(tmp_path, [0.1], method="bayes", run_cap=1)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(UserError, match=r"used by another run \(process \d+\)"):
        next(sweep.run(build))


@pytest.mark.parametrize(("text", "what"), [("[4", "not readable"), ("{}", "not what a run writes there")])
def test_damaged_sizes_of_batches_are_one_line(text: str, what: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sweep = controller(tmp_path, [0.1], method="bayes", run_cap=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "batches.json").write_text(text)
    with pytest.raises(UserError, match=rf"batches\.json: {what}[^\n]*; restore or remove it$"):
        next(sweep.run(build))


@pytest.mark.parametrize(("before", "after"), [(1, 9), (9, 1)])
def test_bayes_follows_the_jobs_and_resumes_with_others(before: int, after: int, tmp_path: Path) -> None:
    """It proposes as many settings as there are processes, at least 4; a sweep that goes on proposes the same ones."""
    pytest.importorskip("optuna")
    uniform: dict[str, Any] = {
        "method": "bayes", "run_cap": 20, "parameters": {"model.rho": {"min": 0.0, "max": 1.0}},
    }  # fmt: skip

    def names(jobs: int, batches: int) -> list[list[str]]:
        """Returns the trials proposed at a time; they finish without being trained."""
        sweep, proposals = controller(tmp_path, [], **uniform), list[list[str]]()
        (tmp_path / "out").mkdir(exist_ok=True)
        propose = sweep.search.propose

        def proposed(n: int) -> list[dict[str, Any]]:
            settings = propose(n) if len(proposals) < batches else []
            for trial in (sweep._trial(point, 0) for point in settings):
                folder = tmp_path / "out" / trial.name / "version_0"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "summary.json").write_text("{}")
                (folder / "metrics.csv").write_text(f"round,server/test/loss\n1,{trial.settings['model.rho']}\n")
            proposals.append([sweep._trial(point, 0).name for point in settings])
            return settings

        sweep.search.propose = proposed  # type: ignore[method-assign]
        list(sweep.run(build, jobs))
        return [batch for batch in proposals if batch]

    first = names(before, 2)
    assert [len(batch) for batch in first] == [max(before, 4)] * 2
    again = names(after, 10)
    assert again[:2] == first and len(again[2]) == min(max(after, 4), 20 - 2 * max(before, 4))
    assert sum(map(len, again)) == 20
