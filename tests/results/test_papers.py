"""The papers' numbers: as they stand in the specification, each once."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

import fl_lightning
from fl_lightning import nets
from fl_lightning.core.errors import UserError
from fl_lightning.results.papers import COLUMNS, PAPERS, Cell, find

NUMBERS = {
    ("fedsam", "1"): 4 * 2, ("fedsam", "2"): 7 * 6 * 3, ("fedsam", "3"): 3 * 4 * 3 + 2 * 3 * 3 * 4,
    ("fedsam", "4"): 2 * 6 * 3 * 3, ("fedsam", "5"): 16, ("fedsam", "6"): 2 * 13 * 8, ("fedsam", "7"): 10,
    ("fedsam", "8"): 9 * 6 + 21,
    ("fedsmoo", "1"): 2 * 8 * 8, ("fedsmoo", "2"): 12, ("fedsmoo", "3"): 16, ("fedsmoo", "6"): 2 * 8 * 8,
    ("fedsmoo", "7"): 16, ("fedsmoo", "8"): 4, ("fedsmoo", "FL-Simulator"): 2 * 9 * 4,
    ("fedgf", "1"): 11 * 6 * 3, ("fedgf", "2"): 6 * 6, ("fedgf", "3"): 6 * 3, ("fedgf", "4"): 2 * 6 + 2,
    ("fedgf", "5"): 16,
    ("fedgloss", "1"): 10 * 10, ("fedgloss", "2"): 7 * 2, ("fedgloss", "3"): 11 * 6, ("fedgloss", "4"): 9,
    ("fedgloss", "5/10"): 11 * 7 * 2, ("fedgloss", "6"): 4 * 6 + 4, ("fedgloss", "7"): 6 * 4,
    ("fedgloss", "8"): 11 * 4, ("fedgloss", "9"): 9 * 4,
    ("fedgmt", "1"): 6 * 2, ("fedgmt", "2"): 2 * 9 * 12, ("fedgmt", "3"): 12, ("fedgmt", "4"): 48,
    ("fedgmt", "FL-SAM"): 2 * 7 * 5,
}  # fmt: skip
"""Cells of each table."""


def test_number_of_cells() -> None:
    assert Counter((cell.paper, cell.table) for cell in find()) == NUMBERS
    assert {paper for paper, _ in NUMBERS} == set(PAPERS)


def test_each_cell_stands_there_once() -> None:
    keys = Counter(tuple(getattr(cell, name) for name in COLUMNS) for cell in find())
    assert [key for key, n in keys.items() if n > 1] == []


def test_the_file_has_these_columns_and_no_stray_space() -> None:
    with (Path(fl_lightning.__file__).parent / "results" / "papers.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == (*COLUMNS, "value", "std", "note")
    assert all(len(row) == len(head) and all(text == text.strip() for text in row) for row in rows)


SETTING = {
    "CIFAR10": r"alpha=(0|0.05|0.005|10|100)|Dir\(0\.[136]\)|Path\((2|3|4|6|10)\)|LT-Dir\((1|0.1|0.01)\)|IID|"
    "centralized",
    "CIFAR100": r"alpha=(0|0.5|0.005|10|1000)|Dir\(0\.[16]\)|Path\((10|20)\)|LT-Dir\(0.1\)|centralized",
    "CIFAR100-PAM": "PAM",
    "CINIC10": r"Path\(2\)|LT-Dir\(0.1\)",
    "AGNews": r"Path\(2\)|LT-Dir\(0.1\)",
    "Landmarks": "users|centralized",
    "Cityscapes": "uniform|heterogeneous",
    "IDDA": "(uniform|heterogeneous), (country|rainy)",
    "": "alpha=10|",
}


@pytest.mark.parametrize("paper", PAPERS)
def test_values_are_in_range(paper: str) -> None:
    for cell in find(paper=paper):
        assert re.fullmatch(SETTING[cell.dataset], cell.heterogeneity) or cell.metric == "seconds_per_round", cell
        assert cell.model == "" or hasattr(nets, cell.model), cell
        assert re.fullmatch(r"(\d+/(100|200|500|1262))?", cell.participation), cell
        assert re.fullmatch("[125]?", cell.epochs), cell
        if cell.value is None:
            assert re.match("(lost|not converged|not reached|failed)(;|$)", cell.note) and cell.std is None, cell
        elif cell.metric.startswith(("acc", "miou")):
            assert 1 <= cell.value <= 90, cell  # 1 % is chance on CIFAR-100
        else:
            assert cell.value > 0, cell
        spread = cell.std is None or (cell.value and 0 < cell.std < cell.value / 4)
        assert spread or cell.printed == "10.04 ± 5.38", cell


def one(paper: str, table: str, dataset: str, heterogeneity: str, algorithm: str, **where: str) -> Cell:
    (cell,) = find(paper=paper, table=table, dataset=dataset, heterogeneity=heterogeneity, algorithm=algorithm, **where)
    return cell


@pytest.mark.parametrize(
    ("where", "value", "std"),
    [
        (("fedsam", "2", "CIFAR10", "alpha=0", "FedASAM+SWA", {"participation": "20/100"}), 76.36, None),
        (("fedsam", "2", "CIFAR100", "alpha=0.5", "FedAvg", {"participation": "5/100", "epochs": "2"}), 38.21, None),
        (("fedsam", "3", "CIFAR100-PAM", "PAM", "FedSAM+Cutout",
          {"metric": "acc@5000", "participation": "10/500", "epochs": "1"}), 48.28, None),
        (("fedsam", "4", "CIFAR100", "alpha=1000", "FedASAM+Mixup+SWA", {"participation": "5/100"}), 46.97, None),
        (("fedsam", "6", "CIFAR10", "alpha=0.05", "FedDyn+SAM+SWA", {"participation": "20/100"}), 85.57, None),
        (("fedsam", "6", "CIFAR100", "alpha=0", "AdaBest+ASAM", {"participation": "5/100"}), None, None),
        (("fedsam", "8", "IDDA", "heterogeneous, rainy", "SiloBN+SAM", {"metric": "miou_unseen"}), 40.08, None),
        (("fedsmoo", "1", "CIFAR100", "Path(10)", "FedSMOO", {"participation": "10/200"}), 43.41, 0.22),
        (("fedsmoo", "2", "CIFAR10", "Dir(0.1)", "FedSMOO", {"metric": "trace"}), 2689.4, None),
        (("fedsmoo", "7", "CIFAR10", "Path(3)", "FedSMOO", {"metric": "seconds@74"}), 4562.88, None),
        (("fedgf", "1", "CIFAR10", "alpha=0.005", "FedGF", {"participation": "10/100"}), 79.39, None),
        (("fedgf", "1", "CIFAR100", "alpha=0.005", "SCAFFOLD", {"participation": "10/100"}), None, None),
        (("fedgf", "5", "CIFAR100", "alpha=0", "FedGF c=1", {}), 44.39, None),
        (("fedgloss", "3", "CIFAR10", "alpha=0", "FedDyn+SAM", {"model": "HsuCNN"}), 79.3, 3.1),
        (("fedgloss", "3", "CIFAR100", "alpha=0.5", "FedGloSS", {"model": "ResNet18GN"}), 46.7, 0.6),
        (("fedgloss", "8", "CIFAR10", "alpha=0.05", "FedGloSS+SAM", {}), 1.93, 0.03),
        (("fedgloss", "5/10", "CIFAR10", "alpha=0", "FedSMOO", {"metric": "cost"}), 0.4, None),
        (("fedsam", "6", "CIFAR100", "alpha=0.5", "FedASAM+SWA", {"participation": "20/100"}), 48.27, None),
        (("fedgloss", "1", "CIFAR10", "alpha=0", "FedAvg", {"metric": "lambda_local@cat"}), 424.2, None),
        (("fedgloss", "7", "CIFAR100", "alpha=0.5", "FedGloSS", {"model": "ResNet18GN"}), 46.7, 0.6),
        (("fedgmt", "3", "CIFAR10", "LT-Dir(0.01)", "FedAvg", {}), 61.94, 4.93),
        (("fedgmt", "2", "CIFAR10", "Path(4)", "FedLESAMD", {}), 79.79, 0.57),
        (("fedgmt", "2", "CINIC10", "LT-Dir(0.1)", "FedGMTv2", {"metric": "minutes@44"}), 35.45, None),
        (("fedgmt", "4", "CIFAR10", "Path(2)", "FedGMT ema_alpha=0.9995", {}), 73.06, None),
    ],
)  # fmt: skip
def test_cells_by_hand(where: tuple[str, str, str, str, str, dict[str, str]], value: float, std: float) -> None:
    *named, further = where
    cell = one(*named, **further)  # type: ignore[arg-type]
    assert (cell.value, cell.std) == (value, std)


def test_numbers_that_two_tables_print_agree() -> None:
    def acc(table: str, dataset: str, algorithm: str, paper: str = "fedgmt") -> dict[str, float | None]:
        cells = find(paper=paper, table=table, dataset=dataset, algorithm=algorithm, metric="acc")
        return {cell.heterogeneity: cell.value for cell in cells if cell.participation in ("5/100", "10/100")}

    full = acc("2", "CIFAR10", "FedGMT")
    for subset in (
        acc("3", "CIFAR10", "FedGMT"),
        *(acc("4", "CIFAR10", f"FedGMT {x}") for x in ("gamma=1", "ema_alpha=0.95")),
    ):
        assert subset.items() <= full.items()
    assert acc("8", "CIFAR10", "FedSMOO", "fedsmoo").items() <= acc("1", "CIFAR10", "FedSMOO", "fedsmoo").items()
    for dataset in ("CIFAR10", "CIFAR100"):
        static, all_ = (
            acc("5", dataset, "FedGF", "fedgf"),
            find(paper="fedgf", table="1", dataset=dataset, algorithm="FedGF"),
        )
        assert static.items() <= {c.heterogeneity: c.value for c in all_ if c.participation == "5/100"}.items()


def test_lookup_tells_what_there_is() -> None:
    with pytest.raises(UserError, match=r"^algorithm = FedSMO: not in the papers' tables; choose from FedSMOO"):
        find(paper="fedsmoo", algorithm="FedSMO")
    with pytest.raises(UserError, match=r"^papers: rounds is no column; choose from paper, table"):
        find(rounds="3")


def test_repeated_table() -> None:
    """Table 7 of FedGloSS repeats numbers of its Table 3."""
    repeated = find(paper="fedgloss", table="7")
    for cell in repeated:
        key = {name: getattr(cell, name) for name in COLUMNS if name != "table"}
        (original,) = find(**key, table="3")
        assert (original.printed, original.value) == (cell.printed, cell.value), cell
