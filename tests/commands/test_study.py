"""Names of what commands on checkpoints write: labels, numbers, and nothing overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fl_lightning.commands.shared.landscapes import labels_of, number_of
from fl_lightning.core import UserError, check_folder
from tests.runs import cli, run


def checkpoint(*parts: str, name: str = "last") -> Path:
    return Path("runs", *parts, "checkpoints", f"{name}.ckpt")


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        ([checkpoint("FedAvg-Digits", "version_0")], ["FedAvg-Digits"]),
        (
            [checkpoint("FedAvg-Digits", "version_0"), checkpoint("FedSAM-Digits", "version_3")],
            ["FedAvg-Digits", "FedSAM-Digits"],
        ),
        (
            [checkpoint("FedAvg-Digits", "version_0"), checkpoint("FedAvg-Digits", "version_1")],
            ["FedAvg-Digits/version_0", "FedAvg-Digits/version_1"],
        ),
        (
            [checkpoint("a", "version_0"), checkpoint("a", "version_0", name="best")],
            ["a/version_0, last", "a/version_0, best"],
        ),
        ([checkpoint("a", "version_0"), checkpoint("a", "version_0")], ["a/version_0, last", "a/version_0, last (2)"]),
        (
            [checkpoint("FedSAM-Digits", "rho_0.05_seed_0", "version_0"), checkpoint("x", "seed_1", "version_0")],
            ["FedSAM-Digits/rho_0.05_seed_0", "x/seed_1"],
        ),
        ([Path("some.ckpt"), Path("other/some.ckpt")], ["some", "some (2)"]),
    ],
)
def test_labels_are_short_and_differ(paths: list[Path], labels: list[str]) -> None:
    assert labels_of(paths) == labels


def test_the_first_free_number(tmp_path: Path) -> None:
    assert number_of(tmp_path / "none", "surface.json") == ""
    for name, following in (("surface", "_2"), ("surface_3d", "_2"), ("surface_2", "_3"), ("plane", "_3")):
        (tmp_path / f"{name}.json").touch()
        assert number_of(tmp_path, "surface.json") == following


@pytest.mark.slow
def test_nothing_that_was_measured_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("fit", root=tmp_path)
    path = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    measured = '--metrics=[{"class_path":"Spectrum","init_args":{"k":K,"samples":50}}]'
    for k in ("2", "3"):
        cli("flatness", path, measured.replace("K", k))
        cli("landscape", path, "--points=2", f"--samples={30 + int(k)}")
    names = {file.name for kind in ("flatness", "landscape") for file in (folder / kind).iterdir()}
    stems = ("flatness.json", "flatness.csv", "spectrum.pdf", "spectrum.png", "surface.json", "surface.csv",
             "surface.pdf", "surface.png", "surface_3d.pdf", "surface_3d.png")  # fmt: skip
    assert names == {*stems, *(stem.replace(".", "_2.") for stem in stems)}
    contents = [json.loads((folder / "flatness" / f"flatness{end}.json").read_text()) for end in ("", "_2")]
    assert [len(content["measurements"][0]["details"]["eigenvalues"]) for content in contents] == [2, 3]
    (protocol,) = json.loads((folder / "landscape" / "surface_2.json").read_text()).values()
    assert "33 samples" in protocol["protocol"]["train"]
    assert f"results: {folder / 'landscape' / 'surface_2.json'}" in capsys.readouterr().out.replace("\n", "")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run("fit", root=tmp_path) / "checkpoints" / "last.ckpt"
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "folder"
    for args in (
        ["flatness", f"--ckpt_path={last}", f"--out={out}"],
        ["interpolate", str(last), str(last), f"--out={out}"],
        ["compare", str(last.parents[1]), f"--out={out}"],
        ["report", str(last.parents[1]), f"--out={out}"],
        ["data", "--data=Digits", f"--out={out}"],
        ["reproduce", "fedgloss", "3", f"--out={out}"],
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli(*args)
        assert capsys.readouterr().out.removeprefix("known: 66 of 66 cells\n") == ""
        assert exit.value.code == f"error: out = {out}: cannot create this folder (Not a directory); choose another one"


def test_a_folder_without_permission_is_refused_and_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    check_folder(tmp_path / "new" / "folder")
    if (child := os.fork()) == 0:
        if os.geteuid() == 0:  # who may write everywhere
            os.setuid(65534)
        try:
            check_folder(tmp_path / "closed" / "folder")
        except UserError as error:
            os._exit("cannot create this folder (Permission denied); choose another one" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "closed"]


@pytest.mark.parametrize("out", ["page.json", "page.png"])
def test_a_page_is_not_written_over_what_stands_beside_it(out: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"out = .*{out}: what stands beside the page gets this ending; give another"):
        cli("study", "page", "ledger/agnews", f"--out={tmp_path / out}")
    assert not [*tmp_path.iterdir()]
