"""``fl-lightning reproduce`` on the command line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from fl_lightning.results.compare import compare
from fl_lightning.results.report.files import read_group
from fl_lightning.results.report.tables import papers
from tests.runs import cli

DIGITS = [
    "--model.net=DigitsMLP", "--data=Digits", "--data.mean=null", "--data.std=null", "--data.augment=null",
    "--trainer.engine=sequential", "--trainer.threads=1", "--trainer.accelerator=cpu",
]  # fmt: skip
"""Settings of the runs: small data in the place of CIFAR-10."""
TABLE = ["reproduce", "fedgloss", "3", "--rows=FedAvg,FedSAM", "--columns=CIFAR10,HsuCNN,alpha=0"]


def test_dry_run_shows_the_runs_and_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*TABLE, "--rounds=0.0004", "--seeds=0,1", "--dry-run", *DIGITS)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("fl-lightning fit")]
    assert len(lines) == 4 and all("--trainer.max_rounds=4 " in line for line in lines)
    assert [re.findall(r"seed=(\d)", line) for line in lines] == [["0"], ["1"]] * 2
    assert re.search(r"4 runs, about [\d.]+ \w+ with --jobs 1; about [\d.]+ [MG]B of memory", shown)
    assert "CIFAR10, HsuCNN, alpha=0, 5/100, E=1, FedSAM, acc: known\nknown: 2 of 2 cells\n" in shown
    assert list(tmp_path.iterdir()) == []
    cli("reproduce", "fedgmt", "2", "--rows=FedGMT", "--columns=AGNews,Path(2)", "--rounds=0.004", "--dry-run", *DIGITS)
    shown = capsys.readouterr().out
    assert "FedGMT, minutes@82: minutes@82: a time of the paper's machine" in shown and "known: 2 of 3 cells" in shown


def test_declared_numbers_need_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgf", "3", "--rows=FedGF", "--out=mine")
    assert "declared" in capsys.readouterr().out and [path.suffix for path in sorted(Path("mine").iterdir())] == [
        ".csv", ".md", ".tex"
    ]  # fmt: skip


def test_runs_and_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*TABLE, "--rounds=0.0002", "--out=mine", *DIGITS)
    shown = capsys.readouterr().out
    assert "fedgloss, Table 3: 0.02 % of the rounds" in shown
    with Path("mine/table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["value"], row["seeds"]) for row in rows] == [
        ("FedAvg", "59.9", "1"),
        ("FedSAM", "70.2", "1"),
    ]
    for row in rows:
        folder = Path(row["folders"])
        assert json.loads((folder / "summary.json").read_text())["final"] == pytest.approx(float(row["ours"]) / 100)
        assert json.loads((folder / "reproduction.json").read_text())[0]["algorithm"] == row["algorithm"]
    shown = {line.cell.algorithm: line for _, line in papers([(of, read_group(of)) for of in compare(["mine"])])}
    assert [(shown[row["algorithm"]].mean, shown[row["algorithm"]].settings) for row in rows] == [
        (float(row["ours"]), row["settings"].removeprefix("'")) for row in rows
    ]  # the report has the same numbers
    before = {path: path.stat().st_mtime_ns for path in Path("mine").glob("*/*/*/*/metrics.csv")}
    cli(*TABLE, "--rounds=0.0002", "--out=mine", *DIGITS)  # nothing is run twice
    assert len(before) == 2 and before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(SystemExit, match=r"^error: mine/.*was trained with trainer.max_rounds = 2 \(here: 3\)"):
        cli(*TABLE, "--rounds=0.0003", "--out=mine", *DIGITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (["9", "--rows=FedGloSS+SAM", "--columns=CIFAR10", "--seeds=0,1"], {"acc": "84.8", "lambda_max": "2.8"}),
        (["6", "--rows=SAM", "--columns=CIFAR10,centralized", "--rounds=0.01"], {"acc": "87.1"}),
        (["1", "--rows=FedSAM", "--columns=lambda_global@airplane2,CIFAR10"], {"lambda_global@airplane2": "30.6"}),
        (["10", "--rows=FedAvg", "--columns=cost,CIFAR10,HsuCNN,alpha=0"], {"cost": "1.0"}),
    ],
    ids=["flatness", "centralized", "clients", "target"],
)
def test_flatness_and_centralized_cells(
    table: list[str], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgloss", "--rounds=0.0002", *table, "--out=mine", *DIGITS)
    with Path("mine/table.csv").open(newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert {metric: row["value"] for metric, row in rows.items()} == expected
    for row in rows.values():
        assert float(row["difference"]) == pytest.approx(float(row["ours"]) - float(row["value"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trainer.max_rounds=7"], "trainer.max_rounds = 7: the table sets it; give --rounds"),
        (["--trainer.seed=7"], "trainer.seed = 7: the table sets it; give --seeds"),
        (["--seeds=0,0"], "seeds = 0,0: give different numbers, such as 0,1,2"),
        (["--rounds=2"], "rounds = 2.0: a fraction of the paper's rounds"),
        (["--data.num_client=7"], "data.num_client = 7: no such setting"),
    ],
)
def test_settings_that_do_not_fit(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^error: {re.escape(message)}"):
        cli(*TABLE, *DIGITS, *more)
    assert list(tmp_path.iterdir()) == []
