"""``fl-lightning reproduce`` on the command line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

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
    assert list(tmp_path.iterdir()) == []


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
    ],
    ids=["flatness", "centralized"],
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
