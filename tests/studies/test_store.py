"""A store: runs become rows and rows become folders again, are trained again and signed, and pages are made of them."""

from __future__ import annotations

import csv
import inspect
import json
import lzma
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import fl_lightning
from fl_lightning import UserError
from fl_lightning.core import json_text, json_values
from fl_lightning.results.compare import compare
from fl_lightning.results.configs import SINCE
from fl_lightning.results.metrics import read_directions
from fl_lightning.results.rows import Store, changes, config_text, extract, located
from fl_lightning.results.summary import headline
from fl_lightning.studies import claims
from fl_lightning.studies.check import verdict
from fl_lightning.studies.page import page
from fl_lightning.studies.store import digest, portable
from tests import renew
from tests.runs import DIGITS, cli
from tests.runs import run as train

LEDGER, DOCS = (Path(__file__).parents[2] / name for name in ("ledger", "docs"))
MEASURE = "--trainer.callbacks+={class_path: FlatnessMonitor, init_args: {every_n_rounds: 4, metrics: [LambdaMax]}}"
SEEDS = [(method, seed) for method in ("FedAvg", "FedSAM") for seed in (0, 1)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains two methods with two seeds each, for six rounds, in ``runs``, and adds them to a store, ``rows``."""
    root = tmp_path_factory.mktemp("study")
    args = [*DIGITS, "--trainer.max_rounds=6", "--trainer.eval_every=3", "--seeds=0,1"]
    for model, more in (("FedAvg", []), ("FedSAM", [MEASURE])):
        place = [f"--trainer.default_root_dir={root / 'runs'}", f"--trainer.name={model}"]
        cli("fit", f"--model={model}", *args, *more, *place)
    cli("study", "add", str(root / "runs"), f"--into={root / 'rows'}")
    about = {"title": "Small", "text": "Digits.", "reference": "FedAvg"}
    (root / "rows" / "about.yaml").write_text(yaml.safe_dump(about))
    return root


@pytest.fixture
def copy(study: Path, tmp_path: Path) -> Path:
    """Returns a copy of the store, to be changed."""
    return Path(shutil.copytree(study / "rows", tmp_path / "rows"))


def run_of(study: Path, method: str, seed: int) -> Path:
    return study / "runs" / method / f"seed_{seed}" / "version_0"


def about(store: Path, name: str) -> dict[str, Any]:
    (line,) = Store(store).matching(name)
    return dict(line["about"])


@pytest.mark.slow
def test_a_row_is_its_run_again_without_checkpoints_and_machine(study: Path, tmp_path: Path) -> None:
    assert {path.name for path in (study / "rows").iterdir()} == {"about.yaml", "metrics.csv.xz", "rows.jsonl"}
    assert str(study) not in (study / "rows" / "rows.jsonl").read_text()
    cli("study", "extract", str(study / "rows"), f"--out={tmp_path / 'again'}")
    for method, seed in SEEDS:
        run, row = run_of(study, method, seed), tmp_path / "again" / method / f"seed_{seed}"
        assert {path.name for path in row.iterdir()} == {"config.yaml", "metrics.csv", "row.json"}
        assert (row / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()
        assert yaml.safe_load((row / "config.yaml").read_text()) == portable(
            yaml.safe_load((run / "config.yaml").read_text())
        )
        record = json.loads((row / "row.json").read_text())
        assert (record["method"], record["rounds"], record["seed"], record["checks"]) == (method, 6, seed, [])
        assert record["starts"][0]["engine"] == "sequential"


@pytest.mark.slow
def test_bytes_of_a_store_are_those_of_its_rows(study: Path, tmp_path: Path) -> None:
    """It does not matter whether rows are added together, one by one, or twice."""
    for method, seed in [*SEEDS, SEEDS[0], SEEDS[-1]]:
        store = Store(tmp_path / "rows")
        (line,) = Store(study / "rows").matching(f"{method}/seed_{seed}")
        store.put(line["row"], Store(study / "rows").files(line))
        store.write()
        for earlier in Store(tmp_path / "rows").lines:
            reference = Store(study / "rows")
            assert Store(tmp_path / "rows").files(earlier) == reference.files(*reference.matching(earlier["row"]))
    for name in ("rows.jsonl", "metrics.csv.xz"):
        assert (tmp_path / "rows" / name).read_bytes() == (study / "rows" / name).read_bytes()


@pytest.mark.slow
def test_rows_of_another_store_are_added_with_their_checks(study: Path, copy: Path, tmp_path: Path) -> None:
    """Two branches may have added rows; a row with other weights is refused."""
    store = Store(copy)
    store.lines[1]["about"]["checks"] = [{"same": True, "date": "2026-01-03"}]
    store.write()
    for source in (copy, study / "rows"):
        cli("study", "add", str(source), f"--into={tmp_path / 'both'}")
    for name in ("rows.jsonl", "metrics.csv.xz"):
        assert (tmp_path / "both" / name).read_bytes() == (copy / name).read_bytes()
    store.lines[1]["about"]["checks"] = [{"same": False, "date": "2026-01-02"}]
    store.write()
    cli("study", "add", str(copy), f"--into={tmp_path / 'both'}")
    assert [check["same"] for check in about(tmp_path / "both", store.lines[1]["row"])["checks"]] == [False, True]
    store.lines[2]["about"]["weights"] = "another"
    store.write()
    with pytest.raises(SystemExit, match="a row with other weights"):
        cli("study", "add", str(copy), f"--into={tmp_path / 'both'}")


@pytest.mark.slow
def test_a_removed_row_takes_nothing_from_the_others(study: Path, copy: Path) -> None:
    """Nor does the first one, whose config is the base of all."""
    original = Store(study / "rows")
    for method, seed in SEEDS[:-1]:
        cli("study", "remove", str(copy / method / f"seed_{seed}"))
        remaining = Store(copy)
        kept = {line["row"]: remaining.files(line) for line in remaining.lines}
        assert f"{method}/seed_{seed}" not in kept
        assert kept == {line["row"]: original.files(line) for line in original.lines if line["row"] in kept}
    assert [line["row"] for line in Store(copy).lines] == ["FedSAM/seed_1"]


@pytest.mark.long
def test_processes_that_add_at_once_lose_nothing(study: Path, tmp_path: Path) -> None:
    for k, (method, seed) in enumerate(SEEDS):
        shutil.copytree(run_of(study, method, seed), tmp_path / str(k) / method / f"seed_{seed}" / "version_0")
    add = [sys.executable, "-m", "fl_lightning", "study", "add"]
    processes = [subprocess.Popen([*add, str(tmp_path / str(k)), f"--into={tmp_path / 'rows'}"]) for k in range(4)]
    assert [process.wait(timeout=600) for process in processes] == [0] * 4
    store, original = Store(tmp_path / "rows"), Store(study / "rows")
    assert {line["row"]: store.files(line) for line in store.lines} == {
        line["row"]: original.files(line) for line in original.lines
    }


@pytest.mark.slow
def test_all_metrics_are_one_table_for_any_program(study: Path) -> None:
    with lzma.open(study / "rows" / "metrics.csv.xz", "rt", newline="") as file:
        lines = [*csv.DictReader(file)]
    assert [*lines[0]][:5] == ["row", "method", "column", "seed", "round"] and len(lines) == 4 * 6
    for method, seed in SEEDS:
        rows = [line for line in lines if line["row"] == f"{method}/seed_{seed}"]
        assert {(line["method"], line["column"], line["seed"]) for line in rows} == {(method, "", str(seed))}
        with (run_of(study, method, seed) / "metrics.csv").open(newline="") as file:
            assert [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)] == [
                {k: v for k, v in line.items() if v and k not in ("row", "method", "column", "seed")} for line in rows
            ]


@pytest.mark.slow
def test_rows_compare_as_their_runs_do(study: Path) -> None:
    """They also do in what is logged each round, and by a part of their names or a pattern."""
    for metric in (None, "client/train/loss"):
        ours, theirs = (compare(study / name, metric=metric) for name in ("rows", "runs"))
        assert [group.runs for group in ours] == [group.runs for group in theirs]
        assert [(group.name, group.seeds) for group in ours] == [
            (name, [(0, 0), (1, 0)]) for name in ("FedAvg", "FedSAM")
        ]
    (fedsam,) = compare(study / "rows" / "FedSAM")
    assert [folder.name for folder in fedsam.folders] == ["seed_0", "seed_1"]
    assert [group.seeds for group in compare(study / "rows" / "*" / "seed_1")] == [[(1, 0)]] * 2
    assert {group.runs[0].target for group in compare(study / "rows", reference=study / "rows" / "FedSAM")} != {None}
    assert [len(group.left_out) for group in compare(study)] == [2, 2]  # runs are found beside their store
    with pytest.raises(UserError, match="no such folder"):
        compare(study / "rows" / "FedSAN")


@pytest.mark.slow
def test_versions_of_a_name_are_rows_each(study: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.copytree(run_of(study, "FedSAM", seed), tmp_path / "x" / f"version_{seed}")
    cli("study", "add", str(tmp_path / "x"), f"--into={tmp_path / 'rows'}")
    assert [(line["row"], line["method"], line["seed"]) for line in Store(tmp_path / "rows").lines] == [
        ("x/version_0", "x", 0), ("x/version_1", "x", 1),
    ]  # fmt: skip


def test_configs_are_kept_by_what_differs() -> None:
    base = {"model": {"lr": 0.1, "parts": None}, "data": {"seed": 0}}
    for config, expected in [
        (base, {}),
        ({"model": {"lr": 0.1, "parts": None}, "data": {"seed": False}}, {".data.seed": False}),
        ({"model": {"lr": 0.1}, "data": {"seed": 0}}, {".model": {"lr": 0.1}}),
        ({"data": {"seed": 0}, "model": {"lr": 0.1, "parts": None}}, None),  # the order counts, too
    ]:
        assert changes(base, config) == ({"": config} if expected is None else expected)


def test_a_store_is_whole_when_a_process_is_killed_between_its_two_files(tmp_path: Path) -> None:
    """A row with a new column has been added, which changes the bytes of all others."""

    def added(name: str, metrics: str) -> None:
        with Store.edited(tmp_path) as store:
            store.put(name, {"config.yaml": "a: 1\n", "metrics.csv": metrics, "row.json": json_text({"seed": 0}, 1)})

    for name in ("m/seed_0", "m/seed_1"):
        added(name, "round,a\r\n1,0.5\r\n2,0.25\r\n")
    before = (tmp_path / "rows.jsonl").read_bytes()
    files = [Store(tmp_path).files(line) for line in Store(tmp_path).lines]
    added("m/seed_2", "round,a,b\r\n1,0.5,7\r\n")
    (tmp_path / "rows.jsonl").write_bytes(before)
    assert [Store(tmp_path).files(line) for line in Store(tmp_path).lines] == files
    added("m/seed_2", "round,a,b\r\n1,0.5,8\r\n")
    assert [Store(tmp_path).files(line) for line in Store(tmp_path).lines][:2] == files
    assert lzma.decompress((tmp_path / "metrics.csv.xz").read_bytes()).count(b"\r\n") == 6


@pytest.mark.parametrize("text", ["a.b: 1\n", "5: 0.1\n", "x: .nan\n", "x: 1e-5  # by hand\n", "x: 2020-01-01\n"])
def test_a_row_keeps_every_byte_of_any_files(text: str, tmp_path: Path) -> None:
    """There are keys with dots, numbers as keys, what JSON lacks, and columns in other orders, new or empty."""
    metrics = ["round,a\r\n1,0.5\r\n", "round,b,a\r\n1,,-inf\r\n2,3,\r\n", "a,c,round\n1,,2\n"]
    files = {
        f"m/seed_{i}": {
            "config.yaml": text if i else text.replace("1", "2"),
            "metrics.csv": table,
            "row.json": json_text({"seed": i}, 1),
            "flatness/a.json": "[]\n",
        }
        for i, table in enumerate(metrics)
    }
    for names in (["m/seed_0", "m/seed_1", "m/seed_2"], ["m/seed_0"]):
        store = Store(tmp_path / "rows")
        for name in names:
            store.put(name, files[name])
        store.write()
    store = Store(tmp_path / "rows")
    assert {line["row"]: store.files(line) for line in store.lines} == files


@pytest.mark.slow
def test_a_row_trained_again_is_equal_to_the_bit(
    study: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli("study", "check", str(copy / "FedSAM" / "seed_1"))
    assert "seed_1: equal to the bit" in capsys.readouterr().out.replace("\n", "")
    (check,) = about(copy, "FedSAM/seed_1")["checks"]
    assert check["same"] and check["met"] and check["final"] == 0 and check["engine"] == "sequential"
    cli("study", "add", str(study / "runs"), f"--into={copy}")  # added again, the check stays
    assert about(copy, "FedSAM/seed_1")["checks"] == [check]
    cli("study", "page", str(copy))
    page = capsys.readouterr().out
    assert "# Small" in page and "| FedSAM | 2, checked 1 |" in page and "− FedAvg" in page
    cli("study", "page", str(copy), "--out", str(tmp_path / "pages" / "small.md"))
    text = (tmp_path / "pages" / "small.md").read_text()
    assert "![" in text and text.endswith("(small.json)\n")
    rows = json.loads((tmp_path / "pages" / "small.json").read_text())
    assert [(row["method"], row["seed"], row["equal"]) for row in rows] == [
        (*pair, True if pair == ("FedSAM", 1) else None) for pair in SEEDS
    ]
    with Image.open(tmp_path / "pages" / "small.png") as image:
        image.load()


@pytest.mark.slow
def test_a_row_is_compared_as_far_as_it_was_trained_again(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A long one is so within some minutes."""
    cli("study", "check", str(copy / "FedSAM" / "seed_0"), "--trainer.max_rounds=3")
    assert "equal to the bit in its first 3 rounds" in capsys.readouterr().out.replace("\n", " ")
    (check,) = about(copy, "FedSAM/seed_0")["checks"]
    assert check["same"] and check["rounds"] == 3
    cli("study", "check", str(copy / "FedSAM" / "seed_0"), "--minutes=1")
    assert "rounds" not in about(copy, "FedSAM/seed_0")["checks"][1]  # it took seconds
    with pytest.raises(SystemExit, match="not met"):
        cli("study", "check", str(copy / "FedSAM" / "seed_0"), "--trainer.max_rounds=3", "--data.batch_size=31")


@pytest.mark.slow
def test_a_row_of_personal_models_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train("fit", "--model.parts=[Personal]", root=tmp_path / "runs")
    cli("study", "add", str(folder), f"--into={tmp_path / 'rows'}")
    cli("study", "check", str(tmp_path / "rows"))
    assert "equal to the bit" in capsys.readouterr().out


def test_a_row_knows_whether_small_values_are_good(tmp_path: Path) -> None:
    """The name of the metric does not tell it."""
    folder = train("fit", "--model.metrics=[HammingDistance]", root=tmp_path / "runs")
    cli("study", "add", str(folder), f"--into={tmp_path / 'rows'}")
    (row,) = [path.parent for path in located(tmp_path / "rows")[0].rglob("row.json")]
    assert read_directions(row) == read_directions(folder) != {}


def test_a_row_with_another_bit_is_wrong_and_the_page_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest check counts, of the metrics that it has compared."""
    row = str(copy / "FedAvg" / "seed_0")

    def change(about: dict[str, Any] | None = None) -> None:
        store = Store(copy)
        (line,) = store.matching("FedAvg/seed_0")
        files = store.files(line)
        lines = [*csv.DictReader(files["metrics.csv"].splitlines())]
        loss = lines[-1]["server/test/loss"]
        files["metrics.csv"] = files["metrics.csv"].replace(loss, str(math.nextafter(float(loss), 9)))
        store.put("FedAvg/seed_0", files | ({"row.json": json.dumps(about)} if about else {}))
        store.write()

    def checked() -> str:
        ((_, text, _),) = page([copy])[1]
        return next(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| FedAvg"))

    cli("study", "check", row)
    assert checked() == "2, checked 1"
    change()
    assert checked() == "2, self-reported"  # the check was one of other metrics
    with pytest.raises(SystemExit, match="1 of 1 rows are not met"):
        cli("study", "check", row)
    assert "server/test/loss" in capsys.readouterr().out
    assert [check["same"] for check in about(copy, "FedAvg/seed_0")["checks"]] == [True, False]
    assert checked() == "2, 1 wrong"
    # the same difference counts as another processor's
    record = about(copy, "FedAvg/seed_0")
    record["starts"][0]["cpu"] = "another"
    change(record)
    cli("study", "check", row)
    assert "which is not the row's" in capsys.readouterr().out.replace("\n", " ")
    assert checked() == "2, self-reported"


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([], None),
        (["same"], True),
        (["other"], False),
        (["same", "other"], False),
        (["other", "same"], True),
        (["same", "near elsewhere"], True),
        (["same", "far elsewhere"], True),
        (["other", "near elsewhere"], False),
        (["same elsewhere", "far elsewhere"], True),
        (["other", "same elsewhere"], True),
        (["near elsewhere"], None),
        (["far elsewhere"], False),
        (["far elsewhere", "near elsewhere"], None),
        (["same of other files"], None),
        (["same", "other of other files"], True),
    ],
)
def test_the_newest_check_counts_and_one_elsewhere_takes_no_equal_bits_back(
    checks: list[str], expected: bool | None, copy: Path, tmp_path: Path
) -> None:
    (line,) = Store(copy).matching("FedAvg/seed_0")
    extract(Store(copy).files(line), tmp_path / "row")
    start = line["about"]["starts"][0]
    line["about"]["checks"] = [
        {
            **start,
            "torch": "9.0" if "elsewhere" in check else start["torch"],
            "same": check.startswith("same"),
            "met": check.startswith(("same", "near")),
            "digest": "none" if check.endswith("files") else digest(tmp_path / "row"),
        }
        for check in checks
    ]
    (tmp_path / "row" / "row.json").write_text(json_text(line["about"]))
    assert verdict(tmp_path / "row") is expected


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["melt", "runs"], "action = melt: give one of run, add, remove, check, extract, page, claims"),
        (["check", "runs"], "no row of a store there"),
        (["remove", "rows/FedSAN"], "no row of a store there"),
        (["run", "nosuch"], r"study = nosuch: no about\.yaml with methods there"),
        (["check", "rows/FedSAM", "--beyond=rows"], "paths = rows/FedSAM: give one store"),
        (["extract", "rows/FedSAN"], "no row of a store there"),
        (["check", "rows", "--count=0"], "count = 0: give a whole number of at least 1"),
        (["check", "rows/FedSAM/seed_1", "--data.batch_size=31"], "not met"),
        (["check", "rows/FedSAM/seed_1", "--data.num_clients=5"], "trained on other data"),
        (["add", "unfinished"], "the run has not ended"),
    ],
)
def test_mistakes_are_a_line(copy: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], line: str) -> None:
    monkeypatch.chdir(copy.parent)
    copy.with_name("runs").mkdir()
    extract({"metrics.csv": "round,server/test/acc\n1,0.5\n"}, copy.with_name("unfinished") / "version_0")
    with pytest.raises(SystemExit, match=line):
        cli("study", *args)


@pytest.mark.parametrize("name", ["rows.jsonl", "metrics.csv.xz"])
def test_damaged_stores_are_a_line(name: str, copy: Path) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=f"{name}: not readable .*; restore"):
        compare(copy)


def test_two_rows_of_one_name_are_a_line(copy: Path) -> None:
    """A merge of two branches may leave them; to compare the last one alone would hide the other."""
    store = Store(copy)
    store.lines[1]["row"] = name = store.lines[0]["row"]
    store.write()
    with pytest.raises(UserError, match=rf"rows\.jsonl: several rows {name}; restore it"):
        compare(copy)


@pytest.mark.parametrize(("key", "value"), [("row", "../out"), ("row", "/out"), ("files", {"../../out": "x"})])
def test_a_strangers_store_writes_nothing_outside(key: str, value: Any, copy: Path) -> None:
    store = Store(copy)
    store.lines[1][key] = value
    store.write()
    with pytest.raises(UserError, match=r"rows\.jsonl: not what a run writes there"):
        compare(copy)


def test_the_draw_of_rows_to_check_follows_the_seed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_lightning.commands import study as command

    drawn: list[Any] = []
    monkeypatch.setattr(command, "_check", lambda rows, *_: drawn.append(rows))
    for seed in (*range(12), 0):
        cli("study", "check", str(copy), "--count=2", f"--seed={seed}")
    assert drawn[0] == drawn[-1] and len({str(rows) for rows in drawn}) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "digits")) for name in renew.LEDGER]
)
def test_pages_of_the_docs_are_those_of_the_ledger(name: str) -> None:
    head, sections, numbers = page([LEDGER / name])
    text = (DOCS / "ledger" / f"{name}.md").read_text()
    assert text.startswith(head) and all(table in text for _, table, _ in sections) and f"({name}.json)" in text
    assert json.loads((DOCS / "ledger" / f"{name}.json").read_text()) == json_values(numbers)


def test_rows_with_brackets_in_their_names_are_found(tmp_path: Path) -> None:
    """In a pattern they stand for one of the letters between them."""
    store = Store(tmp_path)
    store.lines = [{"row": f"{method}/seed_{seed}"} for method in ("SAM[1]", "SAM1", "SAM10") for seed in (0, 1)]

    def rows(name: str) -> list[str]:
        return [line["row"] for line in store.matching(name)]

    assert rows("SAM[1]") == ["SAM[1]/seed_0", "SAM[1]/seed_1"] and rows("SAM[1]/seed_1") == ["SAM[1]/seed_1"]
    assert rows("SAM1") == ["SAM1/seed_0", "SAM1/seed_1"] == rows("SAM[12]") and len(rows(".")) == 6
    assert rows("SAM1*/seed_0") == ["SAM1/seed_0", "SAM10/seed_0"] and rows("SAM") == []


def test_a_setting_absent_and_at_its_default_is_one(copy: Path) -> None:
    """Rows from before a setting and from after it differ so; `SINCE` has the default of each that is not null."""
    before = len(compare(copy))
    store = Store(copy)
    files = store.files(store.lines[0])
    config = yaml.safe_load(files["config.yaml"])
    for clock, groups in ((None, 0), ("another", 1)):
        config["trainer"].pop("clock")
        config["trainer"] |= {"clock": clock} if clock else {}
        config["model"]["init_args"]["eps"] = SINCE["eps"]
        store.put(store.lines[0]["row"], files | {"config.yaml": config_text(config)})
        store.write()
        assert len(compare(copy)) == before + groups
        config["trainer"]["clock"] = None


def test_settings_that_rows_of_the_ledger_lack_are_at_defaults_that_are_known() -> None:
    """A setting that a class has got since, with another default than null, must be in `SINCE`."""

    def parts(value: Any) -> Iterator[dict[str, Any]]:
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from parts(child)
        if isinstance(value, dict) and "class_path" in value:
            yield value

    for store in map(Store, LEDGER.iterdir()):
        for method in {line["method"] for line in store.lines}:
            config = store.config(next(line for line in store.lines if line["method"] == method))
            for part in (part for name in ("model", "data") for part in parts({"": config[name]})):
                kind = getattr(fl_lightning, part["class_path"].rpartition(".")[2])
                defaults = {key: parameter.default for key, parameter in inspect.signature(kind).parameters.items()}
                for key in defaults.keys() - part["init_args"].keys():
                    if isinstance(defaults[key], str | int | float | bool | None):
                        assert defaults[key] == SINCE.get(key), (store.folder.name, method, key)


@pytest.mark.long
def test_page_of_claims_is_that_of_the_ledger() -> None:
    text, numbers = claims.page(LEDGER / "claims.yaml")
    shown = (DOCS / "ledger" / "claims.md").read_text()
    assert shown == f"{text}[The numbers of this page as JSON](claims.json)\n"
    assert json.loads((DOCS / "ledger" / "claims.json").read_text()) == json_values(numbers)


def test_rows_say_whether_they_are_thinned(study: Path) -> None:
    """Rows of earlier stores have their evaluated rounds alone."""
    assert all(line["thinned"] for line in Store(LEDGER / "agnews").lines)
    assert not any("thinned" in line for line in Store(study / "rows").lines)


def test_one_row_of_the_ledger_reads_as_it_was_made() -> None:
    (row,) = located(LEDGER / "digits" / "alpha_0.05" / "FedAvg" / "seed_0")
    assert headline(row, "server/test/acc") == pytest.approx(0.9746, abs=1e-4)
    assert config_text(yaml.safe_load((row / "config.yaml").read_text())) == (row / "config.yaml").read_text()
