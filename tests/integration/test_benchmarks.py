"""The programs that measure and draw for the documentation, for real and in small."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks import cases, pages
from benchmarks.harness import ROOT, Case, compete, row
from contest import __main__ as contest

SHORT = ("seen",)
"""The suite that `make test-slow` runs; `make test-long` has the others."""
W3 = {"work": "W3-MLP", "method": "FedAvg"}


@pytest.mark.long
def test_cases_take_turns_and_one_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    plain, broken = Case("plain loop", "contest.plain.run", W3), Case("broken", "contest.plain.run", {"work": "W9"})
    graphed = Case("graphed", "contest.ours.run", {**W3, "trainer": {"engine": "graphed"}}, warm=3)
    players = compete([plain, broken, graphed], turns=1, rounds=4, seconds=0.0)
    assert [player.case.name for player in players] == ["plain loop", "graphed"]
    assert "broken fails and is left out: KeyError: 'W9'" in capsys.readouterr().err
    first, second = (row(player, players, ["plain loop"]) for player in players)
    assert first["units"] in (4, 8) and second["engine"] == "graphed" and "vs plain loop" not in first
    assert first["low"] <= first["seconds"] <= first["high"] and first["peak_gb"] > first["more_gb"]
    assert second["vs plain loop, low"] <= second["vs plain loop"] <= second["vs plain loop, high"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in cases.suites(True)]
)
def test_a_suite_in_small(suite: str, tmp_path: Path) -> None:
    """Each case that could be started has all numbers that a column of its table shows."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.cases",
        suite,
        "--small",
        "--turns",
        "1",
        "--out",
        tmp_path / "out.json",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    chosen, columns = cases.suites(True)[suite]
    rows = json.loads((tmp_path / "out.json").read_text())[suite]
    left_out = [line.split()[0] for line in process.stderr.splitlines() if "is left out" in line]
    assert set(left_out) <= {"hessian-eigenthings"}, process.stderr
    assert {line["case"] for line in rows} == {case.name for case in chosen} - {*left_out}
    assert {key for line in rows for key in line} >= {*columns} and f"| {suite} | {columns[0]} |" in process.stdout


@pytest.mark.long
def test_the_contest_takes_its_place_among_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CSV", "PAGE"):
        copy = shutil.copy(getattr(contest, name), tmp_path)
        monkeypatch.setattr(contest, name, Path(copy))
    monkeypatch.setattr(contest, "machine", lambda: "mine")
    before = contest.stored()
    options = ["--only", "plain loop;auto;graphed", "--turns", "1", "--seconds", "0", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["contest", "--work", "W3-MLP", "--methods", "FedAvg,FedSAM", *options])
    contest.main()
    rows = contest.stored()[len(before) :]
    assert contest.stored()[: len(before)] == before
    assert [(line["method"], line["contestant"]) for line in rows] == [
        (method, contestant) for method in ("FedAvg", "FedSAM") for contestant in ("plain loop", "auto", "graphed")
    ]
    assert rows[2]["vs_plain_low"] <= rows[2]["vs_plain"] <= rows[2]["vs_plain_high"]
    assert "**mine**\n\n| W3-MLP: DigitsMLP, ms a round |" in contest.PAGE.read_text()


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    (tmp_path / "algorithms").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drawn(path: Path) -> bool:
    """Returns whether there is a picture in colours."""
    return len(Image.open(path).convert("RGB").getcolors(1 << 20) or []) > 20


@pytest.mark.long
def test_a_page_of_an_algorithm_is_drawn(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PLAIN", f"{pages.PLAIN} --trainer.max_rounds 8")
    pages.algorithms("feddyn")
    assert drawn(docs / "algorithms/feddyn-figure.png")
    config = (docs / "runs/FedDyn_SAM/version_0/config.yaml").read_text()
    ascent = yaml.safe_load(config)["model"]["init_args"]["ascent"]
    assert ascent["class_path"].endswith(".SAM") and ascent["init_args"]["rho"] == 0.1


@pytest.mark.long
def test_hours_of_devices_are_trained_and_drawn(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: f"{args} --trainer.max_rounds 80" for name, args in list(pages.CLOCK.items())[::4]}
    monkeypatch.setattr(pages, "CLOCK", short)
    monkeypatch.setattr(pages, "DEVICES", {name: ((0,), args) for name, (_, args) in pages.DEVICES.items()})
    pages.clock()
    rows = pages.stored(docs / "clock.csv")
    assert [row["step"] for row in pages.runs(rows, "slow network", "FedSAM, asynchronous")[0]] == [
        f"{10 * i}" for i in range(1, 9)
    ]
    assert all(0 < float(row["hours"]) < 1 and 0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert drawn(docs / "clock.png")


def short(name: str, rounds: int, **values: slice) -> None:
    """Writes a sweep of the package with fewer values, where the program finds it first."""
    sweep = yaml.safe_load((ROOT / f"configs/sweeps/{name}.yaml").read_text())
    for key, part in values.items():
        parameter = sweep["parameters"][key.replace("__", ".")]
        parameter["values"] = parameter["values"][part]
    sweep["parameters"]["trainer.max_rounds"] = {"value": rounds}
    Path("sweeps").mkdir()
    Path(f"sweeps/{name}").write_text(yaml.safe_dump(sweep))


@pytest.mark.long
def test_a_sweep_of_compression_becomes_rows_table_and_figure(docs: Path) -> None:
    short("digits_compression", 200, model__parts=slice(4, None, 2))
    pages.compression()
    rows = pages.stored(docs / "compression.csv")
    assert [row["round"] for row in pages.runs(rows, "FedSAM", "sign")[0]] == ["100", "200"] and drawn(
        docs / "compression.png"
    )
    assert {row["bits a number"] for row in rows} == {"1.007", "1.010"}
    assert "| FedAvg | topk 0.0224 | 1.01 |" in pages.compression_table(0.5)


@pytest.mark.long
def test_a_sweep_of_bad_clients_becomes_rows_and_figure(docs: Path) -> None:
    short("digits_robustness", 12, model=slice(2), trainer__aggregation=slice(2, 4), trainer__faults=slice(3))
    pages.robustness()
    rows = pages.stored(docs / "robustness.csv")
    assert {tuple(row[key] for key in pages.ROBUST[:4]) for row in rows} == {
        (method, rule, *kind)
        for method in ("FedAvg", "FedGloSS")
        for rule in ("CoordinateMedian", "TrimmedMean 0.4")
        for kind in (("none", "0.0"), ("nan", "0.1"), ("nan", "0.2"))
    }
    assert drawn(docs / "robustness.png")


def test_the_curvature_at_equal_loss_lies_between_two_measurements() -> None:
    run = [{"train_loss": loss, "lambda_max": value} for loss, value in (("0.4", "1"), ("0.1", "4"), ("0.05", "9"))]
    assert pages.at_loss(run, 0.2) == pytest.approx(2) and pages.at_loss(run, 0.01) != pages.at_loss(run, 0.01)
