"""All 46 figures: ``reproduce`` draws what the papers' texts say, and the output says so, or what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_lightning import Dirichlet
from fl_lightning.results.papers import PAPERS
from fl_lightning.results.recipes import PaperFigure, figures
from fl_lightning.sweeps.reproduction import figure_tasks
from tests import generated
from tests.runs import cli

SOME = ["FedSAM", "FedDyn+SAM", "FedSpeed", "FedGAMMA", "FedSMOO", "FedGloSS+SAM"]
ALL = {
    "fedsmoo": "FedAvg, FedAdam, SCAFFOLD, FedCM, FedDyn, FedSAM, MoFedSAM, FedSMOO",
    "fedgf": "FedAvg, FedAvgM, FedProx, SCAFFOLD, FedDyn, FedSAM, FedASAM, MoFedSAM, FedGAMMA, "
    "FedSMOO without regulariser, FedGF",
    "fedgloss": "FedAvg, FedProx, FedDyn, SCAFFOLD, FedGloSS, FedSAM, FedDyn+SAM, FedSpeed, FedGAMMA, FedSMOO, "
    "FedGloSS+SAM",
    "fedgmt": "FedAvg, FedDyn, FedNTD, FedSAM, FedSpeed, FedSMOO, FedLESAMD, FedGMT, FedGMTv2",
}
"""All methods of a paper."""
TEXTS = """
fedsam 1 | surface | FedAvg, FedASAM | CIFAR100: alpha=0, alpha=1000
fedsam 2a | plane | FedAvg | CIFAR100: alpha=0, alpha=0.5, alpha=1000
fedsam 2c | plane | FedAvg | CIFAR100: alpha=0
fedsam 2d | plane | FedAvg | CIFAR100: alpha=1000
fedsam 3a | clients accuracy | FedAvg | CIFAR100: alpha=0, alpha=1000
fedsam 3c | curves server/test/acc | FedAvg 10T | CIFAR100: alpha=0, alpha=0.5, alpha=1000
fedsam 4 | clients client_lambda_max_local | FedAvg, FedASAM | CIFAR100: alpha=0, alpha=0.5, alpha=1000
fedsam 5 | spectrum | FedAvg, FedSAM, FedASAM, FedASAM+SWA | CIFAR100: alpha=0, alpha=1000
fedsam 6 | corruptions | FedAvg, FedSAM, FedASAM, FedASAM+SWA | CIFAR10: alpha=0; CIFAR100: alpha=0
fedsmoo 2 | partition | with replacement, without replacement | CIFAR10: Dir(0.1)
fedsmoo 3 | surface | FedAvg, SCAFFOLD, MoFedSAM, FedSMOO | CIFAR10: Dir(0.1)
fedsmoo 4 | lines acc | FedSMOO | CIFAR10: Dir(0.1)
fedsmoo 5 | partition | Dirichlet-0.6, Pathological-30 | CIFAR100: Dir(0.6), Path(20)
fedsmoo 6 | partition | with replacement, without replacement | CIFAR100: Dir(0.1)
fedsmoo 7 | curves server/test/acc | all | CIFAR10: Dir(0.1), Dir(0.6), Path(3), Path(6)
fedsmoo 8 | curves client/train/loss server/test/loss | all | CIFAR10: Dir(0.1), Dir(0.6), Path(3), Path(6)
fedsmoo 9 | curves server/test/acc | all | CIFAR10: Dir(0.1), Dir(0.6), Path(3), Path(6)
fedsmoo 10 | curves client/train/loss server/test/loss | all | CIFAR10: Dir(0.1), Dir(0.6), Path(3), Path(6)
fedgf 1a | bars acc | FedSAM | CIFAR100: alpha=0, alpha=0.005, alpha=10
fedgf 1b | bars discrepancy | FedSAM | CIFAR100: alpha=0, alpha=0.005, alpha=10
fedgf 2 | surface | FedSAM | CIFAR100: alpha=0
fedgf 4 | curves server/test/acc | all | CIFAR10: alpha=0; CIFAR100: alpha=0
fedgf 5 | perturbation | FedAvg, FedSAM, FedASAM, MoFedSAM, FedSMOO, FedGF | CIFAR100: alpha=0, alpha=10
fedgf 6 | surface | FedGF | CIFAR100: alpha=0
fedgf 7 | curves flatness/server_c | FedGF | CIFAR100: alpha=0, alpha=0.005, alpha=10
fedgloss 1 | surface | FedAvg, FedSAM | CIFAR10: alpha=0, alpha=0.05; CIFAR100: alpha=0, alpha=0.5
fedgloss 2 | surface | FedSAM | CIFAR100: alpha=0
fedgloss 4 | curves flatness/delta_epsilon | FedGloSS+SAM, FedGloSS+SAM without ADMM | CIFAR10: alpha=0; CIFAR100: alpha=0
fedgloss 5a | surface | FedGloSS+SAM, FedSAM | CIFAR100: alpha=0
fedgloss 5b | surface | FedSMOO, FedGloSS+SAM | CIFAR100: alpha=0
fedgloss 6 | surface | FedSAM, FedSMOO, FedGloSS+SAM | CIFAR10: alpha=0, ResNet alpha=0.05; CIFAR100: alpha=0
fedgloss 7 | bars lambda_max | all | CIFAR10: alpha=0, alpha=0.05; CIFAR100: alpha=0, alpha=0.5
fedgloss 8 | curves flatness/norm_w | sam | CIFAR10: ResNet alpha=0.05; CIFAR100: ResNet alpha=0.5
fedgloss 9 | line | NaiveFedGloSS+SAM, FedGloSS+SAM | CIFAR10: alpha=0, alpha=0.05; CIFAR100: alpha=0, alpha=0.5
fedgloss 10 | surface | FedGloSS+SAM, FedSAM | CIFAR100: alpha=0
fedgloss 11 | surface | FedSMOO, FedGloSS+SAM | CIFAR100: alpha=0
fedgloss 12 | surface | FedAvg, FedGloSS+SAM | CIFAR10: alpha=0, alpha=0.05; CIFAR100: alpha=0, alpha=0.5
fedgloss 13 | surface | FedSAM, FedSMOO, FedGloSS+SAM | CIFAR10: alpha=0.05; CIFAR100: alpha=0.5
fedgloss 14 | surface | FedAvg, FedSAM, FedSMOO, FedGloSS+SAM | CIFAR10: ResNet alpha=0.05; CIFAR100: ResNet alpha=0.5
fedgloss 15 | curves server/test/acc | all, FedSMOO+wp, SAM, SGD | CIFAR10: alpha=0, alpha=0.05, centralized
fedgloss 16 | curves server/test/acc | all, FedSMOO+wp, SAM, SGD | CIFAR100: alpha=0, alpha=0.5, centralized
fedgloss 17 | curves server/test/acc | all, FedSMOO+wp | CIFAR10: ResNet alpha=0.05; CIFAR100: ResNet alpha=0.5
fedgloss 18a | curves server/test/acc | NaiveFedGloSS+SAM, FedGloSS+SAM, SAM, STildeAM | CIFAR10: alpha=0, alpha=0.05, centralized
fedgloss 18b | curves server/test/acc | NaiveFedGloSS+SAM, FedGloSS+SAM, SAM, STildeAM | CIFAR100: alpha=0, alpha=0.5, centralized
fedgloss 19a | lines acc | FedGloSS+SAM | CIFAR100: alpha=0, ResNet alpha=0.5
fedgloss 19b | lines lambda_max | FedGloSS+SAM | CIFAR100: alpha=0
fedgloss 20 | partition | FedAvg | CIFAR10: alpha=0, alpha=0.05, alpha=100; CIFAR100: alpha=0, alpha=0.5, alpha=1000
fedgmt 2 | curves flatness/loss_drop_cohort flatness/sharpness_all | FedAvg, FedSAM, FedSpeed, FedSMOO, FedLESAMD, FedGMT | CIFAR10: LT-Dir(0.01)
fedgmt 3 | partition | LT-Dir(0.01), LT-Dir(0.1), LT-Dir(1), Path(2), Path(4), Path(10) | CIFAR10: LT-Dir(0.01), LT-Dir(0.1), LT-Dir(1), Path(2), Path(4), Path(10)
fedgmt 4 | cost | all | CIFAR10: LT-Dir(0.01), LT-Dir(0.1), LT-Dir(1)
fedgmt 5 | curves server/test/acc | all | CIFAR10: LT-Dir(0.01), LT-Dir(0.1), LT-Dir(1), Path(2), Path(4), Path(10); CIFAR100: LT-Dir(0.1), Path(10); CINIC10: LT-Dir(0.1), Path(2); AGNews: LT-Dir(0.1), Path(2)
fedgmt 6 | trajectory | FedGMT | CIFAR10: LT-Dir(0.01)
fedgmt 7 | surface | FedSpeed, FedSMOO, FedLESAMD, FedGMT | CIFAR10: LT-Dir(0.1)
"""  # noqa: E501
"""What the captions and sentences of the papers say: drawing and quantity, methods, data sets with heterogeneity.

ResNet: where FedGloSS does not take its CNN. Where a text is silent, the page of the paper has what is assumed.
"""
PARTS = {("fedgloss", "17")}
"""Figures of which something is missing; all others are as the texts describe them."""
DRAWN = [figure for paper in PAPERS for figure in figures(paper) if not figure.schematic]


def name(figure: PaperFigure) -> str:
    return f"{figure.paper} {figure.number}"


def test_all_figures_are_known() -> None:
    assert len({(figure.paper, figure.figure) for figure in DRAWN}) == 46
    schematics = {name(figure) for paper in PAPERS for figure in figures(paper) if figure.schematic}
    assert schematics == {"fedsmoo 1", "fedgf 3", "fedgloss 3", "fedgmt 1"}
    assert {(figure.paper, figure.figure) for figure in DRAWN if figure.missing} == PARTS


def test_a_figure_draws_what_the_paper_says() -> None:
    actual = []
    for figure in DRAWN:
        cells = [task.cells[0] for task in figure_tasks(figure)]
        rows = {re.sub(r" [\w.]+=[\d.]+$", "", cell.algorithm) for cell in cells}  # without a value that is tried
        net = {"ResNet18GN": "ResNet "} if figure.paper == "fedgloss" else {}
        places = {(cell.dataset, net.get(cell.model, "") + cell.heterogeneity) for cell in cells}
        drawing = " ".join(filter(None, (figure.draws, *figure.metrics, figure.value)))
        actual.append((name(figure), drawing, rows, places))
    expected = []
    for line in TEXTS.strip().splitlines():
        title, drawing, methods, columns = line.split(" | ")
        methods = re.sub(r"\ball\b", ALL.get(title.split()[0], ""), methods).replace("sam", ", ".join(SOME))
        pairs = [column.split(": ") for column in columns.split("; ")]
        places = {(dataset, place) for dataset, kinds in pairs for place in kinds.split(", ")}
        expected.append((title, drawing, {*methods.split(", ")}, places))
    assert actual == expected


SMALL = [
    "--rounds=0.0005", "--model.net=DigitsMLP", "--data=Digits", "--data.mean=null", "--data.std=null",
    "--data.augment=null", "--trainer.engine=sequential", "--trainer.threads=1", "--trainer.accelerator=cpu",
    "--model.net.hidden=8",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(slow=60)
@pytest.mark.parametrize("figure", DRAWN, ids=name)
def test_dry_run_says_what_a_figure_is(
    figure: PaperFigure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", figure.paper, f"fig{figure.number}", "--dry-run", *SMALL)
    first, state, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{figure.paper}, Figure {figure.number}: {figure.shows} ({figure.draws})"
    part = (figure.paper, figure.figure) in PARTS
    assert state.startswith("a part of the paper's figure; missing: ") if part else state == "as the paper describes it"
    assert bool(figure.taken) == rest[0].startswith("open in the text that we had, and assumed: ")
    commands = [line for line in rest if line.startswith("fl-lightning ")]
    assert len(commands) == len(figure_tasks(figure)) and [*tmp_path.iterdir()] == []
    assert figure.draws == "partition" or re.search(r"\d+ runs?, about", rest[-1])


@pytest.mark.slow
def test_all_drawings_of_a_figure_and_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedsam", "fig3", "--dry-run", *SMALL)
    assert re.findall(r"^fedsam, Figure (\w+)", capsys.readouterr().out, re.MULTILINE) == ["3a", "3c"]
    with pytest.raises(SystemExit, match=r"^error: figure = 3 of fedgf: it is a schematic; choose from 1, 2, 4"):
        cli("reproduce", "fedgf", "fig3")
    with pytest.raises(SystemExit, match=r"^error: figure = 3b: no figure of fedsam; choose from 1, 2, 3, 4"):
        cli("reproduce", "fedsam", "fig3b")


@pytest.mark.slow
def test_picture_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also says which settings are not the paper's; and a partition needs no run."""
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedsmoo", "fig2", "--out=mine", *SMALL)
    (picture,) = Path("mine").rglob("*.png")
    with Image.open(picture) as image:
        text = image.text["Description"]  # type: ignore[attr-defined]
    assert str(picture) == "mine/figure_2/partition.png"
    assert text.startswith("fedsmoo, Figure 2: samples of each client") and "; as the paper describes it; open" in text
    assert "; 0.05 % of the rounds; " in text and "--data=Digits" in text


@pytest.mark.long
def test_ends_of_centralized_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are lines in the panels of the others, and no panel of their own."""
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgloss", "fig18a", "--out=mine", *SMALL)
    pictures = sorted(str(path.relative_to("mine")) for path in Path("mine").rglob("*.png") if "figure" in str(path))
    assert pictures == ["figure_18a/alpha=0.05/curves.png", "figure_18a/alpha=0/curves.png"]
    assert len([*Path("mine").rglob("summary.json")]) == 6


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_clients_with_images_of_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    generated.everything(tmp_path / "data", monkeypatch)
    few = ["--trainer.local_steps=1", "--trainer.clients_per_round=2", "--trainer.eval_every=9", "--points=3"]
    cli("reproduce", "fedgloss", "fig2", "--out=mine", "--rounds=0.0001", *few, *SMALL[-4:-1])
    output = capsys.readouterr().out
    clients = dict(re.findall(r"client (\d+): images of (\w+)", output))
    assert [*clients.values()] == ["sea", "snail", "skyscraper"]
    labels = np.arange(1000) % 100  # of the generated data; alpha is 0, so a client has one class
    parts = Dirichlet(0.0)(labels, 100, 100, 0)
    assert [{*labels[parts[int(client)]]} for client in clients] == [{71}, {77}, {76}]
    assert Path("mine/figure_2/surface.png").is_file()
