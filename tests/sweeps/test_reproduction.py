"""Cells of the papers' tables as runs, and tables of their numbers beside the papers'."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fl_lightning.core.errors import UserError
from fl_lightning.results.papers import find
from fl_lightning.sweeps import reproduction_table
from fl_lightning.sweeps.reproduction import Line, Task, line, mark, select, tasks
from fl_lightning.sweeps.trials import Outcome, Trial

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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("fedglos", "3"), r"^papers: paper = fedglos: no such cell; choose from fedgloss"),
        (("fedgloss", "30"), r"^papers: table = 30: no such cell; choose from 3"),
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
    found, reasons = tasks(select("fedgloss", "9", ["FedGloSS+SAM"]))
    assert [[cell.metric for cell in task.cells] for task in found] == [["acc", "lambda_max"]] * 2
    assert reasons == []


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (("fedgf", "3"), "models_per_client: not among the numbers that a run gives here (FedAvg, FedSAM"),
        (("fedgmt", "FL-SAM"), "table = FL-SAM: the README of the paper's code has settings of its own"),
        (("fedgloss", "5/10"), "rounds_to_fedavg: not among the numbers that a run gives here"),
    ],
)
def test_what_cannot_be_reproduced_says_so(table: tuple[str, str], reason: str) -> None:
    found, reasons = tasks(select(*table))
    assert found == [] and any(given.startswith(reason) for given in reasons), reasons


def test_every_table_has_runs_or_a_reason() -> None:
    for paper, table in dict.fromkeys((cell.paper, cell.table) for cell in find()):
        found, reasons = tasks(select(paper, table))
        assert found or reasons
        names = [task.name for task in found]
        assert len(set(names)) == len(names)


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
    """Two runs of 20 rounds with evaluations of 0.01 t and 0.02 t, and one that broke off."""
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
    found = {each.cell.metric: each for each in lines(*runs)}
    assert found["acc"].values == pytest.approx((15.5, 31.0))  # the mean of rounds 11 to 20
    assert found["acc@50%"].values == pytest.approx((10.0, 20.0))
    assert found["lambda_max"].values == (3.0, 6.0)
    assert found["acc"].difference == pytest.approx(23.25 - 83.9)
    assert found["acc"].std == pytest.approx(15.5 / 2**0.5)
    assert found["acc"].errors == ("training diverged",)


def test_tables(runs: tuple[Task, list[Outcome]], tmp_path: Path) -> None:
    found = lines(*runs)
    console = Console(width=100, record=True, file=(tmp_path / "terminal").open("w"))
    console.print(reproduction_table.table(found, 0.002))
    shown = console.export_text()
    assert "fedgloss, Table 6: 0.2 % of the rounds" in shown
    assert "FedGloSS+SAM, lambda_max" in shown and "2 of 3" in shown
    reproduction_table.write(found, 0.002, tmp_path)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert float(rows["acc"]["ours"]) == pytest.approx(23.25) and rows["acc"]["value"] == "83.9"
    assert rows["acc"]["fraction"] == "0.002" and rows["acc"]["seeds"] == "2"
    latex = (tmp_path / "table.tex").read_text()
    assert r"FedGloSS+SAM & 23.2 $\pm$ 11.0 & 83.9 $\pm$ 0.4 & $-$60.7 & 2 of 3 \\" in latex
    assert "| FedGloSS+SAM | 23.2 ± 11.0 | 83.9 ± 0.4 | -60.7 | 2 of 3 |" in (tmp_path / "table.md").read_text()


def test_run_folder_knows_its_cell(runs: tuple[Task, list[Outcome]], tmp_path: Path) -> None:
    task, _ = runs
    mark(tmp_path, task, 0.002)
    found = json.loads((tmp_path / "reproduction.json").read_text())
    assert {key.pop("fraction") for key in found} == {0.002}
    assert [cell for key in found for cell in find(**key)] == list(task.cells)
