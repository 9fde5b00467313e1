"""The statistics of a run and the comparison of several, on numbers that are worked out by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path

import pytest
import yaml

from fl_lightning import UserError
from fl_lightning.commands.plan import due
from fl_lightning.results.compare import cell, columns, compare, latex
from fl_lightning.results.curves import plot_curves
from fl_lightning.results.summary import summarise
from tests.runs import forked, metrics, run


def write(folder: Path, accuracy: dict[int, float], rounds: int = 6, name: str = "acc", units: int = 2) -> Path:
    """A run of rounds of 30 s and ``units`` models of 1000 bits a round, evaluated in some of them."""
    folder.mkdir(parents=True)
    rows = [f"round,server/test/loss,time/round_s,server/test/{name},comm/total_bits,comm/transmissions"]
    rows += [f"{t},1.0,30,{accuracy.get(t, '')},{1000 * units * t},{units * t}" for t in range(1, rounds + 1)]
    (folder / "metrics.csv").write_text("\n".join(rows))
    return folder


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


def configured(folder: Path, accuracy: dict[int, float], units: int = 2, seed: int = 0, **settings: object) -> Path:
    """The same with a config, as the command line leaves it."""
    data = {"class_path": "Digits", "init_args": {"seed": settings.pop("data_seed", 0)}}
    config = {
        "model": {"class_path": "FedAvg", "init_args": {"lr": settings.pop("lr", 0.1)}},
        "data": data,
        "trainer": {"seed": seed, "max_rounds": 6, **settings},
    }
    (write(folder, accuracy, units=units) / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """FedAvg with three seeds, another method with two, one of which never gets as far as FedAvg."""
    root = tmp_path / "runs"
    return [
        configured(root / "FedAvg" / "version_0", {3: 0.5, 6: 0.5}, engine="sequential"),
        configured(root / "FedAvg" / "version_1", {3: 0.5, 6: 0.75}, seed=1, engine="graphed"),
        configured(root / "FedAvg" / "version_2", {3: 0.5, 6: 1.0}, data_seed=1, name="x"),
        configured(root / "my_method" / "rho_0.1_seed_0" / "version_0", {3: 0.8, 6: 0.9}, units=4, lr=0.2),
        configured(root / "my_method" / "rho_0.1_seed_1" / "version_0", {3: 0.5, 6: 0.5}, units=4, lr=0.2, seed=1),
    ]


def test_groups_by_hand(runs: list[Path]) -> None:
    average, mine = compare(runs, last=1, reference=runs[1])
    assert (average.name, mine.name) == ("FedAvg", "rho_0.1")
    assert average.seeds == [(0, 0), (1, 0), (0, 1)] and mine.folders == runs[3:]
    assert average.values("mean") == [0.5, 0.75, 1.0]
    assert {run.target for run in (*average.runs, *mine.runs)} == {0.75}  # what FedAvg reaches
    assert average.values("target_round") == [6, 6] and mine.values("target_round") == [3]
    last, *_, transmissions, cost = columns([average, mine], average)
    assert cell(average, last, "{} ± {}", "×") == "0.7500 ± 0.2500"
    assert cell(mine, transmissions, "", "×") == "12 (1 of 2)"
    assert cell(mine, cost, "", "×") == "1.00 (1 of 2)"  # half the rounds, twice the models
    (never,) = compare(runs[4:], target=0.9)
    assert cell(never, transmissions, "", "×") == "×"


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    """One folder may hold different configs; the same name may lie in different folders; a run may have no config."""
    folders = [
        configured(tmp_path / "a" / "FedAvg" / "version_0", {6: 0.5}),
        configured(tmp_path / "a" / "FedAvg" / "version_1", {6: 0.5}, lr=0.2),
        configured(tmp_path / "a" / "FedSAM" / "version_0", {6: 0.5}, lr=0.3),
        configured(tmp_path / "b" / "FedSAM" / "version_0", {6: 0.5}, lr=0.4),
        write(tmp_path / "b" / "Mine" / "version_0", {6: 0.5}),
    ]
    names = [group.name for group in compare(folders)]
    assert names == ["FedAvg/version_0", "FedAvg/version_1", "a/FedSAM", "b/FedSAM", "Mine"]


def test_what_cannot_be_compared(runs: list[Path], tmp_path: Path) -> None:
    twin = configured(tmp_path / "again" / "version_0", {6: 0.5}, threads=1)
    with pytest.raises(UserError, match=r"runs = .*again/version_0: the same .* as .*FedAvg/version_0; leave"):
        compare([*runs, twin])
    with pytest.raises(UserError, match="reference = elsewhere: none of the runs"):
        compare(runs, reference="elsewhere")
    other = write(tmp_path / "segmentation" / "version_0", {6: 0.5}, name="miou")
    with pytest.raises(UserError, match="metric = server/test/acc: not in"):
        compare([*runs, other])


def test_latex(runs: list[Path]) -> None:
    groups = compare([*runs[:3], runs[4]], target=0.8, last=1)
    groups[1] = replace(groups[1], name="my_method")
    lines = latex(groups, columns(groups)).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrrr}"
    assert [lines[i] for i in (1, 3, 6, 7)] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    first = r"FedAvg & $75.00 \pm 25.00$ & 75.00 & 75.00 & 3.00 & 0.000 & 6 (1 of 3) & "
    assert lines[4] == first + r"3.00 (1 of 3) & 0.000 (1 of 3) & 12 (1 of 3) \\"
    assert lines[5] == r"my\_method & 50.00 & 50.00 & 50.00 & 3.00 & 0.000" + 4 * r" & $\times$" + r" \\"


def test_compare_command(tmp_path: Path) -> None:
    """Real runs of two methods with two seeds each, compared by the command."""
    folders = [
        run("fit", f"--trainer.seed={seed}", root=tmp_path / "runs", model=model)
        for model in ("FedAvg", "FedSAM")
        for seed in (0, 1)
    ]
    options = ["--target=0.01", f"--reference={folders[0]}", "--out=out"]
    with forked("compare", *map(str, folders), *options, cwd=tmp_path) as child:
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0 and err == ""
    assert "FedAvg-Digits" in out and "cost in B" in out
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"FedAvg-Digits", "FedSAM-Digits"} and rows["FedSAM-Digits"]["seeds"] == "2"
    for model, pair in (("FedAvg", folders[:2]), ("FedSAM", folders[2:])):
        row, means = rows[f"{model}-Digits"], [summarise(folder).mean for folder in pair]
        assert float(row["mean"]) == pytest.approx(sum(means) / 2)
        assert float(row["mean_sd"]) == pytest.approx(abs(means[0] - means[1]) / sqrt(2))
        assert float(row["target_cost"]) == pytest.approx(0.5) and row["reached"] == "2"  # round 1 of 2, as FedAvg
    assert r"\toprule" in (tmp_path / "out" / "compare.tex").read_text()
    assert (tmp_path / "out" / "curves.pdf").read_bytes().startswith(b"%PDF")
    with forked("compare", "nowhere", cwd=tmp_path) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (1, "error: run = nowhere: no metrics.csv there; give the folder of a run\n")
