"""A ledger: runs become rows, rows are trained again and compared to the bit, and a page is made of them."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks import claims
from fl_lightning.results.ledger import page, rows
from fl_lightning.results.metrics import read_directions
from tests.runs import DIGITS, cli
from tests.runs import run as train

LEDGER, DOCS = (Path(__file__).parents[2] / name for name in ("ledger", "docs"))
MEASURE = "--trainer.callbacks+={class_path: FlatnessMonitor, init_args: {every_n_rounds: 4, metrics: [LambdaMax]}}"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of two methods with two seeds each, of six rounds."""
    root = tmp_path_factory.mktemp("ledger")
    args = [*DIGITS, "--trainer.max_rounds=6", "--trainer.eval_every=3", "--seeds=0,1", MEASURE]
    for model in ("FedAvg", "FedSAM"):
        cli("fit", f"--model={model}", *args, f"--trainer.default_root_dir={root / 'runs'}", f"--trainer.name={model}")
    cli("ledger", "add", str(root / "runs"), f"--into={root / 'rows'}")
    (root / "rows" / "about.yaml").write_text(
        yaml.safe_dump({"title": "Small", "text": "Digits.", "reference": "FedAvg"})
    )
    return root


def row(ledger: Path) -> Path:
    return ledger / "rows" / "FedSAM" / "seed_1"


def run(ledger: Path) -> Path:
    return ledger / "runs" / "FedSAM" / "seed_1" / "version_0"


@pytest.mark.slow
def test_a_row_is_a_run_without_checkpoints_and_without_its_machine(ledger: Path) -> None:
    kept = {path.relative_to(ledger / "rows").as_posix() for path in (ledger / "rows").rglob("*") if path.is_file()}
    names = ("config.yaml", "metrics.csv", "row.json")
    assert kept == {"about.yaml"} | {f"{m}/seed_{s}/{n}" for m in ("FedAvg", "FedSAM") for s in (0, 1) for n in names}
    assert not [path for path in kept if str(ledger) in (ledger / "rows" / path).read_text()]
    about = json.loads((row(ledger) / "row.json").read_text())
    assert (about["method"], about["rounds"], about["seed"], about["checks"]) == ("FedSAM", 6, 1, [])
    assert about["starts"][0]["engine"] == "sequential"


@pytest.mark.slow
def test_versions_of_a_name_are_rows_each(ledger: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.copytree(ledger / "runs" / "FedSAM" / f"seed_{seed}" / "version_0", tmp_path / "x" / f"version_{seed}")
    cli("ledger", "add", str(tmp_path), f"--into={tmp_path / 'rows'}")
    rows = [tmp_path / "rows" / "x" / f"version_{seed}" / "row.json" for seed in (0, 1)]
    assert [json.loads(path.read_text())["seed"] for path in rows] == [0, 1]


@pytest.mark.slow
def test_times_of_left_out_rounds_are_summed(ledger: Path) -> None:
    before, after = (list(csv.DictReader((folder / "metrics.csv").open())) for folder in (run(ledger), row(ledger)))
    assert [line["round"] for line in after] == ["3", "4", "6"]
    for name in ("time/round_s", "time/cpu_s"):
        assert math.isclose(sum(float(line[name]) for line in before), sum(float(line[name]) for line in after))
    whole = {line["round"]: line for line in before}
    for line in after:
        same = whole[line["round"]]
        assert {k: v for k, v in line.items() if k[:5] != "time/"} == {
            k: v for k, v in same.items() if k[:5] != "time/"
        }


@pytest.mark.slow
def test_a_row_trained_again_is_equal_to_the_bit(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli("ledger", "check", str(row(ledger)))
    assert f"{row(ledger)}: equal to the bit" in capsys.readouterr().out
    (check,) = json.loads((row(ledger) / "row.json").read_text())["checks"]
    assert check["same"] and check["final"] == 0 and check["engine"] == "sequential"
    cli("ledger", "add", str(ledger / "runs"), f"--into={ledger / 'rows'}")  # added again, the check stays
    assert json.loads((row(ledger) / "row.json").read_text())["checks"] == [check]
    cli("ledger", "page", str(ledger / "rows"))
    page = capsys.readouterr().out
    assert "# Small" in page and "| FedSAM | 2 | 1 |" in page and "− FedAvg" in page
    cli("ledger", "page", str(ledger / "rows"), "--out", str(tmp_path / "pages" / "small.md"))
    assert "![" in (tmp_path / "pages" / "small.md").read_text()
    with Image.open(tmp_path / "pages" / "small.png") as image:
        image.load()


@pytest.mark.slow
def test_a_row_of_personal_models_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train("fit", "--model.parts=[Personal]", root=tmp_path / "runs")
    cli("ledger", "add", str(folder), f"--into={tmp_path / 'rows'}")
    cli("ledger", "check", str(tmp_path / "rows"))
    assert "equal to the bit" in capsys.readouterr().out


def test_a_row_knows_whether_small_values_are_good(tmp_path: Path) -> None:
    """Which the name of the metric does not tell."""
    folder = train("fit", "--model.metrics=[HammingDistance]", root=tmp_path / "runs")
    row = tmp_path / "rows" / "mine"
    row.mkdir(parents=True)  # as after an addition that was broken off
    cli("ledger", "add", str(folder), f"--into={row}")
    (about,) = row.rglob("row.json")
    assert read_directions(about.parent) == read_directions(folder) != {}


def test_a_row_with_another_bit_is_wrong(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ledger / "rows" / "FedAvg" / "seed_0"
    text = (changed / "metrics.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    loss = lines[-1]["server/test/loss"]
    (changed / "metrics.csv").write_text(text.replace(loss, str(math.nextafter(float(loss), 9))))
    with pytest.raises(SystemExit, match="1 of 1 rows are not met"):
        cli("ledger", "check", str(changed))
    assert "server/test/loss" in capsys.readouterr().out
    about = json.loads((changed / "row.json").read_text())
    assert not about["checks"][-1]["same"]
    # the same difference counts as another processor's
    about["starts"][0]["cpu"] = "another"
    (changed / "row.json").write_text(json.dumps(about))
    cli("ledger", "check", str(changed))
    assert "which is not the row's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["melt", "runs"], "action = melt: give one of add, check, page"),
        (["check", "runs"], "no row of a ledger there"),
        (["check", "rows", "--count=0"], "count = 0: give a whole number of at least 1"),
        (["check", "rows/FedSAM/seed_1", "--data.batch_size=31"], "not met"),
        (["check", "rows/FedSAM/seed_1", "--data.num_clients=5"], "trained on other data"),
        (["add", "rows"], "the run has not ended"),
    ],
)
def test_mistakes_are_a_line(ledger: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], line: str) -> None:
    monkeypatch.chdir(ledger)
    with pytest.raises(SystemExit, match=line):
        cli("ledger", *args)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in (DOCS / "ledger").glob("*.md") if path.stem != "claims"])
def test_pages_of_the_docs_are_those_of_the_ledger(name: str) -> None:
    study, _, column = name.partition("_")
    text, _ = page(rows(LEDGER / study / column))
    assert (DOCS / "ledger" / f"{name}.md").read_text().startswith(text)


@pytest.mark.slow
def test_page_of_claims_is_that_of_the_ledger() -> None:
    assert claims.page() == (DOCS / "ledger" / "claims.md").read_text()
