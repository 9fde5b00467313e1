"""The science leg of the program for a GPU: the ledger's settings, a run that is cut off, and which accuracy counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.legs import report, science
from benchmarks.legs.items import Task, machine, machine_name
from benchmarks.legs.science import engine_for, settings, summary
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.results.metrics import FILE, read_metrics, read_run
from fl_lightning.results.rows import located

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "ledger/cifar10"
DATA = ["--data", "Arrays", "--data.path", "cifar10.npz", "--data.partition", "FromFile", "--data.partition.path"]
SPLIT = "cifar10_federated_train_alpha_0.05.json"
OWN = {"accelerator", "engine", "loggers", "default_root_dir", "name", "enable_progress_bar", "strategy", "num_nodes"}
"""Settings of the trainer that are those of a machine or a run's own; a ledger leaves most of them out."""
MEASURE = ".trainer.callbacks.fl_lightning.FlatnessMonitor.metrics.fl_lightning.LambdaMax"
LATER = {
    ".data.init_args.num_classes": None,
    ".trainer.asynchronous": None,
    ".trainer.clock": None,
    ".model.init_args.absent": "kept",
    ".model.init_args.parts": None,
    ".model.init_args.optimizer.init_args.state": "reset",
    f"{MEASURE}.by_layer": False,
    f"{MEASURE}.merged": False,
    f"{MEASURE}.operator": "hessian",
    f"{MEASURE}.parameters": None,
}
"""Settings that some of the ledger's rows did not have yet, and their values, which change nothing."""


def task(folder: Path, seconds: float) -> Task:
    return Task("benchmarks.legs.science", "cpu", time.monotonic() + seconds, folder / "gpu.json", [])


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Returns settings by path; those of callbacks by class."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = {entry["class_path"]: entry.get("init_args", {}) for entry in value}
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, entry in value.items() for name, leaf in flat(entry, f"{path}.{key}").items()}


@pytest.mark.parametrize("row", ["FedAvg", "FedSAM", "FedGMT", "FedGloSS+SAM"])
def test_settings_are_those_of_the_ledger(row: str) -> None:
    ours = flat(FederatedCLI("fit", *settings(row), *DATA, SPLIT).resolved())
    theirs = flat(yaml.safe_load((located(LEDGER / row / "seed_0")[0] / "config.yaml").read_text()))
    for config in (ours, theirs):
        for name in [*(f".trainer.{key}" for key in OWN), ".trainer.callbacks.fl_lightning.Checkpoints.every_n_rounds"]:
            config.pop(name, None)
    for name in ours.keys() - theirs.keys():
        assert ours[name] == LATER.get(name, "unknown"), name
    assert {name: ours.get(name) for name in theirs} == theirs


def test_composition_of_asam_and_swa() -> None:
    ours = flat(FederatedCLI("fit", *settings("FedASAM+SWA"), *DATA, SPLIT).resolved())
    start = ".model.init_args."
    assert (ours[".model.class_path"], ours[f"{start}rho"], ours[f"{start}eta"]) == ("fl_lightning.FedASAM", 0.7, 0.2)
    swa = {key: ours[f"{start}averaging.init_args.{key}"] for key in ("start", "cycle", "lr_min")}
    assert swa == {"start": 0.75, "cycle": 10, "lr_min": 1e-4}


def curve(folder: Path, rounds: int, evaluated: set[int]) -> Any:
    lines = [f"{k},0.5,{k / 1000 if k in evaluated else ''}\n" for k in range(1, rounds + 1)]
    (folder / FILE).write_text("round,time/round_s,server/test/acc\n" + "".join(lines))
    return read_run(folder)


def test_accuracy_of_a_whole_run_is_that_of_its_last_rounds_all_evaluated(tmp_path: Path) -> None:
    outcome = summary(curve(tmp_path, 100, {20, 40, 60, 80, *range(91, 101)}), 100, 10)
    assert outcome["whole"] and outcome["rounds"] == 100 and outcome["accuracy"] == pytest.approx(0.0955)
    assert outcome["deviation"] == pytest.approx(0.00287, abs=1e-5) and "accuracy_of_last_evaluations" not in outcome


@pytest.mark.parametrize("rounds", [95, 100])
def test_accuracy_of_a_cut_run_has_another_name_and_its_rounds(tmp_path: Path, rounds: int) -> None:
    """Neither a run that has not reached its end, nor one whose last rounds were not all evaluated, has the first."""
    outcome = summary(curve(tmp_path, rounds, {10, 20, 30, 40, 60, 80, 91, 92}), 100, 10)
    assert outcome["whole"] is (rounds == 100) and outcome["rounds"] == rounds
    assert "accuracy" not in outcome and "deviation" not in outcome
    assert outcome["rounds_of_last_evaluations"] == [40, 60, 80, 91, 92]
    assert outcome["accuracy_of_last_evaluations"] == pytest.approx(0.0726)


def test_a_run_without_a_row_is_reported() -> None:
    assert summary({}, 100, 10) == {"whole": False, "rounds": 0, "curve": []}


def test_engine_is_the_fastest_of_this_machine_unless_it_was_wrong(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert engine_for(out, "cpu") == "auto"
    work = {"work": "W1", "method": "FedAvg", "form": "bf16", "seeds": 1, "cohort": 5}
    speed: dict[str, Any] = {
        "a": {**work, "who": "graphed", "round_s": 1.0}, "b": {**work, "who": "batched", "round_s": 2.0},
        "c": {**work, "who": "sequential", "round_s": 3.0}, "d": {**work, "who": "plain loop", "round_s": 0.1},
        "e": {**work, "who": "sequential", "round_s": 0.1, "form": "float32"}, "f": {"error": "none"},
    }  # fmt: skip
    right = {"FedAvg, graphed": {"ok": True}, "MOON, graphed": {"ok": False}, "FedSMOO, compiled": {"error": "none"}}
    wrong = {**right, "FedGloSS, graphed": {"ok": False}}
    for correctness, engine in ((right, "graphed"), (wrong, "batched")):
        out.write_text(json.dumps({machine_name(machine("cpu")): {"speed": speed, "correctness": correctness}}))
        assert engine_for(out, "cpu") == engine
    out.write_text(json.dumps({"another machine": {"speed": speed}}))
    assert engine_for(out, "cpu") == "auto"


@pytest.mark.long
def test_a_run_that_is_cut_off_keeps_its_results_and_goes_on(tmp_path: Path) -> None:
    """It gives what it has logged even if it had no time at all to start, and none of its rounds is trained twice."""
    fit = [*science.SMALL.split(), "--trainer.max_rounds", "1000000", *science.callbacks(500)]
    job = science.Job("FedAvg, long", 1_000_000, 10, fit)

    def cut(seconds: float) -> Any:
        return science.train(job, task(tmp_path, seconds))

    none = cut(0.0)
    assert none == {"whole": False, "rounds": 0, "curve": []}
    first, before = cut(45.0), time.monotonic()
    assert not first["whole"] and first["rounds"] >= 5 and "accuracy" not in first and "error" not in first
    assert first["rounds_of_last_evaluations"][-1] <= first["rounds"] and first["seconds a round"] > 0
    (version,) = (tmp_path / "runs/FedAvg-long").glob("version_*")
    assert (version / "checkpoints/last.ckpt").exists() and time.monotonic() - before < science.SAVING
    resumed = cut(45.0)
    assert resumed["rounds"] > first["rounds"] and resumed["curve"][: len(first["curve"])] == first["curve"]
    rounds = [at for at, _ in read_metrics(version / FILE)["time/round_s"]]
    assert rounds == list(range(1, resumed["rounds"] + 1))


@pytest.mark.slow
def test_a_run_that_fails_is_an_error_with_what_it_has(tmp_path: Path) -> None:
    job = science.Job("FedAvg", 40, 10, [*science.SMALL.split(), "--trainer.max_rounds", "-1"])
    outcome = science.train(job, task(tmp_path, 300.0))
    assert "max_rounds" in outcome["error"] and outcome["rounds"] == 0 and not outcome["whole"]


def test_report_never_shows_a_cut_run_as_a_whole_one() -> None:
    flatness = {"flatness/lambda_max": 70.0, "flatness_round": 3000, "seconds a round": 0.012, "engine": "graphed"}
    complete = {"whole": True, "rounds": 3000, "accuracy": 0.48, "deviation": 0.01, **flatness, "curve": []}
    last = {"accuracy_of_last_evaluations": 0.61, "rounds_of_last_evaluations": [1920, 1940, 1960, 1980, 2000]}
    cut = {"whole": False, "rounds": 2007, **last, **flatness, "flatness_round": 2000, "curve": []}
    none = {"whole": False, "rounds": 0, "curve": [], "error": "out of memory"}
    items = {"FedAvg": complete, "FedGloSS+SAM": cut, "FedASAM+SWA": none, "FedSMOO": {"error": "it crashed"}}
    text, table = report.science(items)
    assert "3,000 rounds" in text and "10,000" in text
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    first, second, third = lines[2:]
    assert first[:6] == ["FedAvg", "3000", "48.00 ± 1.00", "48.60 ± 5.01", "70", "148"]
    assert first[6:] == ["65.7 ± 1.0", "69.24", "67.85", "71.14 ± 4.07", "12"]
    assert second[:4] == ["FedGloSS+SAM", "2007, cut off", "61.00 (5, rounds 1920 to 2000)", "74.54 ± 0.43"]
    assert second[4:6] == ["70 (round 2000)", "6.69"]
    assert third[:5] == ["FedASAM+SWA", "0, cut off", "", "59.40 ± 0.04", ""]
