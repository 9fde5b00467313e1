"""The command line: what it accepts, what it leaves behind, and that a run can be made again from it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fl_lightning import algorithms
from fl_lightning.commands.shared.arguments import kept, model_of_configs
from fl_lightning.commands.shared.cli import FederatedCLI
from tests import generated
from tests.runs import DIGITS, assert_same, cli, forked, last, metrics, newest, run, state

FOLDER = Path(__file__).parents[2] / "configs"
QUIET = ["--trainer.enable_progress_bar=false"]
"""Draws no progress bar, which takes longer than a small run."""
CONFIGS = sorted(FOLDER.glob("*.yaml"))
FRAGMENTS = sorted(path for name in ("compositions", "presets") for path in (FOLDER / name).rglob("*.yaml"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with client state, an average of models and a held-out part."""
    root = tmp_path_factory.mktemp("done")
    args = "--model.ascent=ASAM --model.ascent.rho=0.3 --model.averaging=SWA --model.averaging.start=1"
    options = "--data.val_fraction=0.1 --trainer.max_rounds=4 --trainer.seed=7 --trainer.callbacks+=Curves"
    return run("fit", *args.split(), *options.split(), root=root, model="SCAFFOLD")


def test_run_folder(done: Path) -> None:
    assert done.name == "version_0" and done.parent.name == "SCAFFOLD-Digits"
    assert [at for at, _ in metrics(done)["server/test/acc"]] == [1, 2, 3, 4]
    assert last(done)["round"] == 4
    with Image.open(done / "curves.png") as image:
        image.load()
        assert min(image.size) > 100
        assert image.convert("L").getextrema() == (0, 255)
    assert (done / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_saved_config_runs_again_to_the_same_bits(done: Path, tmp_path: Path) -> None:
    saved = yaml.safe_load((done / "config.yaml").read_text())
    assert saved["model"]["init_args"]["ascent"]["init_args"]["rho"] == 0.3
    assert saved["trainer"]["seed"] == 7
    assert "ckpt_path" not in saved
    cli("fit", f"--config={done / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path}")
    rerun = newest(tmp_path)
    assert rerun != done
    assert_same(state(rerun), state(done))
    assert metrics(rerun) == metrics(done)


def test_print_config_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"--trainer.default_root_dir={tmp_path / 'runs'}"
    args = ["--model=FedGloSS", *DIGITS, "--model.rho=0.25", "--trainer.callbacks+=FlatnessMonitor", root]
    printed = []
    for options in (args, [f"--config={tmp_path / 'config.yaml'}"]):
        with pytest.raises(SystemExit) as exit:
            cli("fit", *options, "--print_config")
        assert exit.value.code in (0, None)
        printed.append(capsys.readouterr().out)
        (tmp_path / "config.yaml").write_text(printed[-1])
    assert yaml.safe_load(printed[0])["model"]["init_args"]["rho"] == 0.25
    assert printed[0] == printed[1]
    assert not (tmp_path / "runs").exists()
    cli("fit", f"--config={tmp_path / 'config.yaml'}")
    assert "flatness/lambda_max" in metrics(newest(tmp_path / "runs"))


def test_whole_numbers_in_every_spelling() -> None:
    config = FederatedCLI("fit", "--model=FedAvg", *DIGITS, "--trainer.max_rounds=1e1", "--trainer.seed=3.0").config
    assert (config.trainer.max_rounds, config.trainer.seed) == (10, 3)


def test_append_adds_to_what_null_stands_for() -> None:
    """It does so after settings, too, and to a list that is given."""
    default, key = ["LambdaMax", "Discrepancy"], "--trainer.callbacks.metrics"
    appended = [f"{key}+=Spectrum", f"{key}.k=3"]
    for settings, expected in (
        ([], default),
        (["--trainer.callbacks.every_n_rounds=5"], default),
        ([f"{key}=[LPF]"], ["LPF"]),
    ):
        args = ["--trainer.callbacks+=FlatnessMonitor", *settings, *appended]
        (monitor,) = FederatedCLI("fit", "--model=FedAvg", *DIGITS, *args).config.trainer.callbacks
        measures = monitor.init_args.metrics
        assert [measure.class_path for measure in measures] == [
            f"fl_lightning.{name}" for name in (*expected, "Spectrum")
        ]
        assert measures[-1].init_args.k == 3
    measures = FederatedCLI("flatness", "--model=FedAvg", *DIGITS, "--ckpt_path=last", "--metrics+=LPF").config.metrics
    assert [measure.class_path.rpartition(".")[2] for measure in measures] == [*default, "LPF"]


@pytest.mark.slow
def test_the_arguments_that_began_a_run_continue_it(tmp_path: Path) -> None:
    """What they append is in the run's config already."""
    appended = [
        "--trainer.callbacks+=Checkpoints",
        "--trainer.callbacks.every_n_rounds=1",
        "--trainer.callbacks+=Curves",
    ]
    args = ["--model=FedAvg", *DIGITS, *appended, f"--trainer.default_root_dir={tmp_path}"]
    cli("fit", *args)
    folder = newest(tmp_path)
    cli("fit", *args, "--trainer.max_rounds=3", f"--ckpt_path={folder / 'checkpoints/last.ckpt'}")
    assert last(folder)["round"] == 3
    one, other = (yaml.safe_load((folder / name).read_text()) for name in ("config.yaml", "config_round_2.yaml"))
    assert one["trainer"]["callbacks"] == other["trainer"]["callbacks"] and len(one["trainer"]["callbacks"]) == 2
    options = ["--trainer.callbacks+=[Curves, Trajectory]", f"--ckpt_path={folder / 'checkpoints/last.ckpt'}"]
    callbacks = FederatedCLI("fit", *options).config.trainer.callbacks
    assert [callback.class_path.rpartition(".")[2] for callback in callbacks] == ["Checkpoints", "Curves", "Trajectory"]


def test_a_list_that_is_given_anew_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Otherwise a trace, in a config or an argument, would be measured on the test set because lambda_max was."""
    first, second = (tmp_path / name for name in ("first.yaml", "second.yaml"))
    measure = {"class_path": "LambdaMax", "init_args": {"samples": 64, "split": "test"}}
    monitor = {"class_path": "FlatnessMonitor", "init_args": {"every_n_rounds": 5, "metrics": [measure]}}
    parts = [{"class_path": "Compress", "init_args": {"rate": 0.5}}]
    first.write_text(yaml.safe_dump({"trainer": {"callbacks": [monitor]}, "model": {"init_args": {"parts": parts}}}))
    anew = {"class_path": "FlatnessMonitor", "init_args": {"metrics": ["HessianTrace"]}}
    compress = {"class_path": "Compress", "init_args": {"method": "qsgd"}}
    second.write_text(yaml.safe_dump({"trainer": {"callbacks": [anew]}, "model": {"init_args": {"parts": [compress]}}}))

    def parse(*args: str) -> Any:
        return FederatedCLI("fit", "--model=FedAvg", *DIGITS, *args).config

    expected = parse(f"--config={second}")
    lists = f"--trainer.callbacks={[anew]}", f"--model.parts={[compress]}"
    for settings in ([f"--config={second}"], lists):
        config = parse(f"--config={first}", *settings)
        assert config.trainer.callbacks == expected.trainer.callbacks
        assert config.model.init_args.parts == expected.model.init_args.parts
    second.write_text("data:\n  augment: {class_path: ScaledCrop, init_args: {size: [3, 4]}}\n")
    configs = [f"--config={second}"] * 2  # a pair is no list
    assert parse(*configs, "--data.augment.size=[4,5]").data.init_args.augment.init_args.size == (4, 5)
    second.write_text("trainer: [")
    with pytest.raises(SystemExit, match=r"error: config = .*second.yaml: while parsing a flow"):
        cli("fit", f"--config={second}")
    (callback,) = parse(f"--config={first}", "--trainer.callbacks.metrics=[HessianTrace]").trainer.callbacks
    assert callback.init_args.every_n_rounds == 5
    assert callback.init_args.metrics == expected.trainer.callbacks[0].init_args.metrics


@pytest.mark.slow
def test_another_algorithm_says_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps settings of the config that it knows, and that the command line does not give."""
    args = [f"--config={FOLDER / 'quickstart.yaml'}", *DIGITS, "--trainer.callbacks=null", "--trainer.local_steps=1"]
    cli("fit", f"--trainer.default_root_dir={tmp_path}", *args, "--model", "FedDyn", "--model.ascent=null")
    assert "model = FedDyn: keeps beta, optimizer of the config's FedGloSS; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "args", "init_args", "names"),
    [
        ({"beta": 0.7, "use_dual": False}, [], {"beta": 10.0, "use_dual": False}, ["use_dual"]),
        ({"beta": 0.7}, ["--model.init_args.beta=0.5"], {"beta": 0.5}, []),
        ({"prox": "unsquared"}, [], {"prox": "half"}, []),
        (
            {"optimizer": {"class_path": "SGD"}, "ascent": {"class_path": "SAM"}},
            ["--model.optimizer.lr=0.1"],
            {"optimizer": {"class_path": "fl_lightning.SGD"}, "ascent": None},
            ["optimizer"],
        ),
    ],
)
def test_what_is_kept_has_the_value_of_the_config(
    config: dict[str, Any], args: list[str], init_args: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """False is a value, too; one that is given, dropped or another class's default is not kept."""
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": "FedDyn", "init_args": config}}))
    config_model = model_of_configs([f"--config={path}", "--model", "FedGloSS", *args])
    assert kept(config_model, {"class_path": "fl_lightning.FedGloSS", "init_args": init_args}) == names
    assert kept(config_model, {"class_path": "fl_lightning.FedDyn", "init_args": init_args}) == []


@pytest.mark.parametrize(("command", "split"), [("validate", "val"), ("test", "test")])
def test_evaluation_gives_what_fit_logged(
    done: Path, command: str, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = f"--config={done / 'config.yaml'}", done / "checkpoints" / "last.ckpt"
    before = {path: path.stat().st_mtime_ns for path in done.parent.rglob("*")}
    for ckpt_path in ("last", file):
        cli(command, config, f"--ckpt_path={ckpt_path}")
        shown = dict(re.findall(r"(\S+) (\d+\.\d{4})\b", capsys.readouterr().out))
        logged = {name: f"{metrics(done)[name][-1][1]:.4f}" for name in (f"server/{split}/acc", f"server/{split}/loss")}
        assert shown == logged
    assert {path: path.stat().st_mtime_ns for path in done.parent.rglob("*")} == before


def test_validate_without_held_out_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is of the clients' data then, which this net has learnt."""
    run("fit", "--trainer.max_rounds=8", "--model.optimizer.lr=0.5", root=tmp_path)
    capsys.readouterr()
    run("validate", "--ckpt_path=last", root=tmp_path)
    (acc,) = re.findall(r"server/train/acc (\d\.\d{4})", capsys.readouterr().out)
    assert float(acc) > 0.5


def test_averaged_model_is_what_a_checkpoint_gives(done: Path) -> None:
    """The test above is of the average, then, not of the server's last model."""
    checkpoint = last(done)
    model = torch.cat([value.reshape(-1) for value in checkpoint["state_dict"].values()])
    assert torch.equal(model, checkpoint["server"]["swa_w"])
    assert not torch.equal(model, checkpoint["server"]["w"])


def test_flags_alone(tmp_path: Path) -> None:
    """Bare names and nested overrides suffice: there is no config file, and the rest has its defaults."""
    args = (
        "fit --model SCAFFOLD --model.net DigitsMLP --model.ascent ASAM --model.ascent.rho 0.3 --model.averaging SWA "
        "--data Digits --trainer.max_rounds 2"
    )
    cli(*args.split(), "--trainer.default_root_dir", str(tmp_path))
    assert len(metrics(newest(tmp_path))["server/test/acc"]) == 2
    assert set(last(newest(tmp_path))["server"]) == {"w", "c", "swa_w", "swa_n"}


COMPOSITION: dict[str, Any] = {
    "model": {
        "class_path": "SCAFFOLD",
        "init_args": {
            "net": "DigitsMLP",
            "ascent": {"class_path": "ASAM", "init_args": {"rho": 0.3}},
            "averaging": {"class_path": "SWA", "init_args": {"start": 1, "cycle": 2}},
            "server_update": {"class_path": "ServerMomentum", "init_args": {"beta": 0.5}},
            "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
        },
    },
    "data": {"class_path": "Digits", "init_args": {"num_clients": 10, "partition": {"class_path": "Dirichlet"}}},
    "trainer": {"max_rounds": 3, "sampler": {"class_path": "BernoulliSampler", "init_args": {"p": 0.5}}},
}


@pytest.mark.slow
def test_composition_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(COMPOSITION))
    root = f"--trainer.default_root_dir={tmp_path}"
    cli("fit", "--config", str(tmp_path / "mine.yaml"), "--model.ascent.rho=0.2", root)
    checkpoint = last(newest(tmp_path))
    assert set(checkpoint["server"]) == {"w", "c", "server_v", "swa_w", "swa_n"}
    config = yaml.safe_load((newest(tmp_path) / "config.yaml").read_text())
    assert config["model"]["init_args"]["ascent"]["class_path"] == "fl_lightning.ASAM"
    assert config["model"]["init_args"]["ascent"]["init_args"]["rho"] == 0.2


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        ("", 2, "--config quickstart"),
        ("--help", 0, "list"),
        ("fit --help", 0, "--trainer.max_rounds"),
        ("test --help", 0, "--ckpt_path"),
        ("fit --model.help=FedGloSS", 0, "--model.beta"),
        ("fit --data.help=Digits --data.partition.help=Dirichlet", 0, "--data.partition.alpha"),
        ("fit --trainer.callbacks.help=FlatnessMonitor", 0, "--trainer.callbacks.every_n_rounds"),
    ],
)
def test_help(args: str, code: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli(*args.split())
    assert (exit.value.code or 0) == code
    captured = capsys.readouterr()
    assert expected in captured.out and not captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    cli("--version")
    assert capsys.readouterr().out.strip() == version("fl-lightning")


def test_list_in_a_process_of_its_own(tmp_path: Path) -> None:
    with forked("list", cwd=tmp_path) as child:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 0
    assert err == ""
    names = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert set(algorithms.__all__) <= names
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns noise in the form of CIFAR, for configs whose data have to be downloaded."""
    path, rng = tmp_path_factory.mktemp("images") / "noise.npz", np.random.default_rng(0)
    x, y = rng.integers(0, 256, (500, 32, 32, 3), dtype=np.uint8), np.arange(500) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_of_the_repository(config: Path, images: Path, tmp_path: Path) -> None:
    data = str(yaml.safe_load(config.read_text()).get("data"))
    noise = ["--data=Arrays", f"--data.path={images}", "--data.partition=IID"]
    small = ["--trainer.local_steps=1", "--trainer.clients_per_round=2", *QUIET]
    if "FashionMNIST" in data:
        generated.fashion_mnist(tmp_path / "data", 400)
        noise = [f"--data.data_dir={tmp_path / 'data'}"]
    overrides = [] if "Digits" in data else [*noise, *small]
    cli("fit", f"--config={config}", *overrides, "--trainer.max_rounds=2", f"--trainer.default_root_dir={tmp_path}")
    assert last(newest(tmp_path))["round"] == 2


@pytest.mark.sampled(quick=9, slow=2)
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: "-".join(path.parts[-2:]))
def test_fragment_over_the_quickstart(fragment: Path, tmp_path: Path) -> None:
    """Each preset and composition is taken as it stands, and trains."""
    quickstart, settings = FOLDER / "quickstart.yaml", yaml.safe_load(fragment.read_text())
    flags = ["--trainer.max_rounds=1", "--trainer.loggers=null", "--trainer.callbacks=null", *QUIET]
    common = [f"--config={path}" for path in (fragment.with_name("common.yaml"),) if path.exists()]
    root = f"--trainer.default_root_dir={tmp_path}"
    cli("fit", f"--config={quickstart}", *common, f"--config={fragment}", *flags, root)
    config = yaml.safe_load((newest(tmp_path) / "config.yaml").read_text())

    def holds(expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            return all(holds(value, actual[key]) for key, value in expected.items())
        if isinstance(expected, list):
            return len(expected) == len(actual) and all(map(holds, expected, actual))
        return actual == expected or re.fullmatch(rf"fl_lightning\.([\w.]+\.)?{expected}", str(actual)) is not None

    assert holds(settings, config)
