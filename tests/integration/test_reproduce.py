"""``fl-lightning reproduce`` on the command line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor
from torchvision.models import _api

from fl_lightning import CIFAR10, CIFAR100, Digits, DigitsMLP, FederatedTrainer, FedSAM
from fl_lightning.commands import landscape
from fl_lightning.commands.shared import prediction
from fl_lightning.commands.shared.prediction import Step
from fl_lightning.data.images import CORRUPTIONS
from fl_lightning.results.compare import compare
from fl_lightning.results.papers import find
from fl_lightning.results.report import papers, read_group
from fl_lightning.sweeps.reproduction import why_not
from tests import generated
from tests.runs import cli

DIGITS = [
    "--model.net=DigitsMLP", "--data=Digits", "--data.mean=null", "--data.std=null", "--data.augment=null",
    "--trainer.engine=sequential", "--trainer.threads=1", "--trainer.accelerator=cpu",
]  # fmt: skip
"""Settings of the runs: small data in the place of CIFAR-10."""
TABLE = ["reproduce", "fedgloss", "3", "--rows=FedAvg,FedSAM", "--columns=CIFAR10,HsuCNN,alpha=0"]


@pytest.mark.slow
def test_dry_run_shows_the_runs_and_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*TABLE, "--rounds=0.0004", "--seeds=0,1", "--dry-run", *DIGITS)
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("fl-lightning fit")]
    assert len(lines) == 4 and all("--trainer.max_rounds=4 " in line for line in lines)
    assert [re.findall(r"seed=(\d)", line) for line in lines] == [["0"], ["1"]] * 2
    assert re.search(r"4 runs, about [\d.]+ \w+ with --jobs 1; about [\d.]+ [MG]B of memory", output)
    assert (
        "CIFAR10, HsuCNN, alpha=0, 5/100, E=1, FedSAM, acc: known; in the paper 70.2 ± 0.9\nknown: 2 of 2 cells\n"
        in output
    )
    assert list(tmp_path.iterdir()) == []
    cli("reproduce", "fedgmt", "2", "--rows=FedGMT", "--columns=AGNews,Path(2)", "--rounds=0.004", "--dry-run", *DIGITS)
    output = capsys.readouterr().out
    assert "FedGMT, minutes@82: a time of the paper's machine" in output and "known: 2 of 3 cells" in output


@pytest.mark.slow
def test_dry_run_without_data_of_unknown_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the commands, and why it has no estimate."""
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedsam", "8", "--rows=FedAvg", "--columns=Cityscapes,uniform", "--dry-run")
    *_, command, reason = capsys.readouterr().out.splitlines()
    assert command == "fl-lightning fit --config experiment/fedsam/cityscapes_uniform --trainer.seed=0"
    assert reason.startswith("no estimate for Cityscapes: data.data_dir = 'data/cityscapes': ")


@pytest.mark.long
@pytest.mark.parametrize("table", sorted({(cell.paper, cell.table) for cell in find()}), ids=" ".join)
def test_dry_run_of_every_table(
    table: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is at full size, without data: no round is trained, one step is measured for each data set and net."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prediction, "measure", None)
    if all(map(why_not, find(paper=table[0], table=table[1]))):
        with pytest.raises(SystemExit, match="none of these cells can be reproduced"):
            cli("reproduce", *table, "--dry-run")
        return
    cli("reproduce", *table, "--dry-run")
    shown = capsys.readouterr().out
    steps, runs = re.findall(r"measuring a step: (.*)", shown), len(re.findall(r"^fl-lightning ", shown, re.MULTILINE))
    estimates = re.search(r"^\d+ runs?, about [\d.,]+ ", shown, re.MULTILINE) or "no estimate" in shown
    assert len(steps) == len({*steps}) and (estimates or not runs)
    assert list(tmp_path.iterdir()) == []


def test_seconds_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a sample's seconds times the samples that are trained on, and a third of them for those evaluated."""
    data = Digits(num_clients=10, batch_size=20)
    data.setup()
    model = FedSAM(DigitsMLP())  # twice the passes of FedAvg
    trainer = FederatedTrainer(max_rounds=30, eval_every=10, local_epochs=2, accelerator="cpu")
    trained, evaluated = 30 * 5 * 2 * len(data.y_train) / 10, 3 * len(data.y_test)
    assert Step(1e-3, 0).run(trainer, model, data, 5) == pytest.approx(1e-3 * (2 * trained + evaluated / 3))
    trainer.local_steps = 7
    assert Step(1.0, 0).run(trainer, model, data, 5) == pytest.approx(2 * 30 * 5 * 7 * 20 + evaluated / 3)
    step = Step.measure(trainer, model, data)
    assert step.seconds > 0 and not any(p.grad is not None for p in model.net.parameters())
    assert Step.measure(trainer, FedSAM(TwoHeads()), data).seconds > 0


class TwoHeads(DigitsMLP):
    """Returns several logits in training, as BiSeNetV2 does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits, logits


def test_declared_numbers_need_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgf", "3", "--rows=FedGF", "--out=mine")
    assert "declared" in capsys.readouterr().out and [path.suffix for path in sorted(Path("mine").iterdir())] == [
        ".csv", ".md", ".tex"
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_and_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*TABLE, "--rounds=0.0002", "--out=mine", *DIGITS)
    output = capsys.readouterr().out
    assert "fedgloss, Table 3: 0.02 % of the rounds" in output
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
    lines = {
        line.cell.algorithm: line for _, line in papers([(group, read_group(group)) for group in compare(["mine"])])
    }
    assert [(lines[row["algorithm"]].mean, lines[row["algorithm"]].settings) for row in rows] == [
        (float(row["ours"]), row["settings"].removeprefix("'")) for row in rows
    ]  # the report has the same numbers
    before = {path: path.stat().st_mtime_ns for path in Path("mine").glob("*/*/*/*/metrics.csv")}
    cli(*TABLE, "--rounds=0.0002", "--out=mine", *DIGITS)  # nothing is run twice
    assert len(before) == 2 and before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(SystemExit, match=r"^error: mine/.*was trained with trainer.max_rounds = 2 \(here: 3\)"):
        cli(*TABLE, "--rounds=0.0003", "--out=mine", *DIGITS)


@pytest.mark.sampled(slow=2, start=1)
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


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trainer.max_rounds=7"], "trainer.max_rounds = 7: the table sets it; give --rounds"),
        (["--trainer.seed=7"], "trainer.seed = 7: the table sets it; give --seeds"),
        (["--seeds=0,0"], "seeds = 0,0: give different numbers, such as 0,1,2"),
        (["--seeds=0,00"], "seeds = 0,00: give different numbers, such as 0,1,2"),
        (["--rounds=2"], "rounds = 2.0: give a fraction of the paper's rounds"),
        (["--points=2"], "points = 2: give a whole number from 3 to 10,000"),
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


@pytest.mark.slow
def test_dry_run_builds_with_the_users_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The net of the paper is built nowhere, whose weights would be downloaded."""

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_api, "load_state_dict_from_url", offline)
    options = ["--data.num_clients=100", "--rounds=0.002", "--dry-run"]
    cli("reproduce", "fedgloss", "4", "--rows=FedAvg", *options, *DIGITS)
    assert re.search(r"1 run, about", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"^error: model\.net\.pretrained = torchvision: .* cannot be downloaded"):
        cli("reproduce", "fedgloss", "4", "--rows=FedAvg")
    with pytest.raises(SystemExit, match=r"^error: trainer\.seed = 1: the table sets it"):
        cli("reproduce", "fedgloss", "4", "--rows=FedAvg", "--dry-run", "--trainer.seed=1")  # the net is made


# Figures

SMALL = ["--rounds=0.0005", *DIGITS, "--model.net.hidden=8"]


def pictures(folder: str) -> list[str]:
    """Returns a figure's pictures; each has lines of more than one colour, and fits a page's width at 300 dpi."""
    paths = sorted(Path(folder).glob("figure_*/**/*.png"))
    for path in paths:
        with Image.open(path) as image:
            colours = image.convert("RGB").getcolors(1 << 24)
            assert image.width <= 6.75 * 300 and colours is not None and len(colours) > 50
        assert path.with_suffix(".pdf").is_file()
    return [str(path.relative_to(folder)) for path in paths]


@pytest.mark.slow
def test_dry_run_of_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgloss", "fig9", "--seeds=0,1", "--dry-run", *SMALL)
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("fl-lightning fit")]
    assert len(lines) == 16 and "16 runs, about" in output and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_curves_of_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgf", "fig7", "--out=mine", *SMALL)
    assert pictures("mine") == ["figure_7/curves.png"] and "drawn: mine/figure_7/curves.png" in capsys.readouterr().out
    assert len([*Path("mine").glob("*/FedGF/seed_0/version_0/summary.json")]) == 3
    with pytest.raises(SystemExit, match=r"^error: table = fig7: a figure has rows and columns"):
        cli("reproduce", "fedgf", "fig7", "--rows=FedGF")


@pytest.mark.long
def test_landscape_of_a_figure_in_the_same_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    surface = landscape.surface

    def recorded(*args: object, directions: object, **options: object) -> object:
        calls.append(directions)
        return surface(*args, directions=directions, **options)  # type: ignore[arg-type]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(landscape, "surface", recorded)
    cli("reproduce", "fedsam", "fig1", "--points=5", "--out=mine", *SMALL)
    kinds = [f"{place}/{name}" for place in ("alpha=0", "alpha=1000") for name in ("surface", "surface_3d")]
    assert pictures("mine") == [f"figure_1/{kind}.png" for kind in kinds]
    first, second, *_ = calls
    assert len(calls) == 4 and all((a == b).all() for a, b in zip(first, second, strict=True))  # type: ignore[call-overload]
    assert list(json.loads(Path("mine/figure_1/alpha=0/surface.json").read_text())) == ["FedAvg", "FedASAM"]


@pytest.mark.long
def test_figure_is_of_the_tables_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli("reproduce", "fedgf", "1", "--rows=FedGF", "--columns=CIFAR100,alpha=0,5/100", *SMALL)
    before = {path: path.stat().st_mtime_ns for path in Path("runs/reproduce").rglob("metrics.csv")}
    cli("reproduce", "fedgf", "fig6", "--points=3", *SMALL)
    assert len(before) == 1 and before == {
        path: path.stat().st_mtime_ns for path in Path("runs/reproduce").rglob("metrics.csv")
    }  # nothing is trained twice
    assert pictures("runs/reproduce/fedgf_1_0.0005") == ["figure_6/surface.png", "figure_6/surface_3d.png"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("paper", "number", "drawn"),
    [
        ("fedsam", "2a", ["plane"]),
        ("fedsam", "2c", ["plane"]),
        ("fedsam", "3a", ["clients"]),
        ("fedsam", "4", ["alpha=0/clients", "alpha=0.5/clients", "alpha=1000/clients"]),
        ("fedsam", "5", ["alpha=0/spectrum", "alpha=1000/spectrum"]),
        ("fedgf", "1b", ["bars"]),
        ("fedgf", "5", ["alpha=0/perturbation", "alpha=10/perturbation"]),
        (
            "fedgloss",
            "9",
            [f"CIFAR{k}_alpha={alpha}/interpolate" for k, alpha in ((100, 0), (100, 0.5), (10, 0), (10, 0.05))],
        ),
        ("fedgloss", "19a", ["lines"]),
        ("fedgmt", "4", ["cost"]),
        ("fedgmt", "6", ["trajectory"]),
    ],
)
def test_every_drawing(
    paper: str, number: str, drawn: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = "--points=5"
    cli("reproduce", paper, f"fig{number}", "--out=mine", points, *SMALL, "--rounds=0.001")
    assert pictures("mine") == [f"figure_{number}/{name}.png" for name in drawn]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_drawing_of_corruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data set has its own files, beside the data."""
    monkeypatch.chdir(tmp_path)
    generated.everything(tmp_path / "data", monkeypatch)
    for name, data in (("CIFAR-10-C", CIFAR10()), ("CIFAR-100-C", CIFAR100())):
        data.setup()
        folder = tmp_path / "data" / name
        folder.mkdir(exist_ok=True)
        np.save(folder / "labels.npy", np.tile(data.y_test.numpy(), 5).astype(np.uint8))
        for corruption in CORRUPTIONS:
            np.save(folder / f"{corruption}.npy", np.zeros((5 * len(data.y_test), 32, 32, 3), np.uint8))
    few = ["--trainer.local_steps=1", "--trainer.clients_per_round=2", "--trainer.eval_every=9", *DIGITS[-3:]]
    cli("reproduce", "fedsam", "fig6", "--out=mine", "--rounds=0.0001", *few)
    assert pictures("mine") == ["figure_6/CIFAR10/corruptions.png", "figure_6/CIFAR100/corruptions.png"]
