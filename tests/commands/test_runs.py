"""``fl-lightning runs``: what it lists is what the runs are, and it deletes none that trains."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path

import pytest

from fl_lightning.trainer.storage.run_folder import LOCK, in_use, locked
from tests.runs import DIGITS, cli, forked, kill, run


def states(text: str) -> dict[str, tuple[str, str]]:
    """Returns state and rounds of each run that the list shows."""
    matches = re.findall(r"^ ?(\S*version_\d+) +(\w+) +(\S+)", text, re.M)
    return {name: (state, rounds) for name, state, rounds in matches}


def test_a_run_from_its_start_to_its_deletion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("fit", root=tmp_path / "runs")
    long = ["fit", "--model=FedAvg", *DIGITS, "--trainer.name=long", "--trainer.default_root_dir=runs"]
    saves = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=1"]
    with forked(*long, *saves, "--trainer.max_rounds=1000000", cwd=tmp_path) as child:
        while not (tmp_path / "runs/long/version_0/checkpoints/last.ckpt").exists():
            time.sleep(0.1)
        capsys.readouterr()
        cli("runs")
        out = capsys.readouterr().out
        listed = states(out)
        assert re.match(r"run +state +rounds +last 1( to \d+)? +minutes +MB$", out.splitlines()[0].rstrip())
        assert listed["runs/FedAvg-Digits/version_0"] == ("finished", "2/2")
        assert listed["runs/long/version_0"][0] == "running" and listed["runs/long/version_0"][1].endswith("/1,000,000")
        with pytest.raises(SystemExit, match=r"^error: delete: runs/long/version_0: trains; end it, or leave it out$"):
            cli("runs", "runs", "--delete", "--yes")
        kill(child)
        child.wait(60)
    capsys.readouterr()
    cli("runs", "runs/long", "--follow")  # nothing trains any more
    assert states(capsys.readouterr().out)["runs/long/version_0"][0] == "interrupted"
    with pytest.raises(SystemExit, match=r"^error: delete: nobody can be asked; give --yes$"):
        cli("runs", "runs/long", "--delete")
    cli("runs", "runs/long", "--delete", "--yes")
    assert not (tmp_path / "runs/long").exists() and done.is_dir()


def test_a_list_changes_nothing_and_damage_is_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run("fit", root=tmp_path)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    cli("runs", ".")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}
    shown = capsys.readouterr().out.split()
    assert f"{sum(len(content) for _, content in before.values()) / 1e6:.1f}" in shown
    (folder / "summary.json").write_text("{")
    cli("runs", ".")
    assert "damaged" in capsys.readouterr().out
    (folder / "summary.json").unlink()
    (folder / "metrics.csv").unlink()  # as of a run that was killed in its first round
    cli("runs", ".")
    assert [*states(capsys.readouterr().out).values()] == [("interrupted", "0/2")]


@pytest.mark.slow
def test_names_are_neither_formulas_nor_controls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("$x_{$^", 0), ("a\x1b[31m", 1)):
        run("fit", f"--trainer.seed={seed}", root=tmp_path, model=("FedAvg", "FedSAM")[seed]).rename(tmp_path / name)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cli("compare", "$x_{$^", "a\x1b[31m", "--out=table")
    cli("runs", ".")
    out = capsys.readouterr().out
    assert "a\\x1b[31m" in out and "$x_{$^" in out and "\x1b" not in out
    assert (tmp_path / "table" / "curves.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "folders = nowhere: no such folder; give run folders, or one above them"),
        (["empty"], "folders = empty: no run there; give another folder"),
        (["--delete"], "delete: give the runs that are to go, such as runs/FedAvg-Digits/version_0"),
    ],
)
def test_errors(args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=f"^error: {re.escape(message)}$"):
        cli("runs", *args)


def test_in_use_is_asked_without_a_trace(tmp_path: Path) -> None:
    assert not in_use(tmp_path) and not [*tmp_path.iterdir()]
    with locked(tmp_path):
        assert in_use(tmp_path) and (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    assert not in_use(tmp_path)
