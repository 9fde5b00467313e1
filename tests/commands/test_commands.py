"""Subcommands as files, runs that `last` means, configs in other folders, and nets that leave a run."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fl_lightning
from fl_lightning import DigitsMLP, UserError
from fl_lightning.commands import COMMANDS, PLACES, function_of
from fl_lightning.commands.shared.cli import FederatedCLI
from tests.runs import DIGITS, assert_same, cli, forked, last, metrics, newest, run

IMPORTED = """
import json, sys
sys.argv = json.loads(sys.argv[1])
from fl_lightning.commands.main import main
try:
    main()
except SystemExit as end:
    print(end.code, file=sys.stderr)
print(json.dumps([name for name in ("torch", "lightning", "jsonargparse") if name in sys.modules]))
"""


def imported(*args: str, cwd: Path) -> list[str]:
    command = [sys.executable, "-c", IMPORTED, json.dumps(["fl-lightning", *args])]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout
    return list(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize("args", ["--help", "--version", "fitt", "--trainer.seed=1", "", "fit --help"])
def test_nothing_heavy_is_imported(args: str, tmp_path: Path) -> None:
    assert imported(*args.split(), cwd=tmp_path) == []


LIGHT = [
    "list",
    "configs",
    "init folder",
    "compare ROW",
    "compare nothing",
    pytest.param("report ROW", marks=pytest.mark.slow),  # it draws all of its figures
    "study page ROW",
    "fit --model FedSAN",
    "fit --config quickstat",
    "fit --config quickstart --trainer.max_round 3",
    "fit --config quickstart --model.roh 3",
    "plan --config quickstart --model.ascent SAMM",
]


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("args", LIGHT)
def test_neither_torch_nor_lightning_is_imported(args: str, tmp_path: Path) -> None:
    row = Path(fl_lightning.__file__).parents[1] / "ledger/digits/alpha_100/FedGMT/seed_0"
    assert imported(*args.replace("ROW", str(row)).split(), cwd=tmp_path) == ["jsonargparse"]


def test_a_function_is_a_subcommand() -> None:
    folder = Path(fl_lightning.__file__).parent / "commands"
    modules = {path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text()}
    assert set(COMMANDS) == modules | {*PLACES} and all(callable(function_of(name)) for name in COMMANDS)
    assert {"fit", "centralized", "validate", "test", "plan", "data", "compare", "list", "export"} <= set(COMMANDS)


def import_without_resource() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fl_lightning"]:
        del sys.modules[name]
    sys.modules["resource"] = None  # type: ignore[assignment]
    for name in COMMANDS:
        importlib.import_module("fl_lightning.commands").function_of(name)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("fl-lightning re", ["report", "reproduce"]),
        ("fl-lightning report --tar", ["--target"]),
        ("fl-lightning fit --trainer.max_r", ["--trainer.max_rounds"]),
        ("fl-lightning fit --config quicks", ["quickstart"]),
        ("fl-lightning fit --model FedGlo", ["FedGloSS"]),
        ("fl-lightning fit --model=FedGlo", ["--model=FedGloSS"]),
        ("fl-lightning fit --model FedSAM --model.rh", ["--model.rho"]),
        ("fl-lightning fit --config quickstart --model.optimizer.lr_", ["--model.optimizer.lr_decay"]),
        ("fl-lightning fit --model.ascent ", ["ASAM", "LESAM", "SAM"]),
        ("fl-lightning fit --model.net DigitsM", ["DigitsMLP"]),
        ("fl-lightning fit --trainer.callbacks+=Fla", ["--trainer.callbacks+=FlatnessMonitor"]),
        ("fl-lightning fit --trainer.precision b", ["bf16-mixed"]),
        ("fl-lightning compare fl_light", ["fl_lightnings/"]),
    ],
)
def test_completion(line: str, offers: list[str], tmp_path: Path) -> None:
    """Bash puts the line into the environment, and reads file 8; neither torch nor Lightning is there."""
    for name in ("torch", "lightning"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    (tmp_path / "fl_lightnings").mkdir()
    completion = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " "}
    shell = 'exec 9>/dev/null; "$0" -m fl_lightning 8>&1 >/dev/null'
    command = ["bash", "-c", shell, sys.executable]
    completed = subprocess.run(command, env=os.environ | completion, capture_output=True, text=True, cwd=tmp_path)
    assert completed.stdout.split() == offers


def test_a_python_without_the_packages_is_told_so(tmp_path: Path) -> None:
    """It runs without site-packages, as the Python of a system has none of them."""
    program = Path(fl_lightning.__file__).parents[1] / "cli.py"
    command = [sys.executable, "-S", "-E", program, "fit", "--config=quickstart"]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert completed.returncode == 1
    assert re.fullmatch(r"error: \w+ is not installed for \S+; see Install in README.md\n", completed.stderr)


def test_no_module_of_one_system_alone() -> None:
    """Windows has no ``resource``."""
    child = multiprocessing.get_context("fork").Process(target=import_without_resource)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_help_of_a_class_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("fit", "--model.help=FedGloSS")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 140 and "torch.nn." not in shown
    assert "DigitsMLP" in shown and "or a dotted path" in " ".join(shown.split()) and "--model.sigma_ref" in shown


def test_help_lists_the_classes_of_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of ascent, averaging and server update are parts, too, but not in the list of further parts."""
    with pytest.raises(SystemExit):
        cli("fit", "--model.help=FedAvg")
    shown = " ".join(capsys.readouterr().out.split())
    expected = {
        "ascent": {"SAM", "ASAM", "LESAM"},
        "parts": {"Compress", "FlexLoRA", "MAN", "Personal", "Ditto"},
    }
    for name, classes in expected.items():  # in the order in which their modules were imported
        rest = re.split(rf"--model\.{name}\+? {name.upper()}", shown)[-1]  # Python 3.13 names a list's once
        listed = rest.partition("classes: ")[2].partition(")")[0]
        assert classes == {*listed.split(", ")} - {"or a dotted path"}


# A config in another folder than the module that it names

MODULE = """
from fl_lightning import Callback, FedAvg


class Mine(FedAvg):
    pass


class Noted(Callback):
    def on_fit_end(self, run):
        print("noted")
"""


def test_a_run_with_a_class_of_ones_own_resumes_from_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(MODULE)
    args = [*DIGITS, "--trainer.callbacks+=my_methods.Noted", "--trainer.default_root_dir=runs/deep"]

    def command(*command: str) -> str:
        with forked(*command, cwd=tmp_path) as child:
            out, err = child.communicate(timeout=600)
        assert child.returncode == 0, err
        return out

    assert "noted" in command("fit", "--model=my_methods.Mine", *args)
    config = "--config=runs/deep/Mine-Digits/version_0/config.yaml"
    assert "noted" in command("fit", config, "--trainer.max_rounds=3", "--ckpt_path=last")
    assert last(tmp_path / "runs/deep/Mine-Digits/version_0")["round"] == 3
    out = command("test", config, "--ckpt_path=last")
    assert "last: runs/deep/Mine-Digits/version_0, round 3" in out and "server/test/acc" in out


# The run that is meant


@pytest.fixture
def done(tmp_path: Path) -> Path:
    return run("fit", "--model.ascent=SAM", "--model.ascent.rho=0.1", root=tmp_path)


def again(command: str, *args: str, root: Path) -> None:
    cli(command, "--model=FedAvg", "--model.ascent=SAM", "--model.ascent.rho=0.1", *DIGITS,
        f"--trainer.default_root_dir={root}", *args)  # fmt: skip


def test_last_says_what_it_takes(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    again("test", "--ckpt_path=last", root=tmp_path)
    assert capsys.readouterr().out.startswith(f"last: {done}, round 2\n")
    again("fit", "--trainer.max_rounds=3", "--ckpt_path=last", root=tmp_path)
    out = capsys.readouterr().out
    assert out.startswith(f"last: {done}, round 2; settings that differ: trainer.max_rounds = 2 (here: 3)\n")


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("command", ["fit", "test", "flatness"])
@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("--trainer.seed=1", "trainer.seed = 0 (here: 1)"),
        ("--model.ascent.rho=0.2", "model.ascent.rho = 0.1 (here: 0.2)"),
        ("--model.net.hidden=9", "model.net.hidden = 8 (here: 9)"),
    ],
)
def test_last_refuses_another_run(command: str, arg: str, says: str, done: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        again(command, arg, "--ckpt_path=last", root=tmp_path)
    path = done / "checkpoints" / "last.ckpt"
    assert exit.value.code == (
        f"error: ckpt_path = last: the newest run, {done}, has {says}; name the run that you mean: --ckpt_path {path}"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("command", ["validate", "test", "fit"])
def test_a_checkpoint_brings_its_config(
    command: str, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = metrics(done)
    path = done / "checkpoints" / "last.ckpt"
    for args in ([f"--ckpt_path={path}"], ["--ckpt_path", str(path)]):
        capsys.readouterr()
        cli(command, *args)
        if command == "test":
            assert f"server/test/acc {before['server/test/acc'][-1][1]:.4f}" in capsys.readouterr().out
    assert newest(tmp_path) == done and metrics(done) == before


def test_weights_to_start_from_bring_no_config(done: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: --model\.net: missing"):
        cli("fit", f"--model.init_weights={done / 'checkpoints' / 'last.ckpt'}")


# Nets that leave a run


def test_export(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "nets" / "net.pt"
    cli("export", str(done / "checkpoints" / "last.ckpt"), str(out))
    net = DigitsMLP(hidden=8)
    net.load_state_dict(torch.load(out))
    assert_same({f"net.{name}": value for name, value in net.state_dict().items()}, last(done)["state_dict"])
    before = torch.get_rng_state()
    assert_same(fl_lightning.load_net(done).state_dict(), net.state_dict())
    assert torch.equal(torch.get_rng_state(), before)


def test_export_replaces_nothing_but_exports(done: Path, tmp_path: Path) -> None:
    last_ckpt, script = done / "checkpoints" / "last.ckpt", tmp_path / "own.py"
    script.write_text("a day's work\n")
    torch.save({"net": {"w": torch.zeros(1)}}, tmp_path / "other.pt")
    kept = [last_ckpt, done / "metrics.csv", done / "config.yaml", script, tmp_path / "other.pt"]
    before = [path.read_bytes() for path in kept]
    lines = {**dict.fromkeys(kept, "a file that no"), done: "a folder", Path("/proc/x/net.pt"): "cannot create"}
    for out, line in lines.items():
        with pytest.raises(SystemExit, match=rf"error: out = .*: {line}"):
            cli("export", str(last_ckpt), str(out))
    assert [path.read_bytes() for path in kept] == before
    net = tmp_path / "net.pt"
    for _ in range(2):
        cli("export", str(last_ckpt), str(net))
    assert not list(tmp_path.glob("net.tmp"))


NORMED = """
from torch import nn


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
"""


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_statistics_leave_with_the_net(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "normed_net.py").write_text(NORMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    digits = [arg for arg in DIGITS if "model.net" not in arg]
    args = ["--model=FedAvg", "--model.net=normed_net.Normed", f"--model.buffers={policy}", *digits]
    cli("fit", *args, "--trainer.precision=64-true", "--trainer.default_root_dir=runs")
    folder = newest(Path("runs"))
    net = fl_lightning.load_net(folder).eval()
    data = fl_lightning.Digits(num_clients=6)
    data.setup()
    right = total = 0
    with torch.no_grad():
        for x, y in data.eval_batches("test", torch.float64):
            right, total = right + int((net(x).argmax(1) == y).sum()), total + len(y)
    assert right / total == pytest.approx(metrics(folder)["server/test/acc"][-1][1], abs=1e-7)
    assert not torch.equal(net[2].running_var, torch.ones(8, dtype=torch.float64))


def test_no_net_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; give a checkpoint"):
        fl_lightning.load_net(tmp_path)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], False),
        (["--same-directions"], True),
        (["--same_directions"], True),
        (["--same-directions=true"], True),
        (["--same_directions=true"], True),
        (["--same_directions", "true"], True),
        (["--same_directions=false"], False),
        (["--same-directions", "false"], False),
    ],
)
def test_spellings_of_a_boolean_option(args: list[str], expected: bool) -> None:
    parsed = FederatedCLI(
        "landscape", "--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits", "--ckpt_path=last", *args
    )
    assert parsed.config.same_directions is expected
