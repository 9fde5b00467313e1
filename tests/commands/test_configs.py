"""Configs go by name, in a clone and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.commands.shared.arguments import config_names, configs_folder, find_config
from fl_lightning.core import UserError
from tests.runs import cli


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", str(configs_folder() / "quickstart.yaml")]
)
def test_a_name_and_a_path_find_the_file(name: str) -> None:
    assert find_config(name).resolve() == (configs_folder() / "quickstart.yaml").resolve()


def test_a_name_with_a_dot() -> None:
    assert find_config("experiment/fedgloss/cifar10_alpha0.05").name == "cifar10_alpha0.05.yaml"


def test_a_file_of_the_working_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("")
    assert find_config("quickstart").resolve() == tmp_path / "quickstart"


def test_a_folder_does_not_hide_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``init quickstart`` makes such a folder; one of another name is called a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "mine"):
        (tmp_path / name).mkdir()
    assert find_config("quickstart") == configs_folder() / "quickstart.yaml"
    with pytest.raises(UserError, match="config = mine: a folder; give a config of it"):
        find_config("mine")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fedgloss/cifar10_alpha0.05", "experiment/fedgloss/cifar10_alpha0.05"),
        ("quikstart", "did you mean quickstart"),
        ("zzz", "fl-lightning configs"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"^config = {name}: .*{hint}"):
        find_config(name)


def test_every_name_is_listed_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli("configs")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == config_names()
    assert "quickstart" in config_names()
    cli("configs", "--folder=compositions")
    assert all(line.startswith("compositions/") for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_the_command_line_takes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--trainer.max_rounds=1", "--trainer.callbacks=[]", f"--trainer.default_root_dir={tmp_path}"]
    cli("fit", "--config", "quickstart", "--config=compositions/swa", "--trainer.enable_progress_bar=false", *short)
    (folder,) = tmp_path.glob("*/version_0")
    assert "class_path: fl_lightning.SWA" in (folder / "config.yaml").read_text()
    with pytest.raises(SystemExit, match="error: config = quickstrat: no such file or config"):
        cli("fit", "--config", "quickstrat")
