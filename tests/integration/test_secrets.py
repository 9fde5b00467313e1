"""Runs with secrets in their settings: no file keeps them, and a run goes on when they are given again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.results.compare import compare
from fl_lightning.results.configs import group_id, read_config, run_key
from tests.runs import DIGITS, assert_same, cli, last, metrics, run, state

MODULE = """
from lightning.pytorch.loggers import CSVLogger

GIVEN = []

class Logger(CSVLogger):
    def __init__(self, save_dir: str, api_key: str = "", address: str = ""):
        super().__init__(save_dir)
        GIVEN.append((api_key, address))
"""
KEY, ADDRESS = "--trainer.loggers.api_key=S3cret", "--trainer.loggers.address=https://me:S3cret@host/x"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_secret.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.slow
def test_a_run_with_secrets(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = "--trainer.loggers=[{class_path: mine_secret.Logger, init_args: {save_dir: logs}}]"
    folder = run("fit", logger, KEY, ADDRESS, root=root)
    ckpt, config = str(folder / "checkpoints/last.ckpt"), str(folder / "config.yaml")
    with pytest.raises(
        SystemExit, match=r"^error: trainer\.loggers\.Logger\.api_key = \*\*\*: a run folder keeps no secrets"
    ):
        cli("fit", "--ckpt_path", ckpt, "--trainer.max_rounds=4")
    with pytest.raises(
        SystemExit, match=r"trainer\.loggers\.Logger\.address = https://\*\*\*@host/x: .* give this one again"
    ):
        cli("fit", "--config", config, KEY)
    cli("export", ckpt, "net.pt")  # needs no logger
    cli("fit", "--ckpt_path", ckpt, "--trainer.max_rounds=4", KEY, ADDRESS)
    import mine_secret

    assert set(mine_secret.GIVEN) == {("S3cret", "https://me:S3cret@host/x")}
    assert last(folder)["round"] == 4 and "api_key" not in capsys.readouterr().out  # no change of a setting
    cli("fit", "--config", str(folder / "config_round_2.yaml"), KEY, ADDRESS)
    rerun = root / "FedAvg-Digits/version_1"
    assert_same(state(rerun), state(folder))
    assert metrics(rerun) == metrics(folder)

    before = folder / "config.yaml"  # an earlier version has kept them
    before.write_text(before.read_text().replace("https://***@", "https://me:S3cret@").replace("'***'", "S3cret"))
    assert before.read_text().count("S3cret") == 2
    provenance = folder / "provenance.json"
    content = json.loads(provenance.read_text())
    content["starts"][0]["command"] = f"fl-lightning fit {KEY} --wandb-key S3cret"
    content["changes"] = {"abc": '+login(key="S3cret")'}
    provenance.write_text(json.dumps(content))
    cli("report", str(root), "--out", "report")
    page = (tmp_path / "report/report.html").read_text()
    assert "S3cret" not in page and "fl-lightning fit" in page
    before.unlink()
    provenance.unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and b"S3cret" in path.read_bytes()]
    assert files == []


def test_hash_and_group_are_those_of_the_masked_config(root: Path) -> None:
    data = ["--data=Arrays", "--data.num_clients=6", "--data.path=https://me:S3cret@host/x.npz"]
    config = FederatedCLI("fit", "--model=FedAvg", "--model.net=DigitsMLP", *data).resolved()
    plain = json.loads(json.dumps(config).replace("https://***@", "https://me:S3cret@"))
    assert config["data"]["init_args"]["path"] == "https://***@host/x.npz" and group_id(plain) == group_id(config)
    folders = [root / "a/version_0", root / "b/version_0"]
    for folder, content in zip(folders, (config, plain), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(content))
        (folder / "metrics.csv").write_text("round,server/test/acc\n1,0.5\n")
    assert run_key(folders[0]) == run_key(folders[1]) and read_config(folders[1] / "config.yaml") == config
    (group,) = compare([root])
    assert group.left_out == [folders[0]]


def test_a_flower_app_hands_out_no_secret(root: Path) -> None:
    secret = ["--trainer.loggers=[{class_path: mine_secret.Logger, init_args: {save_dir: logs, api_key: S3cret}}]"]
    with pytest.raises(SystemExit, match=r"^error: trainer\.loggers\.Logger\.api_key: every node would get"):
        cli("flower", "app", "--model=FedAvg", *DIGITS, *secret)
    assert not Path("app").exists()
