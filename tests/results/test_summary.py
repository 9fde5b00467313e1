"""The statistics of a run, on numbers that are worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from fl_lightning import UserError
from fl_lightning.commands.shared.prediction import due
from fl_lightning.results.compare import compare
from fl_lightning.results.curves import curve_files, plot_curves
from fl_lightning.results.metrics import Mode, read_metrics
from fl_lightning.results.summary import headline, last_rounds, summarise, window_of
from fl_lightning.results.table import Markup, cell, columns, latex, row
from fl_lightning.trainer.loggers import CSVLogger
from fl_lightning.trainer.loggers.base import About
from tests.results.folders import configured, write
from tests.runs import metrics, run


def test_summary_by_hand(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {2: 0.5, 4: 0.8, 5: 0.6, 6: 0.7})
    summary = summarise(folder, last=3, target=0.6)
    assert (summary.metric, summary.rounds, summary.last, summary.evaluations) == ("server/test/acc", 6, 3, 3)
    assert summary.mean == pytest.approx(0.7)
    assert summary.std == pytest.approx(0.1)
    assert (summary.best, summary.best_round, summary.final) == (0.8, 4, 0.7)
    assert (summary.minutes, summary.bits, summary.transmissions) == (3.0, 12000, 12)
    assert (summary.target_round, summary.target_minutes) == (4, 2.0)  # round 3 was not evaluated, 5 fell below again
    assert (summary.target_bits, summary.target_transmissions) == (8000, 8)


def test_targets_and_windows(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {2: 0.5, 4: 0.8, 6: 0.8})
    assert summarise(folder, target=0.8).target_round == 4  # reached is at least
    never = summarise(folder, target=0.81)
    assert (never.target_round, never.target_minutes, never.target_bits) == (None, None, None)
    assert summarise(folder).target_round is None
    full, single = summarise(folder, last=100), summarise(folder, last=2)
    assert (full.last, full.evaluations, full.best_round) == (6, 3, 4)
    assert (single.evaluations, single.mean, single.std) == (1, 0.8, None)


def test_metric_of_the_data(tmp_path: Path) -> None:
    """It is what is evaluated beside the loss, whatever its name, or what is asked for."""
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
    with pytest.raises(UserError, match="last = 0: give a whole number of at least 1"):
        summarise(folder, last=0)


@pytest.mark.slow
def test_summary_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file and the line on the terminal have it; the last ``eval_last`` rounds count."""
    args = "--trainer.max_rounds=7 --trainer.eval_every=3 --trainer.eval_last=2 --trainer.enable_progress_bar=true"
    options = "--trainer.callbacks+=Results --trainer.callbacks.target=0.01"
    folder = run("fit", *args.split(), *options.split(), root=tmp_path)
    logged = metrics(folder)["server/test/acc"]
    assert [at for at, _ in logged] == [3, 6, 7]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == asdict(summarise(folder, target=0.01))
    assert summary["mean"] == pytest.approx((logged[1][1] + logged[2][1]) / 2)
    assert (summary["target_round"], summary["target_transmissions"]) == (3, 6)
    out = capsys.readouterr().out
    assert f"last 2 of 7 rounds: mean test accuracy {summary['mean']:.4f}" in out and "of 2 evaluations" in out


def test_curves_of_long_runs_are_means(tmp_path: Path) -> None:
    accuracy = {**{at: at / 1000 for at in range(50, 951, 50)}, 998: 0.2, 999: 0.3, 1000: 0.7}
    folder = write(tmp_path / "run", accuracy, rounds=1000)
    mean_line, single = plot_curves({"run": folder / "metrics.csv"}).axes[0].lines
    assert len(mean_line.get_xdata()) == 20 and len(single.get_xdata()) == 22
    assert [float(d[-1]) for d in mean_line.get_data()] == pytest.approx([999, 0.4])


@pytest.mark.parametrize(
    ("rounds", "eval_last", "last"),
    [
        (10_000, 100, 100), (20_000, 100, 100), (1300, 100, 100), (500, 50, 50), (1000, 50, 50),  # the papers' runs
        (1000, 10, 10), (10_000, 1, 100), (800, 1, 80), (30, 1, 3), (5, 1, 1), (1, 1, 1),
        (20, 10, 10), (19, 10, 2), (150, 100, 15),  # never most of a run
    ],
)  # fmt: skip
def test_rounds_of_the_headline(rounds: int, eval_last: int, last: int) -> None:
    assert last_rounds(rounds, eval_last) == last
    assert last_rounds(rounds, last) == last  # summary.json of a run from Python stands for its setting


def test_directions_of_another_form_are_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {1: 0.5}, rounds=1)
    (folder / "directions.json").write_text('{"acc": "up"}')
    with pytest.raises(UserError, match=r"directions.json: not what a run writes there; restore or remove it$"):
        summarise(folder)


def test_one_headline_for_a_run(tmp_path: Path) -> None:
    """The config sets its window, else the summary, else the run's length; there is one at a round, and of flatness."""
    folder = write(tmp_path / "run", {t: t / 100 for t in range(1, 21)}, rounds=20, lambdas={10: 9.0, 20: 1.0})
    acc, lam = "server/test/acc", "flatness/lambda_max"
    assert headline(folder, acc) == pytest.approx(0.195) and headline(folder, lam) == 1.0
    (folder / "summary.json").write_text('{"last": 4}')
    assert headline(folder, acc) == pytest.approx(0.185) == summarise(folder).mean
    (folder / "summary.json").write_text('{"last"')
    with pytest.raises(UserError, match=r"summary.json: not readable \([^\n]*\); restore or remove it$"):
        headline(folder, acc)
    (folder / "config.yaml").write_text("trainer: {eval_last: 10}")
    assert headline(folder, acc) == pytest.approx(0.155) == summarise(folder).mean
    assert summarise(folder, last=20).mean == pytest.approx(0.105)
    assert summarise(folder, last=20).flatness == {"lambda_max": 5.0}
    assert headline(folder, acc, at=7) == 0.07 and headline(folder, acc, at=99) == 0.2
    assert headline(folder, "server/val/acc") is None and headline(tmp_path, acc) is None
    sparse = write(tmp_path / "sparse", {4: 0.25}, rounds=20)  # its last evaluation lies before the window
    assert headline(sparse, acc) == 0.25 == summarise(sparse).mean
    assert summarise(folder).flatness == {"lambda_max": 1.0}
    assert window_of([folder]) == "last 10" and window_of([folder, sparse]) == "last 2 to 10"
    assert window_of([tmp_path]) == "", "no round"


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_not_finite_neither_raises_nor_wins(worst: float, mode: Mode, tmp_path: Path) -> None:
    broken = configured(tmp_path / "broken", {2: worst, 4: 0.5, 6: worst}, lr=0.1, lambdas={6: worst})
    seed = configured(tmp_path / "seed", {2: 0.1, 4: 0.5, 6: 0.7}, lr=0.1, seed=1, lambdas={6: 2.0})
    good = configured(tmp_path / "good", {2: 0.2, 4: 0.4, 6: 0.6}, lr=0.2, lambdas={6: 3.0})
    summary = summarise(broken, last=6, target=0.5, mode=mode)
    assert math.isnan(summary.mean) and summary.std is not None and math.isnan(summary.std)
    assert (summary.best, summary.best_round, summary.target_round) == (0.5, 4, 4)
    groups = compare([broken, seed, good], mode=mode)
    mean, *_ = shown = columns(groups)
    assert [cell(group, mean, groups, Markup(best="<{}>")) for group in groups] == ["0.7000 (1 of 2)", "<0.6000>"]
    (lambda_max,) = [column for column in shown if column.key == "lambda_max"]
    assert [cell(group, lambda_max, groups, Markup(best="<{}>")) for group in groups] == ["2 (1 of 2)", "<3>"]
    assert cell(compare([broken])[0], mean) == "nan"
    assert "nan" not in latex(groups, shown) and row(groups[0], shown)["finite"] == 1
    assert mode == "min" or curve_files({group.name: group.metrics for group in groups})  # drawn in either way
    with pytest.raises(UserError, match=r"^reference = .*broken: its server/test/acc is not finite; give a target$"):
        compare([broken], reference=broken)


@pytest.mark.parametrize("cut", ["2,0.5,0.2e", "2,0.5,-", "2,", "2", "2,0.5,0.12"])
def test_a_row_that_a_crash_has_cut_short_is_left_out(cut: str, tmp_path: Path) -> None:
    """Every reader leaves it out; the last number of 2,0.5,0.12 may have been 0.1234."""
    log = CSVLogger()
    log.start(tmp_path, {}, 0, About("fit", "", (), 1))
    log.log_metrics({"a": 0.5, "server/test/acc": 0.1}, 1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(cut)
    assert read_metrics(tmp_path / "metrics.csv") == {"a": [(1, 0.5)], "server/test/acc": [(1, 0.1)]}
    assert summarise(tmp_path).rounds == 1
    CSVLogger().check(tmp_path, log.state_dict(), 1)


@pytest.mark.parametrize(
    ("rounds", "every", "last"), [(7, 3, 2), (7, 3, 1), (6, 3, 1), (5, 10, 8), (10, 1, 4), (9, 4, 6)]
)
def test_planned_evaluations(rounds: int, every: int, last: int) -> None:
    assert due(rounds, every, last) == sum(t % every == 0 or t > rounds - last for t in range(1, rounds + 1))
