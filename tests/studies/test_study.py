"""A study is tuned, trained and kept; called again, it goes on."""

from __future__ import annotations

import csv
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy.stats import spearmanr

from fl_lightning.core import DivergenceError, UserError, make_folder
from fl_lightning.results.rows import Store, extract
from fl_lightning.studies.study import Study
from fl_lightning.studies.tuning import HEAD, chosen, judged, points, read, write
from fl_lightning.sweeps.trials import Built, Trial
from tests.runs import DIGITS, cli

STUDY: dict[str, Any] = {
    "title": "Small",
    "text": "Digits.",
    "reference": "FedAvg",
    "fit": " ".join([*DIGITS, "--trainer.callbacks=[Checkpoints]"]),
    "draws": 4,
    "tuning_seeds": [0, 1],
    "tuning": "--data.val_fraction 0.3 --trainer.max_rounds 1",
    "rows": "--trainer.max_rounds 2",
    "columns": {"alpha 1": "--data.partition Dirichlet --data.partition.alpha 1"},
    "seeds": [3],
    "ranges": {
        "lr": {"key": "model.optimizer.lr", "min": 0.02, "max": 0.5},
        "rho": {"key": "model.rho", "min": 0.1, "max": 2, "times": "model.optimizer.lr"},
    },
    "methods": {"FedAvg": ["--model FedAvg", "lr"], "FedSAM": ["--model FedSAM", "lr", "rho"]},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the study in ``small``, with its store, ``rows``; FedSAM is trained first."""
    root = tmp_path_factory.mktemp("study")
    extract({"small/about.yaml": yaml.safe_dump(STUDY)}, root)
    run(root, "--methods=FedSAM")
    run(root)
    with Store.edited(root / "rows") as store:
        for line in store.lines:  # as if these tests' own code were committed
            line["about"]["starts"][0]["changed"] = False
    return root


@pytest.fixture
def copy(ran: Path, tmp_path: Path) -> Path:
    """Returns a copy of both, to be changed."""
    return Path(shutil.copytree(ran, tmp_path / "copy"))


def run(root: Path, *args: str) -> None:
    cli("study", "run", str(root / "small"), f"--into={root / 'rows'}", f"--out={root / 'runs'}", *args)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"fit": None}, "fit = None; give arguments of fit as one text"),
        ({"fit": "--trainer.name 'a"}, "fit = --trainer.name 'a; give arguments of fit as one text, with its quotes"),
        ({"methods": ["FedAvg"]}, r"methods = \['FedAvg'\]; give for each method a list"),
        ({"methods": {"A": "--model FedAvg"}}, "methods = .*; give for each method a list"),
        ({"methods": {"A": ["--model FedAvg", "mu"]}}, r"ranges\.mu: missing; write it as in ledger/digits"),
        ({"ranges": {"lr": {"min": 0.1, "max": 1}}}, "ranges = .*; give for each range its key"),
        ({"seeds": "0,1"}, "seeds = 0,1; give a list of whole numbers"),
        ({"draws": 1}, "draws = 1; give a whole number of at least 2"),
        ({"columns": {"one": None}}, "columns = .*; give arguments by column"),
        ({"suite": {"seed": 1}}, r"suite\.seed = 1: give name"),
        *(({key: ...}, f"{key}: missing; write it as in") for key in ("fit", "rows", "columns", "seeds", "tuning")),
    ],
)
def test_a_study_of_another_form_is_a_line(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    study = {key: value for key, value in {**STUDY, **change}.items() if value is not ...}
    extract({"small/about.yaml": yaml.safe_dump(study)}, tmp_path)
    with pytest.raises(SystemExit, match=rf"about\.yaml: {line}"):
        run(tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_draws_that_hold_no_data_out_say_so(tmp_path: Path) -> None:
    extract({"small/about.yaml": yaml.safe_dump({**STUDY, "tuning": "--trainer.max_rounds 1"})}, tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)0 settings have server/val/acc.*set data\.val_fraction in\s+tuning"):
        run(tmp_path, "--methods=FedAvg")


@pytest.mark.slow
def test_a_study_is_tuned_trained_and_kept(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(ran / "rows")
    assert [(line["row"], line["column"], line["method"], line["seed"]) for line in store.lines] == [
        ("alpha_1/FedSAM/seed_3", "alpha_1", "FedSAM", 3), ("alpha_1/FedAvg/seed_3", "alpha_1", "FedAvg", 3),
    ]  # fmt: skip
    assert [line["method"] for line in tried(ran)] == ["FedAvg"] * 5 + ["FedSAM"] * 5
    for line in store.lines:
        draws = [draw for draw in tried(ran) if draw["method"] == line["method"]]
        assert [len(draw["by seed"].split()) for draw in draws] == [2] * 5 and [
            draw["settings"] for draw in draws
        ].count("") == 1
        assert sorted(draws, key=lambda draw: -float(draw["server/val/acc"])) == draws
        config = store.config(line)
        optimizer = config["model"]["init_args"]["optimizer"]  # null is the published one
        assert rate(chosen(draws)) == (optimizer and optimizer["init_args"]["lr"])
        assert config["data"]["init_args"]["val_fraction"] == 0 and config["trainer"]["max_rounds"] == 2
    before = (ran / "rows" / "rows.jsonl").read_bytes()
    run(ran)
    assert "added" not in capsys.readouterr().out
    assert (ran / "rows" / "rows.jsonl").read_bytes() == before


def tried(root: Path) -> list[dict[str, str]]:
    with (root / "rows" / "tuning.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def rate(settings: dict[str, str]) -> float | None:
    return float(settings["model.optimizer.lr"]) if settings else None


def test_the_median_over_seeds_decides_and_ties_go_to_the_published_settings(tmp_path: Path) -> None:
    """There are three seeds; a run that has diverged is worse than any other."""
    values: dict[str, list[float | None]] = {
        "a": [0.9, 0.9, 0.1],
        "b": [0.8, 0.8, 0.8],
        "c": [0.7, 0.89, None],
        "published": [0.7, 0.65, 0.66],
    }
    settings: list[dict[str, Any]] = [{} if name == "published" else {"model.rho": name} for name in values]
    runs = [
        [made(tmp_path / f"{name}{k}", acc) for k, acc in enumerate(accuracies)] for name, accuracies in values.items()
    ]
    lines = judged("FedSAM", settings, runs)
    assert [line[1] for line in lines] == ["model.rho=a", "model.rho=b", "model.rho=c", ""]
    assert [line[2] for line in lines] == [0.9, 0.8, 0.7, 0.66] and lines[2][3] == "0.7 0.89 -inf"
    rows = [dict(zip(HEAD, map(str, line), strict=True)) for line in lines]
    assert chosen(rows) == {} and chosen(rows, 1) == {"model.rho": "a"}
    # the differences are 0.2, 0.25, -0.56: their mean, -0.04, is within its standard error, 0.26
    assert chosen(rows[1:]) == {"model.rho": "b"}  # 0.1, 0.15, 0.14: 0.13 is beyond 0.015
    diverged = {**rows[3], "by seed": "0.9 0.9 -inf"}
    assert chosen([*rows[:3], diverged]) == {"model.rho": "a"}


def test_a_divergence_with_the_first_seed_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = [["FedSAM", "model.rho=1", 0.9, "0.9 0.9 0.9", ""], ["FedSAM", "", 0.8, "-inf 0.8 0.9", ""]]
    write(tmp_path, lines, ["FedSAM"])
    (rows,) = read(tmp_path).values()
    assert [line["by seed"] for line in rows] == [line[3] for line in lines]
    assert chosen(rows) == {"model.rho": "1"}
    write(tmp_path, [["FedAvg", "", 0.7, "0.7 0.7 0.7", ""]], ["FedAvg"])  # as after a change of the study's methods
    assert [*read(tmp_path)] == ["FedAvg", "FedSAM"] and read(tmp_path)["FedSAM"] == rows


def test_a_mistake_is_no_divergence_and_a_method_without_settings_can_be_tuned_again(tmp_path: Path) -> None:
    def mistaken(trial: Trial, folder: Path) -> Built:
        raise ZeroDivisionError(trial.name)

    def diverging(trial: Trial, folder: Path) -> Built:
        make_folder(folder / trial.name / "version_0", "folder")
        raise DivergenceError(trial.name)

    for build, line in ((mistaken, "FedAvg/0/seed_0: ZeroDivisionError: "), (diverging, "FedAvg: 0 settings have ")):
        study = Study(STUDY, tmp_path / "runs", tmp_path / "rows", build, lambda _: {})
        with pytest.raises(UserError, match=line):
            [*study.run(["FedAvg"])]
        assert not study.tuned("FedAvg") and not (tmp_path / "rows" / "tuning.csv").exists()


def made(folder: Path, acc: float | None) -> Path | None:
    """Writes a run folder with two evaluations."""
    if acc is None:
        return None
    extract({"metrics.csv": f"round,server/val/acc\n1,{acc}\n2,{acc}\n"}, folder)
    return folder


def test_points_are_those_of_all_methods_uncorrelated_and_even() -> None:
    drawn = torch.tensor(points(32, 5))
    assert torch.equal(torch.tensor(points(32, 5)), drawn)
    for column in drawn.T:
        assert (column * 32).ceil().long().unique().tolist() == list(range(1, 33))  # one in each 32nd of (0, 1]
    correlations = torch.tensor(spearmanr(drawn).statistic).fill_diagonal_(0)
    assert correlations.abs().max() < 0.1


@pytest.mark.slow
def test_too_few_draws_are_refused(copy: Path) -> None:
    turned = {**STUDY, "methods": {"FedSAM": ["--model FedSAM", "rho", "lr"]}}
    extract({"small/about.yaml": yaml.safe_dump(turned)}, copy)
    with pytest.raises(SystemExit, match=r"model\.rho is a multiple of model\.optimizer\.lr, which FedSAM must list"):
        cli("study", "run", str(copy / "small"), "--methods=FedSAM", f"--out={copy / 'others'}")
    extract({"small/about.yaml": yaml.safe_dump({**STUDY, "draws": 2})}, copy)
    with pytest.raises(SystemExit, match=r"draws = 2: two settings have a rank correlation above 0\.3"):
        cli("study", "run", str(copy / "small"), "--methods=FedSAM", f"--out={copy / 'others'}")


@pytest.mark.slow
def test_a_removed_row_comes_back_with_the_settings_of_the_others(copy: Path) -> None:
    """They are ``tuning.csv``'s best, or those of the method's other rows; the runner-up has the second-best."""
    original = Store(copy / "rows").lines
    cli("study", "remove", str(copy / "rows/alpha_1/FedSAM/seed_3"))
    run(copy, "--methods=FedSAM")
    assert {line["row"]: line["about"]["weights"] for line in Store(copy / "rows").lines} == {
        line["row"]: line["about"]["weights"] for line in original
    }
    for file in ("small", "rows"):
        extract({f"{file}/about.yaml": yaml.safe_dump({**STUDY, "runner_up": ["FedSAM"]})}, copy)
    run(copy, "--methods=FedSAM")
    store = Store(copy / "rows")
    (line,) = store.matching("alpha_1/FedSAM (runner-up)/seed_3")
    second = rate(chosen([draw for draw in tried(copy) if draw["method"] == "FedSAM"], 1))
    assert store.config(line)["model"]["init_args"]["optimizer"]["init_args"]["lr"] == second


@pytest.mark.slow
def test_rows_of_other_rules_are_another_suite(copy: Path) -> None:
    with pytest.raises(SystemExit, match="methods = FedGM: not in"):
        run(copy, "--methods=FedGM")
    extract({"small/about.yaml": yaml.safe_dump({**STUDY, "rows": "--trainer.max_rounds 3"})}, copy)
    with pytest.raises(SystemExit, match=r"suite = none, \w+: .*rows has rows of none, \w+; give new rules a new"):
        run(copy)


@pytest.mark.slow
def test_an_added_row_has_the_suite_that_it_follows(copy: Path) -> None:
    """``fit`` has trained it with the study's arguments; another rate, length or seed is not the study's."""
    row = "alpha_1/FedAvg/seed_3"
    (line,) = Store(copy / "rows").matching(row)
    best = chosen([draw for draw in tried(copy) if draw["method"] == "FedAvg"])
    args = [STUDY["fit"], STUDY["methods"]["FedAvg"][0], STUDY["rows"], STUDY["columns"]["alpha 1"]]
    flags = [*shlex.split(" ".join(args)), *(f"--{key}={value}" for key, value in best.items())]
    for k, (more, suite) in enumerate([
        (["--data.seed=3"], line["about"]["suite"]),
        (["--data.seed=3", "--model.optimizer=SGD", "--model.optimizer.lr=0.123"], None),
        (["--data.seed=3", "--trainer.max_rounds=3"], None),
        (["--data.seed=4"], None),
    ]):  # fmt: skip
        cli("study", "remove", str(copy / "rows" / row))
        place = [f"--trainer.default_root_dir={copy / f'fit{k}/alpha_1/FedAvg'}", "--trainer.name=seed_3"]
        cli("fit", *flags, "--trainer.seed=3", *more, *place)
        cli("study", "add", str(copy / f"fit{k}"), f"--into={copy / 'rows'}")
        assert Store(copy / "rows").matching(row)[0]["about"].get("suite") == suite


@pytest.mark.slow
def test_new_rows_follow_the_rules_and_leave_the_others_alone(
    ran: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is what a pull request with a row is asked for."""
    before = Path(shutil.copytree(copy / "rows", copy / "before"))
    cli("study", "remove", str(before / "alpha_1/FedSAM/seed_3"))
    args = ["study", "check", str(copy / "rows"), f"--beyond={before}", "--count=2"]
    cli(*args)
    output = capsys.readouterr().out.replace("\n", "")
    assert "FedSAM/seed_3: equal to the bit" in output and "FedAvg" not in output
    cli("study", "page", str(copy / "rows"), f"--beyond={before}")
    assert [text[:9] for text in capsys.readouterr().out.splitlines() if text.startswith("| Fed")] == [
        "| FedAvg ",
        "| FedSAM ",
    ]

    def changed(name: str, change: Callable[[dict[str, Any]], object], line: str) -> None:
        shutil.rmtree(copy / "rows")
        shutil.copytree(ran / "rows", copy / "rows")
        with Store.edited(copy / "rows") as store:
            change(store.matching(f"alpha_1/{name}/seed_3")[0])
        with pytest.raises(SystemExit, match=line):
            cli(*args)

    changed("FedSAM", lambda line: line["about"].pop("suite"), "was not trained by these rules")
    changed("FedSAM", lambda line: line.update(seed=4), "its column or seed is not one of the study")
    changed("FedSAM", lambda line: line["about"]["starts"][0].update(changed=True), "its code was not committed")
    changed(
        "FedAvg", lambda line: line["about"].update(weights="x"), "FedAvg/seed_3: is missing, or is not what it was"
    )
    changed("FedAvg", lambda line: line.update(row="other"), "FedAvg/seed_3: is missing, or is not what it was")


@pytest.mark.slow
def test_a_missing_row_has_the_settings_of_a_part_in_a_list(tmp_path: Path) -> None:
    zeta = {"zeta": {"key": "model.parts.zeta", "min": 0.1, "max": 1.0}}
    methods = {"MAN": ["--model FedAvg --model.parts+=MAN", "zeta"]}
    study = {**STUDY, "draws": 2, "seeds": [3, 4], "ranges": zeta, "methods": methods}
    extract({"small/about.yaml": yaml.safe_dump(study)}, tmp_path)
    run(tmp_path)
    weights = {line["row"]: line["about"]["weights"] for line in Store(tmp_path / "rows").lines}
    cli("study", "remove", str(tmp_path / "rows/alpha_1/MAN/seed_4"))
    run(tmp_path)
    assert {line["row"]: line["about"]["weights"] for line in Store(tmp_path / "rows").lines} == weights
