"""The statistics of a run, on numbers that are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import sqrt
from pathlib import Path

import pytest

from fl_lightning import UserError
from fl_lightning.commands.plan import due
from fl_lightning.results.curves import plot_curves
from fl_lightning.results.summary import summarise
from tests.results.folders import write
from tests.runs import metrics, run


def test_summary_by_hand(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {2: 0.5, 4: 0.8, 5: 0.6, 6: 0.7})
    found = summarise(folder, last=3, target=0.6)
    assert (found.metric, found.rounds, found.last, found.evaluations) == ("server/test/acc", 6, 3, 3)
    assert found.mean == pytest.approx(0.7)
    assert found.std == pytest.approx(0.1) and found.std_population == pytest.approx(sqrt(0.02 / 3))
    assert (found.best, found.best_round, found.final) == (0.8, 4, 0.7)
    assert (found.minutes, found.bits, found.transmissions) == (3.0, 12000, 12)
    assert (found.target_round, found.target_minutes) == (4, 2.0)  # round 3 was not evaluated, 5 fell below again
    assert (found.target_bits, found.target_transmissions) == (8000, 8)
    assert summarise(folder / "metrics.csv", last=3, target=0.6) == found


def test_targets_and_windows(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {2: 0.5, 4: 0.8, 6: 0.8})
    assert summarise(folder, target=0.8).target_round == 4  # reached is at least
    never = summarise(folder, target=0.81)
    assert (never.target_round, never.target_minutes, never.target_bits) == (None, None, None)
    assert summarise(folder).target_round is None
    whole, single = summarise(folder), summarise(folder, last=2)
    assert (whole.last, whole.evaluations, whole.best_round) == (6, 3, 4)
    assert (single.evaluations, single.mean, single.std, single.std_population) == (1, 0.8, None, 0)


def test_metric_of_the_data(tmp_path: Path) -> None:
    """What is evaluated beside the loss, whatever its name; or what is asked for."""
    folder = write(tmp_path / "run", {6: 0.4}, name="miou")
    assert summarise(folder).metric == "server/test/miou" and summarise(folder).mean == 0.4
    assert summarise(folder, metric="server/test/loss").mean == 1.0


def test_what_cannot_be_summarised(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {2: 0.5})
    with pytest.raises(UserError, match=r"run = nowhere: no metrics\.csv there"):
        summarise("nowhere")
    with pytest.raises(UserError, match=r"metric = server/val/acc: not in .*, which has server/test/loss, "):
        summarise(folder, metric="server/val/acc")
    with pytest.raises(UserError, match="last = 2: no server/test/acc in the last 2 of 6 rounds"):
        summarise(folder, last=2)
    with pytest.raises(UserError, match="last = 0: at least 1 round"):
        summarise(folder, last=0)


def test_summary_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file, and the line on the terminal; the last rounds are all evaluated."""
    args = "--trainer.max_rounds=7 --trainer.eval_every=3 --trainer.eval_last=2 --trainer.enable_progress_bar=true"
    options = "--trainer.callbacks+=Results --trainer.callbacks.last=4 --trainer.callbacks.target=0.01"
    folder = run("fit", *args.split(), *options.split(), root=tmp_path)
    logged = metrics(folder)["server/test/acc"]
    assert [at for at, _ in logged] == [3, 6, 7]
    found = json.loads((folder / "summary.json").read_text())
    assert found == asdict(summarise(folder, last=4, target=0.01))
    assert found["mean"] == pytest.approx((logged[1][1] + logged[2][1]) / 2)
    assert (found["target_round"], found["target_transmissions"]) == (3, 6)
    out = capsys.readouterr().out
    assert f"last 4 rounds: mean test acc {found['mean']:.4f}" in out and "of 2 evaluations" in out


def test_curves_of_long_runs_are_means(tmp_path: Path) -> None:
    accuracy = {**{at: at / 1000 for at in range(50, 951, 50)}, 998: 0.2, 999: 0.3, 1000: 0.7}
    folder = write(tmp_path / "run", accuracy, rounds=1000)
    mean_line, single = plot_curves({"run": folder / "metrics.csv"}).axes[0].lines
    assert len(mean_line.get_xdata()) == 20 and len(single.get_xdata()) == 22
    assert [float(d[-1]) for d in mean_line.get_data()] == pytest.approx([999, 0.4])


@pytest.mark.parametrize(("evaluated", "last"), [(3, 3), (1, 5)])
def test_last_rounds_are_those_all_evaluated(evaluated: int, last: int, tmp_path: Path) -> None:
    folder = run("fit", "--trainer.max_rounds=5", f"--trainer.eval_last={evaluated}", root=tmp_path)
    assert json.loads((folder / "summary.json").read_text())["last"] == last  # at most the rounds that there are


@pytest.mark.parametrize(
    ("rounds", "every", "last"), [(7, 3, 2), (7, 3, 1), (6, 3, 1), (5, 10, 8), (10, 1, 4), (9, 4, 6)]
)
def test_planned_evaluations(rounds: int, every: int, last: int) -> None:
    assert due(rounds, every, last) == sum(t % every == 0 or t > rounds - last for t in range(1, rounds + 1))
