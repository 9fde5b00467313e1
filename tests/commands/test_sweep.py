"""Sweeps and grids on the command line, arguments as W&B's agent writes them, and a folder to start from."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.commands import fit
from fl_lightning.commands.shared.arguments import configs_folder, find_config, prepare
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.sweeps.file import Sweep
from tests.runs import DIGITS, cli, metrics

FILES = sorted(path.stem for path in (configs_folder() / "sweeps").glob("*.yaml"))


def file(folder: Path, **changes: Any) -> Path:
    text = {
        "program": "fl-lightning",
        "method": "grid",
        "metric": {"name": "server/test/acc.max", "goal": "maximize"},
        "parameters": {"model": {"values": ["FedAvg", "FedSAM"]}, "data.num_clients": {"values": [6, 8]}},
        "command": ["${env}", "fl-lightning", "fit", *DIGITS, "${args}"],
        **changes,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_pivot_of_a_sweep_is_that_of_its_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not that of the test accuracy, which has not chosen the best settings."""
    parameters = {"model": {"values": ["FedAvg"]}, "data.num_clients": {"values": [6]}}
    metric = {"name": "server/val/loss_headline", "goal": "minimize"}
    command = ["fl-lightning", "fit", *DIGITS, "--data.val_fraction=0.2", "--trainer.max_rounds=1", "${args}"]
    changes = {"metric": metric, "parameters": parameters, "command": command}
    cli("sweep", str(file(tmp_path, **changes)), f"--out={tmp_path}")
    assert "--pivot num_clients,model --metric server/val/loss --mode min\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_over_algorithms_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli("sweep", str(file(tmp_path)), f"--out={tmp_path}")
    out = capsys.readouterr().out
    rows = table(tmp_path / "mine")
    assert [(row["data.num_clients"], row["model"]) for row in rows] == [
        ("6", "FedAvg"), ("6", "FedSAM"), ("8", "FedAvg"), ("8", "FedSAM"),
    ]  # fmt: skip
    assert {row["state"] for row in rows} == {"finished"} and {row["rounds"] for row in rows} == {"2"}
    for row in rows:
        reached = max(value for _, value in metrics(Path(row["folder"]))["server/test/acc"])
        assert float(row["server/test/acc.max"]) == reached
    best = max(rows, key=lambda row: float(row["server/test/acc.max"]))
    assert f"best: data.num_clients = {best['data.num_clients']}, model = {best['model']}" in out
    config = yaml.safe_load((tmp_path / "mine" / "best.yaml").read_text())
    assert config["model"]["class_path"].endswith(best["model"])
    assert config["data"]["init_args"]["num_clients"] == int(best["data.num_clients"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")}
    cli("sweep", str(file(tmp_path)), f"--out={tmp_path}")
    assert capsys.readouterr().out.count(": kept, server/test/acc.max ") == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")} == before


def test_a_failed_trial_is_in_the_table_and_the_code(tmp_path: Path) -> None:
    path = file(tmp_path, parameters={"model": {"value": "FedSAM"}, "model.rho": {"values": [0.1, -1.0]}})
    with pytest.raises(SystemExit, match=r"1 of 2 runs broke off; .*rho"):
        cli("sweep", str(path), f"--out={tmp_path}")
    assert [row["state"] for row in table(tmp_path / "mine")] == ["finished", "failed"]


def test_a_metric_that_no_run_measures_is_an_error(tmp_path: Path) -> None:
    """It comes after the first trial: the others are not trained in vain."""
    path = file(tmp_path, metric={"name": "server/test/mae"}, parameters={"model": {"values": ["FedAvg", "FedSAM"]}})
    message = r"metric.name = server/test/mae: no run has measured it; choose from [^\n]*server/test/acc"
    with pytest.raises(SystemExit, match=message):
        cli("sweep", str(path), f"--out={tmp_path}")
    assert [row["state"] for row in table(tmp_path / "mine")] == ["finished", "waiting"]


def test_a_mistake_is_found_before_the_first_trial(tmp_path: Path) -> None:
    path = file(tmp_path, parameters={"model.roh": {"values": [0.1, 0.2]}})
    with pytest.raises(SystemExit, match=r"model.*roh = 0.1: no such setting"):
        cli("sweep", str(path), f"--out={tmp_path}")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["nowhere.yaml"], "file = nowhere.yaml: no such file"),
        (["sweeps/digits", "--jobs=0"], "jobs = 0"),
        (["sweeps/digits", "--seeds=0,0"], "seeds = 0,0"),
        (["sweeps/digits", "--seeds=x"], "seeds = x"),
    ],
)
def test_faulty_arguments(args: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=line):
        cli("sweep", *args, f"--out={tmp_path}")
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", FILES)
def test_every_sweep_of_the_package_is_understood(name: str) -> None:
    sweep = Sweep.read(find_config(f"sweeps/{name}"))
    first = sweep.search(0).propose(1)[0]
    args = [*sweep.args, *(f"--{key}={value}" for key, value in first.items())]
    config = FederatedCLI(sweep.command, *args).config
    for key, value in first.items():
        node: Any = config
        for part in key.split("."):
            node = node[part] if part in node else node.init_args[part]
        assert str(getattr(node, "class_path", node)).endswith(str(value)) or node == pytest.approx(value)


@pytest.mark.slow
def test_what_the_agent_of_wandb_writes_is_understood() -> None:
    launch = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    values = {
        "model.ascent": {"class_path": "ASAM", "init_args": {"rho": 0.3}},
        "trainer.max_rounds": 7.0,
        "trainer.tf32": True,
        "trainer.callbacks": ["Curves"],
        "trainer.max_time": None,
        "model.rho": 1.0,
        "model": "FedGloSS",
        "data": {"num_clients": 9},
    }
    arguments = launch.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    for form in ("args", "args_no_boolean_flags"):
        config = FederatedCLI("fit", "--config", "quickstart", *arguments[form]).config
        assert config.model.init_args.ascent.class_path.endswith("ASAM") and config.model.init_args.rho == 1.0
        assert config.model.init_args.ascent.init_args.rho == 0.3
        assert config.trainer.max_rounds == 7 and config.trainer.tf32 is True and config.trainer.max_time is None
        assert [callback.class_path for callback in config.trainer.callbacks] == ["fl_lightning.Curves"]
        assert config.data.init_args.num_clients == 9


def test_arguments_are_prepared() -> None:
    for more in ("--values=b=3", "--values+=b=3"):
        assert prepare(["--values", "a=1,2", "--model.x=None", more]) == [
            "--model.x=null", '--values=["a=1,2", "b=3"]',
        ]  # fmt: skip
    assert prepare(["--values+", "a=1,2"]) == ['--values=["a=1,2"]']
    assert prepare(["--model.x", "None", "--trainer.tf32", "--data.seed", "-1", "--model.help", "FedSAM"]) == [
        "--model.x=null", "--trainer.tf32=true", "--data.seed=-1", "--model.help=FedSAM",
    ]  # fmt: skip
    assert prepare(["--trainer.name=1.0", "--model={rho: 1}"]) == ["--trainer.name=1.0", "--model={rho: 1}"]


def test_a_sweep_over_seeds(tmp_path: Path) -> None:
    seeds = file(tmp_path, parameters={"trainer.seed": {"values": [3, 4]}, "model": {"value": "FedAvg"}})
    cli("sweep", str(seeds), f"--out={tmp_path}")
    rows = table(tmp_path / "mine")
    assert [row["trainer.seed"] for row in rows] == ["3", "4"]
    assert rows[0]["server/test/acc.max"] != rows[1]["server/test/acc.max"]
    with pytest.raises(SystemExit, match=r"seeds = \[5, 6\]: the sweep varies trainer.seed itself; leave it out"):
        cli("sweep", str(seeds), "--seeds=5,6", f"--out={tmp_path}")


def test_values_may_be_lists() -> None:
    assert fit._grid(None, ["data.mean=[0.3],[0.5,0.1]", "model=A,B"]) == {
        "data.mean": ["[0.3]", "[0.5,0.1]"],
        "model": ["A", "B"],
    }


def test_names_and_folders_of_runs_do_not_vary(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"parameters = trainer.name: each trial has a folder of its own"):
        cli("sweep", str(file(tmp_path, parameters={"trainer.name": {"values": ["a", "b"]}})), f"--out={tmp_path}")
    with pytest.raises(SystemExit, match=r"values = trainer.name=a,b: each trial has a folder of its own"):
        cli("fit", "--model=FedAvg", *DIGITS, "--values=trainer.name=a,b")


@pytest.mark.slow
def test_values_make_a_grid_of_any_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = ["--values=model=FedAvg,FedSAM", "--values", "data.num_clients=6,8", "--seeds=3"]
    cli("fit", "--model=FedAvg", *DIGITS, *values, f"--trainer.default_root_dir={tmp_path}")
    runs = {folder.parent.name for folder in tmp_path.glob("FedAvg-Digits/*/version_0")}
    assert runs == {f"model_{model}_num_clients_{n}_seed_3" for model in ("FedAvg", "FedSAM") for n in (6, 8)}
    assert "4 runs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"values = model.mu=2: model.mu is there twice"):
        cli("fit", "--model=FedProx", *DIGITS, "--values=model.mu=1", "--values=model.mu=2")
    with pytest.raises(SystemExit, match="seeds = 5,6: values has trainer"):
        cli("fit", "--model=FedProx", *DIGITS, "--values=trainer.seed=1,2", "--seeds=5,6")


def test_init_writes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli("init", "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert sorted(path.name for path in Path().iterdir()) == [
        "README.md",
        "config.yaml",
        "my_algorithm.py",
        "sweep.yaml",
    ]
    text = Path("README.md").read_text(encoding="utf-8")
    begin, go_on = (line.split() for line in re.findall(r"fl-lightning (fit .*--trainer.name mine[^#`\n]*)", text))
    assert int(go_on[-1]) > yaml.safe_load(Path("config.yaml").read_text())["trainer"]["max_rounds"]
    short = ["--trainer.callbacks=[]", "--trainer.enable_progress_bar=false"]
    cli(*begin, *short, "--trainer.max_rounds=2")
    cli(*go_on, *short, "--trainer.max_rounds=3")
    assert len(metrics(Path("runs/mine/version_0"))["server/test/acc"]) == 3
    sweep = Sweep.read(Path("sweep.yaml"))
    assert FederatedCLI(sweep.command, *sweep.args, "--model.mu=1.0").config.model.init_args.mu == 1.0
    with pytest.raises(
        SystemExit, match=r"folder = .: not empty, it has README.md, config.yaml, my_algorithm.py; choose"
    ):
        cli("init", ".")
