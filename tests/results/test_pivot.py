"""The pivot of a sweep, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from fl_lightning import UserError
from fl_lightning.results.compare import compare
from fl_lightning.results.varied import pivot
from tests.results.folders import configured
from tests.runs import cli


def sweep(root: Path, values: dict[tuple[float, float, int], list[float]]) -> Path:
    """Writes runs by lr, rho and batch size, with the accuracies of their seeds."""
    for i, ((lr, rho, batch), accuracies) in enumerate(values.items()):
        for seed, value in enumerate(accuracies):
            folder = configured(root / f"{i}_seed_{seed}" / "version_0", {6: value}, seed=seed, lr=lr)
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["model"]["init_args"]["ascent"] = {"class_path": "SAM", "init_args": {"rho": rho}}
            config["data"]["init_args"]["batch_size"] = batch
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Writes a grid of two by two settings; one cell is missing, and one has diverged with one of its seeds."""
    values = {(0.1, 1e-2, 8): [0.5, 0.75], (0.1, 1e-1, 8): [0.5, math.nan], (10.0, 1e-2, 8): [0.25, 0.5]}
    return sweep(tmp_path / "runs", values)


@pytest.mark.slow
def test_numbers_by_hand(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pivot(compare([runs]), "lr,rho")
    assert table.heads == ["lr", "rho\u00a00.01", "rho\u00a00.1"]
    assert table.text() == [["0.1", "0.6250", "0.5000 (1 of 2)"], ["10", "0.3750", ""]]
    assert table.best == "best mean: lr = 0.1, rho = 0.01, 0.6250"  # by the same on both seeds
    files = table.files()
    assert files["pivot.csv"] == "lr,rho 0.01,rho 0.1\r\n0.1,0.625,0.5\r\n10,0.375,nan\r\n"
    assert r"0.1 & \textbf{62.50} & 50.00 (1 of 2) \\" in str(files["pivot.tex"])
    texts = table.plot().axes[0].texts
    assert [(text.get_text(), text.get_weight()) for text in texts] == [
        ("0.625", "bold"), ("0.500", "normal"), ("0.375", "normal"),
    ]  # fmt: skip
    cli("compare", str(runs), "--pivot=ascent.rho,model.lr", f"--out={tmp_path / 'out'}")
    out = capsys.readouterr().out
    assert "mean over seeds" in out and "lr\u00a010" in out and "sd over rounds" not in out
    assert {"pivot.csv", "pivot.tex", "pivot.pdf", "pivot.png", "compare.csv"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_values_that_differ_in_the_fifth_digit_are_rows_of_their_own(tmp_path: Path) -> None:
    runs = sweep(tmp_path, {(0.1, 0.10001, 8): [0.9], (0.1, 0.10004, 8): [0.1], (0.2, 0.2, 8): [0.5]})
    table = pivot(compare([runs]), "rho,lr")
    assert table.text() == [["0.10001", "0.9000", ""], ["0.10004", "0.1000", ""], ["0.2", "", "0.5000"]]
    assert table.best.startswith("best mean: rho = 0.10001, lr = 0.1, 0.9000")


def test_other_settings_are_averaged_and_paired(tmp_path: Path) -> None:
    values = {
        (lr, rho, batch): [0.5 + lr + rho + batch / 100]
        for lr in (0.1, 0.2)
        for rho in (0.01, 0.02)
        for batch in (8, 16)
    }
    table = pivot(compare([sweep(tmp_path, values)]), "lr,rho")
    assert table.others == ["batch_size"] and table.title == "server/test/acc, mean over seeds, batch_size"
    assert table.text() == [["0.1", "0.7300", "0.7400"], ["0.2", "0.8300", "0.8400"]]
    assert table.best.endswith("0.8400")  # of both batch sizes, so by more than these move it


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("lr", "pivot = lr: give two settings, as in rho,alpha; choose from rho, lr"),
        ("lr,lr", "pivot = lr,lr: give two settings"),
        ("lr,model.lr", "pivot = lr,model.lr: give two settings"),
        ("lr,seed", "pivot = seed: no setting that varies in these runs; choose from rho, lr"),
    ],
)
def test_wrong_names(names: str, problem: str, runs: Path) -> None:
    with pytest.raises(UserError, match=f"^{problem}"):
        pivot(compare([runs]), names)


def test_ends_of_several_settings(tmp_path: Path) -> None:
    folder = sweep(tmp_path, {(0.1, 0.01, 8): [0.5], (0.2, 0.02, 8): [0.5]})
    for path, rho in zip(sorted(folder.glob("*/*/config.yaml")), (1, 2), strict=True):
        config = yaml.safe_load(path.read_text())
        config["model"]["init_args"]["rho"] = rho
        path.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"pivot = rho: the end of several .* choose from model.ascent.rho, model.rho$"):
        pivot(compare([folder]), "lr,rho")
    assert pivot(compare([folder]), "lr,ascent.rho").names == ("lr", "ascent.rho")
