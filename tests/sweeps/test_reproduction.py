"""Cells of the papers' tables as runs, and tables of their numbers beside the papers'."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fl_lightning.core.errors import UserError
from fl_lightning.results.papers import find, our_number
from fl_lightning.sweeps import reproduction
from fl_lightning.sweeps.reproduction import Line, Task, declared, line, mark, select, tasks, why_not
from fl_lightning.sweeps.trials import Outcome, Trial
from tests.results.folders import write

CNN = ["CIFAR10", "HsuCNN", "alpha=0", "alpha=0.05"]
CONFIG: dict[str, Any] = {"trainer": {"max_rounds": 10_000, "eval_every": 100, "eval_last": 100}, "model": {}}


def test_rows_and_columns_of_a_table() -> None:
    cells = select("fedgloss", "3", ["FedAvg", "FedSAM"], CNN)
    assert [(c.algorithm, c.dataset, c.model, c.heterogeneity) for c in cells] == [
        (algorithm, "CIFAR10", "HsuCNN", alpha)
        for algorithm in ("FedAvg", "FedSAM")
        for alpha in ("alpha=0", "alpha=0.05")
    ]
    assert len(select("fedgloss", "3")) == 66
    assert {c.epochs for c in select("fedsam", "2", columns=["E=2", "5/100"])} == {"2"}
    (cell,) = select("fedsam", "8", ["FedSAM"], ["uniform", "rainy", "miou_seen"])
    assert (cell.heterogeneity, cell.value) == ("uniform, rainy", 64.81)
    assert select("fedgloss", "10") == select("fedgloss", "5/10")
    assert select("FedGloSS", "3", ["fedavg", "FEDSAM"], [term.lower() for term in CNN]) == cells


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("fedglos", "3"), r"^paper = fedglos: not in the papers' tables; choose from fedgloss, .*, fedsmoo$"),
        (("fedgloss", "30"), r"^table = 30: not in the papers' tables; choose from 3, .*1"),
        (("fedgloss", "3", ["FedSMO"]), r"^rows = FedSMO: not in table 3; choose from FedAvg, FedProx"),
        (
            ("fedgloss", "3", ["FedAvg"], ["alpha=1"]),
            r"^columns = alpha=1: no column of these rows in table 3; choose from CIFAR10, CIFAR100, HsuCNN",
        ),
        (("fedgloss", "3", [], ["ResNet18GN", "alpha=0"]), r"^columns = ResNet18GN,alpha=0: no cell of table 3 is all"),
    ],
)
def test_what_is_not_there(asked: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        select(*asked)


def test_cells_that_differ_in_their_metric_are_one_run() -> None:
    planned, reasons = tasks(select("fedgloss", "9", ["FedGloSS+SAM"]))
    assert [[cell.metric for cell in task.cells] for task in planned] == [["acc", "lambda_max"]] * 2
    assert reasons == []


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            ("fedsmoo", "7"),
            "a time of the paper's machine; time/round_s in a run's metrics.csv is that of yours (FedAvg,",
        ),
        (
            ("fedsam", "7", ["FedSAM+SWA 100"]),
            "algorithm = FedSAM+SWA 100: our copy of the paper has no",
        ),
    ],
)
def test_what_cannot_be_reproduced_says_so(table: tuple[Any, ...], reason: str) -> None:
    planned, reasons = tasks(select(*table))
    assert planned == [] and any(text.startswith(reason) for text in reasons), reasons


@pytest.mark.slow
def test_every_table_has_runs_or_a_reason() -> None:
    for paper, table in dict.fromkeys((cell.paper, cell.table) for cell in find()):
        cells = select(paper, table)
        planned, reasons = tasks(cells)
        assert planned or reasons or None not in map(declared, cells)
        names = [task.name for task in planned]
        assert len(set(names)) == len(names)


@pytest.mark.slow
def test_number_of_cells_that_are_known() -> None:
    cells = find()
    assert sum(why_not(cell) is None for cell in cells) == 2079
    unknown = {cell.metric.partition("@")[0] for cell in cells if why_not(cell)}
    assert unknown == {
        "seconds",
        "seconds_per_round",
        "minutes",
        "transmissions_100",  # of an unnamed data set
        "acc",  # SWA 100 of ECCV's Table 7, which the paper does not explain
    }


@pytest.mark.slow
def test_declared_numbers_are_the_papers() -> None:
    pairs = [(declared(cell), cell.value) for cell in find() if declared(cell) is not None]
    assert len(pairs) == 44
    assert [number for number, _ in pairs] == pytest.approx([value for _, value in pairs], abs=0.004)


@pytest.mark.parametrize(
    ("table", "rows", "runs"),
    [
        (("fedgf", "4"), ["FedGF"], ["FedGF"] * 6 + ["FedAvg"] * 6),  # their target is FedAvg's accuracy
        (("fedgloss", "10"), ["FedAvg"], ["FedAvg"] * 7),
        (("fedsmoo", "3"), ["FedSMOO", "FedAvg"], ["FedAvg", "FedSMOO"]),
        (("fedsmoo", "6"), ["FedSMOO"], ["FedSMOO"] * 8),  # a target in per cent needs no other run
    ],
)
def test_runs_of_fedavg_are_added_where_it_is_the_measure(
    table: tuple[str, str], rows: list[str], runs: list[str]
) -> None:
    planned, _ = tasks(select(*table, rows))
    assert [task.cells[0].algorithm for task in planned] == runs
    assert len({task.name for task in planned}) == len(runs)


def test_each_measure_is_taken_once_and_by_the_papers_definition() -> None:
    def metrics(paper: str, table: str, row: str) -> str:
        (task, *_), _ = tasks(select(paper, table, [row]))
        (callback,) = (arg for arg in task.trials(CONFIG, 1, [0], [])[0].args if "FlatnessMonitor" in arg)
        return callback.partition("metrics: ")[2]

    assert metrics("fedgf", "2", "FedGF") == (
        "[{class_path: LPF, init_args: {scale: filter}}, LambdaMax, "
        "{class_path: Discrepancy, init_args: {clients: all, samples: null}}]}}"
    )
    clients = "{class_path: ClientLambdaMax, init_args: {data: [local, global], clients: all}}"
    assert metrics("fedgloss", "1", "FedAvg") == f"[{clients}]}}}}"
    assert metrics("fedsmoo", "2", "FedSAM") == "[Updates, LambdaMax, HessianTrace]}}"
    assert metrics("fedsam", "1", "FedSAM").endswith("{class_path: Spectrum, init_args: {method: power}}]}}")


def finished(folder: Path, accuracy: dict[int, float], units: int = 2) -> Path:
    """Writes a run of 6 rounds that has ended."""
    (write(folder, accuracy, units=units) / "summary.json").write_text("{}")
    return folder


def test_numbers_up_to_a_target(tmp_path: Path) -> None:
    """FedAvg ends at 0.6 with 12 models and 12,000 bits, and has 0.5 in round 3."""
    for seed in (0, 1):
        finished(tmp_path / "column" / "FedAvg" / f"seed_{seed}" / "version_0", {3: 0.5, 6: 0.5 + 0.2 * seed})
    mine = finished(tmp_path / "column" / "FedSMOO" / "seed_0" / "version_0", {2: 0.5, 4: 0.65, 6: 0.9}, units=4)
    expected = {
        "rounds@50": 2, "rounds@90": 6, "rounds@91": float("inf"), "rounds_to_fedavg": 4,
        "cost": 16 / 12, "cost@50": 8 / 6, "transmissions_100": 0.16,
    }  # fmt: skip
    assert {metric: our_number(mine, metric) for metric in expected} == pytest.approx(expected)
    alone = finished(tmp_path / "other" / "FedSMOO" / "seed_0" / "version_0", {6: 0.9})
    assert our_number(alone, "rounds_to_fedavg") is None and our_number(alone, "rounds@90") == 6
    (cell,) = find(paper="fedsmoo", table="3", algorithm="FedSMOO", metric="rounds@74")
    reached = line(cell, [Outcome(Trial("a", ()), mine), Outcome(Trial("b", ()), alone)])
    assert reached.values == (6, 6) and reached.difference == 6 - 194
    (double,) = find(paper="fedsmoo", table="3", algorithm="FedCM", metric="cost@74")
    counted = line(replace(double, metric="cost@50"), [Outcome(Trial("c", ()), mine)])
    assert counted.values == pytest.approx((2 * 8 / 6 / 1.5,))  # two models a round in place of one and a half
    never = finished(tmp_path / "column" / "never" / "seed_0" / "version_0", {6: 0.1})
    missed = line(cell, [Outcome(Trial("c", ()), never)])
    assert missed.errors == (f"{never}: rounds@74 is not reached",)
    assert reproduction.line_cells(missed) == ["FedSMOO, rounds@74", "not reached", "194", "", "0 of 1"]


def test_eigenvalue_of_the_client_that_has_one_class_alone(tmp_path: Path) -> None:
    counts = [{"0": 1, "3": 4}, {"3": 5}, {"0": 5}, {"0": 5}]
    (tmp_path / "partition.json").write_text(json.dumps({"clients": 4, "classes": 10, "counts": counts}))
    values = {"0": 7.0, "1": 8.0, "2": 9.0, "3": 10.0}
    measured = {
        "round": 6, "seed": 0, "name": "client_lambda_max_local_all", "value": 8.5, "error": None, "residual": 0.0,
        "model": "local models", "data": "own data of 4 clients", "samples": 20, "settings": {"operator": "hessian"},
        "details": {"clients": values},
    }  # fmt: skip
    (tmp_path / "flatness.jsonl").write_text(json.dumps(measured) + "\n")
    numbers = {name: our_number(tmp_path, f"lambda_local@{name}") for name in ("cat", "airplane", "airplane2", "bird")}
    assert numbers == {"cat": 8.0, "airplane": 9.0, "airplane2": 10.0, "bird": None}
    assert our_number(tmp_path, "lambda_global@cat") is None
    (cell,) = find(paper="fedgloss", table="1", algorithm="FedAvg", metric="lambda_local@cat")
    lines = [line(cell, [Outcome(Trial("a", ()), tmp_path)], 0.5, "--data.alpha 1 --trainer.clients_per_round 7")]
    reproduction.write_lines(lines, tmp_path)
    description = "local models, own data of 4 clients (20), operator hessian"
    with_settings = ", with --data.alpha 1 --trainer.clients_per_round 7"
    text = (tmp_path / "table.md").read_text()
    assert text.startswith(f"**fedgloss, Table 1: 50 % of the rounds{with_settings}**")
    assert f"5/100, E=1{with_settings} |" in text and text.endswith(f"- lambda_local: {description}\n")
    latex = (tmp_path / "table.tex").read_text()
    assert latex.count(r"with --data.alpha 1 --trainer.clients\_per\_round 7") == 2 and description in latex
    with (tmp_path / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["settings"] == "'--data.alpha 1 --trainer.clients_per_round 7"


def test_arguments_of_the_runs() -> None:
    (task,), _ = tasks(select("fedgloss", "8", ["FedGloSS+SAM"], ["CIFAR10", "alpha=0.05"]))
    trials = task.trials(CONFIG, 0.1, [0, 1], ["--data.data_dir", "somewhere"])
    assert [trial.name for trial in trials] == [
        f"CIFAR10_HsuCNN_alpha=0.05_5of100_E=1/FedGloSS+SAM/seed_{seed}" for seed in (0, 1)
    ]
    assert " ".join(trials[1].args) == (
        "--config experiment/fedgloss/cifar10_alpha0.05 --model FedGloSS --model.rho 0.15 --model.beta 10 "
        "--model.ascent SAM --model.ascent.rho 0.15 --model.ascent.warmup 2000 "
        "--trainer.clients_per_round=5 --data.num_clients=100 --trainer.local_epochs=1 "
        "--trainer.max_rounds=1000 --trainer.eval_every=10 --trainer.eval_last=10 "
        "--trainer.callbacks+={class_path: FlatnessMonitor, init_args: {every_n_rounds: 1000, metrics: [LambdaMax]}} "
        "--trainer.seed=1 --data.data_dir somewhere"
    )
    (task,), _ = tasks(select("fedgloss", "6", ["SAM"], ["CIFAR10", "centralized"]))
    assert task.trials(CONFIG, 1, [0], [])[0].command == "centralized"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Task, list[Outcome]]:
    """Writes two runs of 20 rounds with evaluations of 0.01 t and 0.02 t, and one that broke off."""
    (task,), _ = tasks(select("fedgloss", "6", ["FedGloSS+SAM"], ["CIFAR10", "alpha=0"]))
    outcomes = []
    for seed in (1, 2):
        (folder := tmp_path / f"seed_{seed}").mkdir()
        rows = [f"{t},{0.01 * seed * t},{'' if t < 20 else 3 * seed}" for t in range(1, 21)]
        head = "round,server/test/acc,flatness/lambda_max"
        (folder / "metrics.csv").write_text("\n".join([head, *rows]) + "\n")
        (folder / "config.yaml").write_text("trainer: {max_rounds: 20, eval_last: 10}\n")
        outcomes.append(Outcome(Trial(folder.name, ()), folder, None))
    return task, [*outcomes, Outcome(Trial("seed_3", ()), None, "training diverged")]


def lines(task: Task, outcomes: list[Outcome]) -> list[Line]:
    return [line(cell, outcomes, 0.002) for cell in task.cells]


def test_numbers_of_the_runs(runs: tuple[Task, list[Outcome]]) -> None:
    metrics = {line.cell.metric: line for line in lines(*runs)}
    assert metrics["acc"].values == pytest.approx((15.5, 31.0))  # the mean of rounds 11 to 20
    assert metrics["acc@50%"].values == pytest.approx((10.0, 20.0))
    assert metrics["lambda_max"].values == (3.0, 6.0)
    assert metrics["acc"].difference == pytest.approx(23.25 - 83.9)
    assert metrics["acc"].std == pytest.approx(15.5 / 2**0.5)
    assert metrics["acc"].errors == ("training diverged",)


def test_tables(runs: tuple[Task, list[Outcome]], tmp_path: Path) -> None:
    table_lines = lines(*runs)
    console = Console(width=100, record=True, file=(tmp_path / "terminal").open("w"))
    console.print(reproduction.table_of(table_lines))
    shown = console.export_text()
    assert "fedgloss, Table 6: 0.2 % of the rounds" in shown
    assert "FedGloSS+SAM, lambda_max" in shown and "2 of 3" in shown
    reproduction.write_lines(table_lines, tmp_path)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert float(rows["acc"]["ours"]) == pytest.approx(23.25) and rows["acc"]["value"] == "83.9"
    assert rows["acc"]["fraction"] == "0.002" and rows["acc"]["seeds"] == "2"
    latex = (tmp_path / "table.tex").read_text()
    assert r"FedGloSS+SAM & 23.2 $\pm$ 11.0 & 83.9 $\pm$ 0.4 & $-$60.7 & 2 of 3 \\" in latex
    assert "| FedGloSS+SAM | 23.2 ± 11.0 | 83.9 ± 0.4 | -60.7 | 2 of 3 |" in (tmp_path / "table.md").read_text()


def test_run_folder_knows_its_cell(runs: tuple[Task, list[Outcome]], tmp_path: Path) -> None:
    task, _ = runs
    mark(tmp_path, task, 0.002, "--data Digits")
    keys = json.loads((tmp_path / "reproduction.json").read_text())
    assert {(key.pop("fraction"), key.pop("settings")) for key in keys} == {(0.002, "--data Digits")}
    assert [cell for key in keys for cell in find(**key)] == list(task.cells)
