"""Importance of settings, and their panels, where the answer is known."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

from fl_lightning import UserError
from fl_lightning.results.compare import compare
from fl_lightning.results.varied import Tried, tried
from tests.results.folders import configured, write
from tests.results.test_pivot import sweep
from tests.runs import cli


@pytest.mark.long
def test_the_setting_that_decides_comes_first() -> None:
    """The metric falls with the logarithm of rho, depends a little on the class, and not at all on noise."""
    grid = [*product((0.01, 0.1, 1.0), ("SAM", "ASAM"), (1, 2, 3))]
    settings = {name: [str(row[i]) for row in grid] for i, name in enumerate(("rho", "ascent", "noise"))}
    values = [-math.log(rho) + 0.5 * (ascent == "SAM") for rho, ascent, _ in grid]
    ranked, about = Tried(settings, values, "server/test/acc").importances
    assert [setting.name for setting in ranked] == ["rho", "ascent", "noise"]
    rho, ascent, noise = ranked
    assert rho.lost > 1 > ascent.lost > 5 * abs(noise.lost) and rho.correlation < -0.9 and noise.correlation == 0
    assert math.isnan(ascent.correlation) and ascent.text()[3] == "" and rho.text()[3].startswith("-0.9")
    assert about.startswith("18 configs; ") and float(about.rpartition(" ")[2]) > 0.8
    assert Tried(settings, values, "server/test/acc").importances == (ranked, about)


def test_a_point_for_each_config_in_the_panel_of_each_setting() -> None:
    settings = {"rho": ["0.01", "0.1", "1"], "ascent": ["SAM", "ASAM", "SAM"], "lr": ["1", "2", "3"]}
    rho, ascent, lr = Tried(settings, [0.5, 0.7, 0.9], "server/test/acc").plot().axes
    assert [axes.lines[0].get_ydata().tolist() for axes in (rho, ascent, lr)] == [[0.5, 0.7, 0.9]] * 3
    assert rho.lines[0].get_xdata().tolist() == [0.01, 0.1, 1] and rho.get_xscale() == "log"
    assert lr.lines[0].get_xdata().tolist() == [1, 2, 3] and lr.get_xscale() == "linear"
    assert [*ascent.lines[0].get_xdata()] == ["SAM", "ASAM", "SAM"]


def test_configs_that_tell_nothing(tmp_path: Path) -> None:
    """A report of configs with equal values has no importances, and is written; nor have runs without configs."""
    equal, bare = tmp_path / "alike", tmp_path / "bare"
    for i in range(5):
        configured(equal / f"r{i}", {6: 0.1}, lr=0.1 * (i + 1), momentum=0.1 * i, decay=0.01 * i)
        write(bare / f"r{i}", {6: 0.1 * i})
    cli("report", str(equal), f"--out={tmp_path / 'page'}")
    assert '<section id="sweep">' not in (tmp_path / "page" / "report.html").read_text()
    for root in (equal, bare):
        with pytest.raises(UserError, match=r"^importance: 5 configs with .*; it takes 5, not all alike, and"):
            _ = tried(compare([root])).importances


@pytest.mark.long
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They take settings that all have, of configs without a diverged run; the report needs more than two that vary."""
    values = {(lr, rho, size): [lr + rho, lr] for lr in (0.1, 0.2) for rho in (0.1, 0.3) for size in (8, 16)}
    root = sweep(tmp_path / "runs", {**values, (9.0, 9.0, 9): [math.nan]})
    trials = tried(compare([root]))
    assert {*trials.settings} == {"lr", "rho", "batch_size"} and len(trials.values) == 8
    cli("compare", str(root), "--importance", f"--out={tmp_path / 'out'}")
    out = capsys.readouterr().out
    assert "importance for server/test/acc" in out and "8 configs; R²" in out and "sd over rounds" not in out
    names = {"importance.csv", "settings.pdf", "settings.png"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    cli("report", str(root), f"--out={tmp_path / 'page'}")
    assert '<section id="sweep">' in (tmp_path / "page" / "report.html").read_text()
    with pytest.raises(UserError, match=r"^importance: 2 configs with a finite server/test/acc; it takes 5"):
        _ = tried(compare([root / f"{i}_seed_0" for i in (0, 1)])).importances
