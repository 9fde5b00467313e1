"""Bad input gives one line with key, value and remedy, before anything is written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fl_lightning
from fl_lightning import DigitsMLP, UserError
from fl_lightning.commands import COMMANDS
from fl_lightning.commands.shared.index import ArgumentsError
from fl_lightning.commands.shared.messages import explain
from fl_lightning.commands.shared.parser import check_early
from tests.bad_inputs import COMPARED, bad_inputs, write_bad_files
from tests.runs import DIGITS, cli, last, newest, process, run

Complaint = Callable[..., str]

ARRAYS = [*DIGITS, "--data=Arrays", "--data.num_clients=3", "--trainer.clients_per_round=2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes bad files of every kind, and one good run under ``done``."""
    folder = tmp_path_factory.mktemp("files")
    x, y = np.random.default_rng(0).normal(size=(40, 8, 8)).astype(np.float32), np.arange(40) % 4
    np.savez(folder / "good.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    x[3, 2, 2] = np.nan
    np.savez(folder / "nan.npz", x_train=x, y_train=y, x_test=x[4:12], y_test=y[4:12])
    (folder / "empty.json").write_text(json.dumps({"0": list(range(20)), "1": [], "2": list(range(20, 40))}))
    (folder / "trace.json").write_text("[[0, 1], [1]]")
    (folder / "broken.yaml").write_text("model: [1, 2\ndata: {")
    (folder / "word.yaml").write_text("hello\n")
    write_bad_files(folder)
    (folder / "garbage.ckpt").write_bytes(b"not a checkpoint")
    torch.save({"a": 1}, folder / "other.ckpt")
    good = (run("fit", root=folder / "done") / "checkpoints" / "last.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(good[: len(good) // 2])
    return folder


def early_line(*args: str) -> str | None:
    """Returns what the check before the slow imports says of a command line."""
    configs = [arg.removeprefix("--config=") for arg in args if arg.startswith("--config=")]
    try:
        check_early(*args)
    except (UserError, ArgumentsError) as error:
        return f"error: {explain(error, configs)}"
    return None


@pytest.fixture
def complaint(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Complaint:
    """Gives what ``fl-lightning`` with these arguments exits with; it is one line, and no run folder is made."""
    monkeypatch.chdir(files)

    def complaint(*args: str, root: Path = tmp_path / "runs") -> str:
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        with pytest.raises(SystemExit) as exit:
            cli(*args[:1], f"--trainer.default_root_dir={root}", *args[1:])
        message = exit.value.code  # a text: Python prints it to stderr and exits with 1
        assert isinstance(message, str)
        assert message.startswith("error: ")
        assert len(message.splitlines()) == 1
        assert capsys.readouterr().err == ""
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        # what a fresh process refuses before its imports, it refuses in the same words
        assert early_line(args[0], f"--trainer.default_root_dir={root}", *args[1:]) in (None, message)
        return message

    return complaint


def shows(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize(
    ("args", "key", "value", "remedy"),
    [
        # classes
        ("--model=FedSMO", "model = ", "FedSMO", "did you mean FedSMOO"),
        (
            "--model=FedAvg+SAM+SWA",
            "model = ",
            "FedAvg+SAM+SWA",
            "give --model FedAvg --model.ascent SAM --model.averaging SWA",
        ),
        ("--model=Nothing", "model = ", "Nothing", "choose from AFedPD, AFedPDSAM, AdaBest, FedACG, "),
        (
            "--model=my.own.Thing",
            "model = ",
            "my.own.Thing",
            "; start in the folder that holds my, or check that Python can import 'my.own'",
        ),
        ("--model.ascent=SAMM", "model.ascent = ", "SAMM", "did you mean SAM, "),
        ("--model.ascent=SAMM", "ascent", "SAMM", "LESAM? A class of your own goes by its dotted path"),
        ("--data=json.Sensors", "data = ", "json.Sensors", "module 'json' has no attribute 'Sensors'"),
        ("--data=json.decoder.JSONDecode", "data = ", "JSONDecode", "; it has JSONDecodeError, JSONDecoder"),
        (
            "--trainer.loggers=WandbLogger --trainer.loggers.mode=on",
            "error: trainer.loggers.mode = ",
            "on",
            "choose from ",
        ),
        ("--data=CIFAR-10", "data = ", "CIFAR-10: ", "did you mean CIFAR10"),
        ("--model.net=DigitsMPL", "model.net = ", "DigitsMPL", "did you mean DigitsMLP"),
        ("--data=Digit", "data = ", "Digit", "did you mean Digits?"),
        ("--data.partition=Dirichle", "data.partition = ", "Dirichle", "did you mean Dirichlet"),
        ("--trainer.sampler=Unifrom", "trainer.sampler = ", "Unifrom", "did you mean UniformSampler?"),
        (
            "--trainer.callbacks+=FlatnesMonitor",
            "trainer.callbacks = ",
            "FlatnesMonitor",
            "did you mean FlatnessMonitor",
        ),
        (
            "--trainer.callbacks=ModelCheckpoint",
            "trainer.callbacks = ",
            "ModelCheckpoint",
            "; use Checkpoints (monitor",
        ),
        (
            "--trainer.callbacks+=lightning.pytorch.callbacks.BatchSizeFinder",
            "trainer.callbacks = ",
            "BatchSizeFinder",
            ": a callback of lightning.Trainer; write a subclass of fl_lightning.Callback",
        ),
        (
            "--trainer.callbacks=pytorch_lightning.callbacks.EarlyStopping",
            "trainer.callbacks = ",
            "EarlyStopping",
            "; use lightning.pytorch.callbacks.EarlyStopping",
        ),
        (
            "--trainer.callbacks=[Curves,lightning.pytorch.callbacks.ModelChekpoint]",
            "trainer.callbacks = ",
            "ModelChekpoint",
            "it has ModelCheckpoint",
        ),
        ("--model.optimizer=torch.optim.Adam", "model.optimizer = ", "torch.optim.Adam: no SGD; ", "TorchOptimizer"),
        ("--trainer.callbacks=FlatnessMonitor", "trainer.callbacks = ", "FlatnessMonitor", "--trainer.callbacks+=Flat"),
        # keys
        ("--model.averagin=SWA", "model.averagin = ", "SWA", "did you mean model.averaging"),
        (
            "--model.optimizer=TorchOptimizer --model.optimizer.name=Nope",
            "model.optimizer.name = ",
            "Nope",
            "torch.optim",
        ),
        ("--model.optimizer.lrr=0.1", "model.optimizer.lrr = ", "0.1", "did you mean model.optimizer.lr?"),
        ("--trainer.max_roundz=3", "trainer.max_roundz = ", "3", "did you mean trainer.max_rounds?"),
        ("--trainer.max_round=3", "trainer.max_round = ", "3", "did you mean trainer.max_rounds?"),
        ("--trainer.rho=3", "trainer.rho = ", "3", "no such setting (did you mean model.rho or model.ascent.rho?)"),
        ("--lr=0.1", "lr = ", "0.1", "did you mean model.optimizer.lr?"),
        (
            "--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.every=2",
            "callbacks.every = ",
            "2",
            "--trainer.callbacks.help=CLASS",
        ),
        ("--trainer.sampler=ReplaySampler", "trainer.sampler.rounds", "", "missing; give a value"),
        # types and ranges
        ("--trainer.max_rounds=many", "trainer.max_rounds = ", "many", "expected a whole number"),
        ("--trainer.max_rounds=0", "trainer.max_rounds = ", "0", "at least 1"),
        ("--model.ascent=SAM --model.ascent.rho=big", "model.ascent.rho = ", "big", "expected a number"),
        ("--model.ascent=SAM --model.ascent.rho=-1", "ascent.rho = ", "-1", "0 or more"),
        ("--model.optimizer.lr=-0.1", "optimizer.lr = ", "-0.1", "above 0"),
        ("--model.weighting=sample", "model.weighting = ", "sample", "choose from samples, uniform"),
        ("--data.partition=Dirichlet --data.partition.alpha=-1", "alpha", "-1", "0 or more"),
        ("--data.num_clients=5000", "num_clients", "5000", "use fewer clients"),
        ("--trainer.precision=16", "trainer.precision = ", "16", "choose from 32-true, 64-true, bf16-mixed"),
        ("--trainer.accelerator=quantum", "trainer.accelerator = ", "quantum", "auto, "),
        # the cohort
        ("--trainer.clients_per_round=7", "trainer.clients_per_round = ", "7", "take at most 6"),
        (
            "--trainer.sampler=UniformSampler --trainer.sampler.clients_per_round=7",
            "that of trainer.sampler",
            "7",
            "take at most 6",
        ),
        (
            "--trainer.precision=bf16-mixed --model.loss=torch.nn.MultiMarginLoss",
            "model.loss = ",
            "MultiMarginLoss",
            "not in this trainer.precision; set that to 32-true",
        ),
        (
            "--trainer.sampler=ReplaySampler --trainer.sampler.rounds=trace.json --trainer.max_rounds=5",
            "trainer.sampler.rounds holds 2",
            "max_rounds = 5",
            "take max_rounds 2, or a longer trace",
        ),
        (
            "--trainer.sampler=ReplaySampler --trainer.sampler.rounds=[[0],[6]]",
            "rounds[1] = ",
            "[6]",
            "ids from 0 to 5",
        ),
        (
            "--trainer.sampler=ReplaySampler --trainer.sampler.rounds=none.json",
            "sampler.rounds = ",
            "none.json",
            "give a JSON",
        ),
        # the net and the data
        ("--model.net=HsuCNN", "model.net = ", "HsuCNN", "but got 1 channels instead); choose a net for this data"),
        ("--model.net.num_classes=5", "model.net = ", "DigitsMLP", "set its num_classes to 10"),
        ("--model.init_weights=none.pt", "model.init_weights = ", "none.pt", "give a state_dict"),
        ("--model.init_weights=garbage.ckpt", "model.init_weights = ", "garbage.ckpt", "give a state_dict"),
        # checkpoints
        ("--ckpt_path=last", "ckpt_path = ", "last", "start without --ckpt_path"),
        ("--ckpt_path=none.ckpt", "ckpt_path = ", "none.ckpt", "give a checkpoint file"),
        ("--ckpt_path=garbage.ckpt", "ckpt_path = ", "garbage.ckpt", "take an older one"),
        ("--ckpt_path=cut.ckpt", "ckpt_path = ", "cut.ckpt", "take an older one"),
        ("--ckpt_path=other.ckpt", "ckpt_path = ", "other.ckpt", "take an older one from a run's checkpoints folder"),
    ],
)
def test_argument(complaint: Complaint, args: str, key: str, value: str, remedy: str) -> None:
    model = () if "--model=" in args else ("--model=FedAvg",)
    shows(complaint("fit", *model, *DIGITS, *args.split()), key, value, remedy)


def test_a_setting_that_a_class_needs_is_asked_for_alone(complaint: Complaint) -> None:
    """A config would replace the class."""
    message = complaint("fit", "--model=FedAvg", "--model.net=DigitsMLP", "--data=ImageFolder", "--data.root=flat")
    assert message == "error: --data.image_size: missing; give a value"


@pytest.mark.sampled(quick=25, slow=6)
@pytest.mark.filterwarnings("ignore:.*samples occur in x_train:UserWarning")
@pytest.mark.parametrize(("args", "expected"), bad_inputs())
def test_bad_input(complaint: Complaint, args: str, expected: str) -> None:
    model = () if "--model=" in args else ("--model=FedAvg",)
    message = complaint("fit", *model, *DIGITS, *args.split())
    shows(message, expected)
    assert len(message) < 600  # the names of all algorithms take 450


@pytest.mark.parametrize("name", COMPARED)
def test_a_run_that_cannot_be_compared(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit) as exit:
        cli("compare", f"compared/{name}")
    assert len(str(exit.value.code).splitlines()) == 1
    shows(str(exit.value.code), f"compared/{name}", COMPARED[name][2])


def test_a_table_of_at_least_200() -> None:
    assert len(bad_inputs()) >= 200
    assert len({args for args, _ in bad_inputs()}) == len(bad_inputs())


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ("--data.path=nan.npz", ("x_train", "row 3", "NaN", "drop such rows")),
        ("--data.path=none.npz", ("path", "none.npz", "give an .npz file")),
        (
            "--data.path=good.npz --data.partition=FromFile --data.partition.path=empty.json",
            ("client 1 without data", "empty.json", "use fewer clients"),
        ),
    ],
)
def test_data(complaint: Complaint, args: str, parts: tuple[str, ...]) -> None:
    shows(complaint("fit", "--model=FedAvg", *ARRAYS, *args.split()), *parts)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("args", "key", "saved", "current"),
    [
        ("--trainer.seed=1", "trainer.seed", "0", "1"),
        ("--model=SCAFFOLD", "model", "FedAvg", "SCAFFOLD"),
        ("--model.net.hidden=9", "model.net", "[8, 64]", "[9, 64]"),
        ("--model.averaging=SWA", "server state", "[]", "swa_w"),
        ("--data.seed=1", "data", "", ""),
        ("--trainer.precision=64-true", "trainer.precision", "32-true", "64-true"),
    ],
)
def test_checkpoint_of_another_run(
    complaint: Complaint, files: Path, args: str, key: str, saved: str, current: str
) -> None:
    root = files / "done"
    path = newest(root) / "checkpoints" / "last.ckpt"
    message = complaint("fit", "--model=FedAvg", *DIGITS, *args.split(), f"--ckpt_path={path}", root=root)
    shows(message, f"ckpt_path = {path}", key, saved, current, "resume with the run's own config.yaml")


def test_evaluation_of_another_model(complaint: Complaint, files: Path) -> None:
    path = newest(files / "done") / "checkpoints" / "last.ckpt"
    message = complaint("test", "--model=FedDyn", *DIGITS, f"--ckpt_path={path}", root=files / "done")
    shows(message, str(path), "model = FedAvg", "FedDyn")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--trainer.max_rounds=3"], ("subcommand", "missing", ", ".join(COMMANDS))),
        (["fitt"], ("subcommand = fitt: did you mean fit?",)),
        (["fit"], ("--data, --model", "missing", "--config (such as quickstart)")),
        (["flatness"], ("ckpt_path", "missing", "--ckpt_path runs/")),
        (["compare"], ("runs: missing; give run folders",)),
        (["reproduce"], ("paper, table: missing; give the paper: fedsam, ",)),
        (["fit", "--config=quickstart", "model.rho=1"], ("no option; options have two dashes, as in --model.rho=1",)),
        (["fit", "--data=Digits", "--model=FedAvg"], ("--model.net", "missing", "give a value")),
        (["fit", "--config=quickstart", "--seeds", "0", "1"], ("1: a value without an option", "a list has commas")),
        (["fit", "--config", "done"], ("config = done: a folder; give a config of it",)),
        (["fit", "--config", "cut.ckpt"], ("config = cut.ckpt: a checkpoint; give it as --ckpt_path",)),
        (["test", "--ckpt_path", "done"], ("ckpt_path = done: a folder; give a checkpoint file",)),
        (
            ["fit", "--config=quickstart", "--model=a/b.py:Mine"],
            ("no dotted path of a class; give one, such as a.b.Mine",),
        ),
        (["fit", "--config=quickstart", "--values", "model.rho=[1,2]"], ("list them without brackets",)),
        (["fit", "--config", "none.yaml"], ("config = ", "none.yaml", "no such file", "fl-lightning configs")),
        (["fit", "--config", "broken.yaml"], ("config = broken.yaml", "line 2", "give YAML")),
        (["fit", "--config", "word.yaml"], ("config = word.yaml", "hello", "give YAML with model, data and trainer")),
    ],
)
def test_command_line(files: Path, args: list[str], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    with pytest.raises(SystemExit) as exit:
        cli(*args)
    assert isinstance(exit.value.code, str)
    assert len(exit.value.code.splitlines()) == 1
    shows(exit.value.code, "error: ", *parts)
    assert sorted(files.iterdir()) == before


def made(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": init_args}


def fedavg(**init_args: Any) -> dict[str, Any]:
    return {"model": made("FedAvg", **{"net": "DigitsMLP", **init_args})}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model": made("FedAvgg", net="DigitsMLP")}, ("model = FedAvgg", "did you mean FedAvg, FedAvgM")),
        (fedavg(nett=1), ("model.nett = 1", "did you mean model.net?")),
        (
            fedavg(net=made("DigitsMLP", hiden=3)),
            ("model.net.hiden = 3", "did you mean model.net.hidden?", "--model.help=CLASS --model.net.help=CLASS"),
        ),
        (
            fedavg(optimizer={"momentun": 0.9}),
            ("model.optimizer.momentun = 0.9", "did you mean model.optimizer.momentum?"),
        ),
        (fedavg(ascent=made("SAM", rho=[1])), ("model.ascent.rho = [1]", "expected a number")),
        (
            fedavg(optimizer=made("torch.optim.Adam", lr=0.1)),
            ("model.optimizer = torch.optim.Adam: no SGD; an optimizer of torch.optim goes by TorchOptimizer",),
        ),
        *(
            (
                fedavg() | {"trainer": {"callbacks": ["Curves", made(f"{package}.callbacks.{name}", **settings)]}},
                (f"trainer.callbacks = {name}: a callback of lightning.Trainer; use {ours}",),
            )
            for package, name, settings, ours in (
                ("lightning.pytorch", "ModelCheckpoint", {"monitor": "val_loss"}, "Checkpoints (monitor, mode"),
                ("pytorch_lightning", "Timer", {}, "trainer.max_time"),
                ("pytorch_lightning", "EarlyStopping", {}, "lightning.pytorch.callbacks.EarlyStopping"),
            )
        ),
        (
            {"model": {**fedavg()["model"], "lr": 3}},
            ("model.lr = 3: the settings of a class stand under init_args, as",),
        ),
        (
            {"model": {"net": "DigitsMLP", "rho": 0.1}},
            ("model = {'net'", "class_path is missing; give {class_path: NAME"),
        ),
        (
            {"model": {"class_path": "FedAvg", "init_arg": {}}},
            ("model.init_arg: no key of a class; did you mean init_args?",),
        ),
        (
            {"model": {"class_path": "FedAvg", "init_args": None}},
            ("model.init_args: empty; give settings, or leave it out",),
        ),
        (
            fedavg(ascent={"rho": 0.1}),
            ("model.ascent = {'rho': 0.1}: class_path is missing", "such as ASAM or LESAM or SAM"),
        ),
        (fedavg(ascent={"SAM": {"rho": 0.1}}), ("model.ascent = {SAM: ...}: give {class_path: SAM, init_args: ...}",)),
        (fedavg(ascent="none"), ("model.ascent = none: no such class; null stands for none",)),
        (fedavg(ascent=True), ("model.ascent = True: no Ascent; give its class by name or dotted path",)),
        (
            fedavg(optimizer={"class_path": "SGD", "lr": 0.1}),
            ("model.optimizer.lr = 0.1: the settings of a class stand",),
        ),
        (fedavg(optimizer={"schedule": "cosine"}), ("model.optimizer.schedule = cosine", "did you mean Cosine?")),
        (
            fedavg(loss="broken_module.Loss"),
            ("model.loss = broken_module.Loss: ", "broken_module.py, line 2: KeyError: 'x'; mend"),
        ),
        (
            fedavg(loss="torch.nn.functional.relu"),
            ("model.loss = torch.nn.functional.relu: no Module; a loss of torch.nn",),
        ),
        ({"data": {"num_clients": 3}}, ("data = {'num_clients': 3}: class_path is missing",)),
        ({"trainer": [{"max_rounds": 3}]}, ("trainer: no mapping of settings; give one",)),
        ({"trainer": {"callbacks": made("Curves")}}, ("trainer.callbacks = ", "expected a list; give [")),
        (
            {"trainer": {"faults": {"drop": 0.3}}},
            ("trainer.faults.drop = 0.3", "did you mean trainer.faults.drop_after or "),
        ),
        ({3: 4}, ("config = ", "config.yaml: 3 = 4: no name of a setting; give its name")),
        ({"trainer": {3: 4}}, ("config.yaml: 3 = 4: no name of a setting; give its name",)),
        ({"model": {"class_path": "FedAvg", "init_args": {3: 4}}}, ("config.yaml: 3 = 4: no name of a setting",)),
        ({"models": "FedAvg"}, ("models: no such setting (did you mean model?)",)),
        ({"method": "grid"}, ("method: a sweep's file is no config; give it to `fl-lightning sweep`",)),
        ({"data": made("Digits", batchsize=3)}, ("data.batchsize = 3", "did you mean data.batch_size")),
        ({"trainer": {"max_round": 3}}, ("trainer.max_round", "did you mean trainer.max_rounds?")),
        ({"trainer": {"callbacks": [made("Trajectry")]}}, ("callbacks = Trajectry", "did you mean Trajectory")),
        (
            {"trainer": {"callbacks": [made("Checkpoints", every_n_rounds=0)]}},
            ("Checkpoints.every_n_rounds = 0", "at least 1"),
        ),
        (
            {"trainer": {"loggers": [made("WandbLogger", mode="onlin")]}},
            ("trainer.loggers.mode = onlin", "choose from offline, online, disabled"),
        ),
        ({"training": {"max_rounds": 3}}, ("training", "no such setting", "model, data and trainer")),
    ],
)
def test_config_file(
    complaint: Complaint,
    tmp_path: Path,
    config: dict[str, Any],
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full_config = {**fedavg(), "data": "Digits", **config}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("# raises\n{}['x']\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(full_config))
    shows(complaint("fit", f"--config={tmp_path / 'config.yaml'}"), *parts)


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_logger_whose_package_is_missing(complaint: Complaint) -> None:
    name = "lightning.pytorch.loggers.MLFlowLogger"
    message = complaint("fit", "--model=FedAvg", *DIGITS, f"--trainer.loggers+={name}")
    shows(message, f"class_path = {name}: ", "'mlflow", "not met", "pip install")


def test_divergence_keeps_the_last_good_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explode = ["--model.optimizer.lr_decay=1e9", "--trainer.max_rounds=9"]
    with pytest.raises(SystemExit) as exit:
        run("fit", *explode, root=tmp_path)
    assert exit.value.code == 3
    message = capsys.readouterr().err
    shows(message, "error: round ", "lower model.optimizer.lr")
    assert len(message.splitlines()) == 1
    diverged = int(message.split("round ")[1].split(":")[0])
    assert diverged > 1
    checkpoint = last(newest(tmp_path))
    assert checkpoint["round"] == diverged - 1
    assert all(bool(value.isfinite().all()) for value in checkpoint["state_dict"].values())
    capsys.readouterr()
    run("test", "--ckpt_path=last", root=tmp_path)
    assert "server/test/acc" in capsys.readouterr().out
    run("fit", "--model.optimizer.lr=1e-9", f"--trainer.max_rounds={diverged}", "--ckpt_path=last", root=tmp_path)
    assert last(newest(tmp_path))["round"] == diverged


@pytest.mark.slow
def test_as_people_see_it(tmp_path: Path) -> None:
    """A real process writes one line to stderr and nothing else, exits with 1, and leaves an empty folder."""
    args = ["fit", "--model=FedAvg", *DIGITS, "--data.partition=Dirichlet", "--data.partition.alpha=-1"]
    with process(sys.executable, "-m", "fl_lightning", *args, cwd=tmp_path) as child:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 1
    assert out == ""
    assert len(err.splitlines()) == 1
    shows(err, "error: ", "alpha", "-1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "key"),
    [
        *[(lambda a=a: getattr(fl_lightning, a)(DigitsMLP(), rho=-1), "rho = -1") for a in (
            "FedSAM", "FedASAM", "FedGAMMA", "MoFedSAM", "FedSMOO", "FedSpeed", "FedGF", "FedGloSS", "NaiveFedGloSS",
            "FedLESAM", "FedLESAMD", "FedLESAMS", "STildeAM",
        )],
        (lambda: fl_lightning.FedGMT(DigitsMLP(), tau=0), "model.tau = 0"),
        (lambda: fl_lightning.FedGMTv2(DigitsMLP(), ema_alpha=2), "model.ema_alpha = 2"),
        (lambda: fl_lightning.FedNTD(DigitsMLP(), gamma=-1), "model.gamma = -1"),
        (lambda: fl_lightning.FedCM(DigitsMLP(), alpha=0), "model.alpha = 0"),
        (lambda: fl_lightning.FedProx(DigitsMLP(), mu=-1), "model.mu = -1"),
        (lambda: fl_lightning.AdaBest(DigitsMLP(), beta=1), "model.beta = 1"),
        (lambda: fl_lightning.FedGF(DigitsMLP(), W=0), "model.W = 0"),
        (lambda: fl_lightning.ServerAdam(beta2=1.5), "model.server_update.beta2 = 1.5"),
        (lambda: fl_lightning.ServerMomentum(lr=0), "model.server_update.lr = 0"),
        (lambda: fl_lightning.SWA(start=1.5), "model.averaging.start = 1.5"),
        (lambda: fl_lightning.EMA(alpha=1), "model.averaging.alpha = 1"),
        (lambda: fl_lightning.SAM(warmup=-1), "model.ascent.warmup = -1"),
        (lambda: fl_lightning.LambdaMax(samples=0), "LambdaMax.samples = 0"),
        (lambda: fl_lightning.FederatedTrainer(precision="64"), "trainer.precision = 64"),
        (lambda: fl_lightning.FederatedTrainer(name="../x"), "trainer.name = ../x"),
        (lambda: fl_lightning.BernoulliSampler(1e-9).check(1, 10), "trainer.sampler.p = 1e-09"),
    ],
)  # fmt: skip
def test_settings_out_of_range(make: Any, key: str) -> None:
    with pytest.raises(fl_lightning.UserError, match=re.escape(key)):
        make()
