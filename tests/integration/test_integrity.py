"""What lies on disk is checked, and nothing prevents saving."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fl_lightning import Arrays, Callback, FromFile, UserError
from fl_lightning.core import files
from fl_lightning.results.compare import compare
from fl_lightning.results.configs import config_files
from fl_lightning.trainer.callbacks.defaults import Progress
from fl_lightning.trainer.loggers.base import CSVLogger
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage import checkpoint
from fl_lightning.trainer.storage.client_store import ClientStore
from tests.runs import DIGITS, FORKS, SCRIPT, assert_same, cli, forked, kill, last, metrics, newest, process, run, state

ROUNDS = 6
ON_DISK = ["--trainer.client_memory=0"]
SAVES = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=2"]
KEEPS = [*SAVES, "--trainer.callbacks.keep_all=true"]
MORE = "--trainer.max_rounds=8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run with all of its clients' rows in the file, and some of them pinned."""
    root = tmp_path_factory.mktemp("made")
    return run("fit", f"--trainer.max_rounds={ROUNDS}", *ON_DISK, *KEEPS, root=root, model="SCAFFOLD")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Returns a copy of that run."""
    return Path(shutil.copytree(made, tmp_path / made.parent.name / made.name))


def complaint(folder: Path, *options: str, command: str = "fit") -> str:
    """Returns the one line that refuses to continue a run, in whose folder nothing changes."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as exit:
        resume(folder, *options, command=command)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    line = str(exit.value.code)
    assert line.startswith("error: ") and len(line.splitlines()) == 1
    return line


def resume(folder: Path, *options: str, command: str = "fit") -> Path:
    ckpt = folder / "checkpoints" / "last.ckpt"
    args = [*DIGITS, *ON_DISK, f"--trainer.default_root_dir={folder.parents[1]}", MORE, f"--ckpt_path={ckpt}", *options]
    cli(command, "--model=SCAFFOLD", *args)
    return folder


# Checksums


def read_rows(folder: Path, content: dict[str, Any]) -> None:
    store = ClientStore({"c": "zeros"}, content["w0"], 0)
    try:
        store.load_state_dict(content, folder / "clients")
    finally:
        store.close()


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", "clients/rows.bin", "clients/rows.pins"])
def test_every_flipped_bit_is_found(name: str, flips: int, folder: Path) -> None:
    """It may be in any byte; of rows.bin in those rows that the checkpoint refers to."""
    path, draw, content = folder / name, random.Random(3), last(folder)["clients"]
    original, size, positions = path.read_bytes(), content["file"]["row_bytes"], content["file"]["positions"].tolist()
    rows = [position * size + k for position in positions for k in range(size)]
    places = rows if path.suffix == ".bin" else range(len(original))
    read = partial(checkpoint.load, path) if path.suffix == ".ckpt" else partial(read_rows, folder, content)
    with path.open("r+b", buffering=0) as file:
        for place in draw.choices(places, k=flips):
            os.pwrite(file.fileno(), bytes([original[place] ^ 1 << draw.randrange(8)]), place)
            with pytest.raises(UserError, match="damaged") as error:
                read()
            assert "\n" not in str(error.value)
            os.pwrite(file.fileno(), original[place : place + 1], place)
    read_rows(folder, last(folder)["clients"])
    path.write_bytes(original[: places[5]] + b"??" + original[places[5] + 2 :])
    line = complaint(folder)
    assert "damaged" in line and path.name in line


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_the_log_is_found(flips: int, folder: Path) -> None:
    path, draw, state = folder / "metrics.csv", random.Random(4), last(folder)["loggers"]["CSVLogger"]
    original = path.read_bytes()
    CSVLogger().check(folder, state, ROUNDS)
    for place in draw.choices(range(len(original)), k=flips):
        path.write_bytes(original[:place] + bytes([original[place] ^ 1 << draw.randrange(8)]) + original[place + 1 :])
        with pytest.raises(UserError, match=r"metrics.csv: .*put the run's own file back") as error:
            CSVLogger().check(folder, state, ROUNDS)
        assert "\n" not in str(error.value)
    path.write_bytes(original.replace(b"1", b"2"))
    assert "metrics.csv" in complaint(folder)


@pytest.mark.skipif(not FORKS, reason="the process that is killed has this one's patch")
def test_a_kill_between_two_checkpoints_loses_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = files.save, []

    def save(path: Path, content: Any) -> None:
        write(path, content)
        written.append(path)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    args = [*DIGITS, f"--trainer.default_root_dir={tmp_path}", f"--trainer.max_rounds={ROUNDS}"]
    with monkeypatch.context() as patch:
        patch.setattr(files, "save", save)
        with forked("fit", "--model=FedAvg", *args, *KEEPS, cwd=tmp_path) as child:
            child.communicate(timeout=600)
    ckpt = newest(tmp_path) / "checkpoints" / "last.ckpt"
    cli("fit", "--model=FedAvg", *args, f"--ckpt_path={ckpt}")
    names = {path.name for path in ckpt.parent.glob("round_*.ckpt")}
    assert names == {"round_2.ckpt", "round_4.ckpt", "round_6.ckpt"}


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = last(folder)
    edit(content)
    files.save(folder / "checkpoints" / "last.ckpt", content)


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize(
    ("key", "edit"),
    [
        ("identity", lambda c: c.update(identity=[1])),
        *(("round", lambda c, n=n: c.update(round=n)) for n in (-5, "x", 3.7, True)),
        *((name, lambda c, name=name: c.pop(name)) for name in checkpoint.FORM),
        ("failures", lambda c: c.update(failures={"refused": {0: "x"}})),
        ("norms", lambda c: c.update(norms=[1])),
        ("engine", lambda c: c.update(engine="nonsense")),
        ("callbacks", lambda c: c.update(callbacks=3)),
        ("Checkpoints", lambda c: c["callbacks"].update(Checkpoints={"best": 3})),
        ("clients", lambda c: c["clients"].pop("rows")),
        ("clients", lambda c: c["clients"].pop("w0")),
        ("clients.w0", lambda c: c["clients"].update(w0=torch.zeros(3))),
        ("clients", lambda c: c["clients"]["file"]["ids"].fill_(1)),
        ("clients.ids", lambda c: c["clients"]["file"]["ids"].add_(112)),
        ("server", lambda c: c["server"].update(w=torch.zeros(3))),
    ],
)
def test_structural_damage_is_one_line(key: str, edit: Callable[[Any], Any], folder: Path) -> None:
    change(folder, edit)
    line = complaint(folder)
    assert key in line and "take a" in line


def test_weights_of_a_damaged_checkpoint(folder: Path) -> None:
    path = folder / "checkpoints" / "last.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "model.init_weights" in complaint(folder, f"--model.init_weights={path}")


def test_a_link_in_place_of_a_temporary_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (folder / "checkpoints" / "last.tmp").symlink_to(tmp_path / "victim")
    resume(folder)
    assert (tmp_path / "victim").read_text() == "mine" and last(folder)["round"] == 8


def test_names_make_no_objects(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    names = [f"a{i}.png".encode() for i in range(4)]
    content = {b"filenames": names, b"data": np.zeros((4, 3), np.uint8), b"more": Evil()}
    (tmp_path / "train").write_bytes(pickle.dumps(content))
    split = {"users": ["0"], "user_data": {"0": {"x": ["a1.png", "a0.png", "a3.png", "a2.png"], "y": [0, 0, 1, 1]}}}
    (tmp_path / "split.json").write_text(str(split).replace("'", '"'))
    partition = FromFile(str(tmp_path / "split.json"), str(tmp_path / "train"))
    (part,) = partition.split(np.array([0, 0, 1, 1]), 1, 2, 0)
    assert part.tolist() == [1, 0, 3, 2]
    assert not (tmp_path / "made").exists()


def test_fingerprint_has_the_pixels() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(30, 2, 2)).astype(np.float32), np.arange(30) % 3
    changed = x.copy()
    changed[17, 1, 1] += 1e-3

    def fingerprint(x: Any, test: Any) -> str:
        data = Arrays(client_arrays=[(x[i::3], y[i::3]) for i in range(3)], test=(test, y[:9]))
        data.setup("fit")
        return data.fingerprint()

    assert len({fingerprint(x, x[:9]), fingerprint(changed, x[:9]), fingerprint(x, changed[9:18])}) == 3
    assert fingerprint(x, x[:9]) == fingerprint(x.copy(), x[:9])


# Config and log


@pytest.mark.slow
def test_configs_of_a_resumed_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "config.yaml").read_bytes()
    changed = ["--model.optimizer=SGD", "--model.optimizer.lr=0.02", "--data.batch_size=16"]
    resume(folder, *changed)
    output = capsys.readouterr().out
    for line in ("data.batch_size: 32 -> 16", "model.optimizer.lr: not set -> 0.02", "trainer.max_rounds: 6 -> 8"):
        assert line in output
    assert (folder / "config.yaml").read_bytes() == first
    second = folder / "config_round_6.yaml"
    assert config_files(folder) == {0: folder / "config.yaml", 6: second}
    assert yaml.safe_load(second.read_text())["data"]["init_args"]["batch_size"] == 16
    cli("test", "--ckpt_path", str(folder / "checkpoints" / "last.ckpt"))  # takes the second one
    # the same config once more changes nothing; another run of the first config is of another group
    resume(folder, *changed)
    assert len(config_files(folder)) == 2 and "settings changed" not in capsys.readouterr().out
    uninterrupted = run("fit", MORE, *ON_DISK, *changed, *KEEPS, root=folder.parents[1], model="SCAFFOLD")
    assert [len(group.runs) for group in compare([folder, uninterrupted])] == [1, 1]
    # from an older checkpoint, the rounds of the later config are trained once more
    (folder / "checkpoints" / "last.ckpt").write_bytes((folder / "checkpoints" / "round_4.ckpt").read_bytes())
    resume(folder)
    assert list(config_files(folder)) == [0, 4]


@pytest.mark.slow
def test_a_longer_run_is_of_the_group_of_long_runs(folder: Path) -> None:
    resume(folder)
    uninterrupted = run("fit", MORE, *ON_DISK, *KEEPS, "--trainer.seed=1", root=folder.parents[1], model="SCAFFOLD")
    assert [len(group.runs) for group in compare([folder, uninterrupted])] == [2]


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    "harm",
    [
        lambda lines: [],
        lambda lines: lines[:3] + lines[5:],
        lambda lines: lines[:4],
        lambda lines: lines[:4] + lines[3:],
        lambda lines: [*lines[:2], "\0\1garbage", *lines[3:]],
        lambda lines: [*lines[:2], lines[2].replace("2,", "2,x", 1), *lines[3:]],
        lambda lines: [line.partition(",")[2] for line in lines],
        lambda lines: [line.rpartition(",")[0] for line in lines],
        lambda lines: [f"{line},{line.rpartition(',')[2]}" for line in lines],
    ],
)
def test_a_damaged_log_is_refused(harm: Any, folder: Path) -> None:
    log = folder / "metrics.csv"
    log.write_text("".join(f"{line}\n" for line in harm(log.read_text().splitlines())))
    line = complaint(folder)
    assert "its rows of 6 rounds are not those that the run has written" in line
    assert "put the run's own file back" in line


def test_a_log_that_is_missing_is_refused(folder: Path) -> None:
    (folder / "metrics.csv").unlink()
    assert "cannot be read" in complaint(folder)


def test_a_log_without_its_rows(folder: Path) -> None:
    (folder / "metrics.csv").write_text("round\n")
    resume(folder)
    assert [at for at, _ in metrics(folder)["comm/total_bits"]] == [7, 8]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 9
    resume(folder, "--trainer.max_rounds=9")


# One run at a time


def test_a_second_run_in_a_folder_is_refused(folder: Path) -> None:
    args = [*DIGITS, *ON_DISK, f"--trainer.default_root_dir={folder.parents[1]}", "--trainer.max_rounds=100000"]
    ckpt = folder / "checkpoints" / "last.ckpt"
    with forked("fit", "--model=SCAFFOLD", *args, f"--ckpt_path={ckpt}", cwd=folder) as child:
        wait_for(lambda: len((folder / "metrics.csv").read_text().splitlines()) > 8)
        with pytest.raises(SystemExit, match=rf"error: .*version_0: used by another run \(process {child.pid}\); wait"):
            resume(folder, "--trainer.max_rounds=100000")
        kill(child)
    resume(folder, f"--trainer.max_rounds={last(folder)['round'] + 1}")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# Saving


class Act(Callback):
    """Does something when that many rounds are done and one client has trained."""

    def __init__(self, at: int, act: Callable[[Run], None]) -> None:
        self.at, self.act, self.done = at, act, False

    def on_local_end(self, run: Run, result: Any) -> None:
        if run.rounds_done == self.at and not self.done:
            self.done = True
            self.act(run)


def train(root: Path, *callbacks: Callback, **options: Any) -> Path:
    from fl_lightning import SCAFFOLD, Checkpoints, Digits, DigitsMLP, FederatedTrainer

    torch.manual_seed(3)
    trainer = FederatedTrainer(
        **{"max_rounds": ROUNDS, "clients_per_round": 3, "client_memory": 0, "engine": "sequential"} | options,
        accelerator="cpu", threads=1, callbacks=[*callbacks, Checkpoints(2)], default_root_dir=str(root),
        enable_progress_bar=False,
    )  # fmt: skip
    net, data = DigitsMLP(hidden=8), Digits(num_clients=6, batch_size=32)
    ckpt = options and newest_checkpoint(root)
    return trainer.fit(SCAFFOLD(net), data, ckpt or None).folder.path


def newest_checkpoint(root: Path) -> str | None:
    path = next(root.glob("*/*/checkpoints/last.ckpt"), None)
    return str(path) if path else None


@contextmanager
def file_size(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most", [2_500, *(pytest.param(most, marks=pytest.mark.slow) for most in (0, 9_000, 14_000))])
def test_full_disk(most: int, tmp_path: Path) -> None:
    """Wherever it hits, there is one line, the last checkpoint stays, and the run goes on from there."""

    def fill(run: Run) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with file_size(resource.RLIM_INFINITY), pytest.raises(UserError, match="cannot be written") as error:
        train(tmp_path, Act(3, fill))
    assert "\n" not in str(error.value)
    assert last(newest(tmp_path))["round"] == 2
    assert not list(tmp_path.rglob("*.tmp"))
    train(tmp_path, client_memory=0)
    assert_same(state(newest(tmp_path)), state(train(tmp_path / "whole")))


def test_full_disk_at_the_start(tmp_path: Path) -> None:
    with file_size(0), pytest.raises(SystemExit, match=r"error: .*cannot be written"):
        run("fit", root=tmp_path / "runs")
    assert not list(tmp_path.rglob("version_*"))


def test_rows_that_are_removed_meanwhile(tmp_path: Path) -> None:
    """They are written again with the next checkpoint, from the file that is still open."""
    folder = train(tmp_path, Act(3, lambda run: (run.folder.clients / "rows.bin").unlink()), max_rounds=4)
    train(tmp_path, max_rounds=ROUNDS)
    assert_same(state(folder), state(train(tmp_path / "whole")))


def test_a_run_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        train(tmp_path, Act(3, lambda run: shutil.rmtree(run.folder.path)))
    assert not list(tmp_path.rglob("version_*"))


def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """The disk behind stdout is full, or its pipe is closed meanwhile."""
    expected = state(train(tmp_path / "whole"))
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert_same(state(train(tmp_path / "full", Progress(min_seconds=0))), expected)
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as pipe, redirect_stdout(pipe):
        closing = Act(2, lambda run: os.close(read))
        assert_same(state(train(tmp_path / "pipe", closing, Progress(min_seconds=0))), expected)


def test_an_error_in_on_exception_prevents_no_saving(tmp_path: Path) -> None:
    class Bad(Callback):
        def on_exception(self, run: Run, error: BaseException) -> None:
            raise KeyError("second")

    def fail(run: Run) -> None:
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first") as error:
        train(tmp_path, Bad(), Act(3, fail), Bad())
    assert error.value.__notes__ == ["KeyError: 'second'"] * 2  # type: ignore[attr-defined]
    assert last(newest(tmp_path))["round"] == 3


# Signals


def test_a_signal_does_not_disturb_the_saving_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends it to the processes that have lost another one."""
    write = files.save

    def save(path: Path, content: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(path, content)

    def fail(run: Run) -> None:
        monkeypatch.setattr(files, "save", save)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        train(tmp_path, Act(3, fail))
    assert not hasattr(error.value, "__notes__") and last(newest(tmp_path))["round"] == 3


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("gap", [0, pytest.param(0.01, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_save(number: signal.Signals, gap: float, tmp_path: Path) -> None:
    """The first of them does; the second and third change nothing."""
    args = ["--model=SCAFFOLD", *DIGITS, "--trainer.max_rounds=100000", f"--trainer.default_root_dir={tmp_path}"]
    never = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=100000"]
    with forked("fit", *args, *never, cwd=tmp_path) as child:
        wait_for(lambda: any(len(p.read_text().splitlines()) > 4 for p in tmp_path.glob("*/*/metrics.csv")))
        for _ in range(3):
            os.kill(child.pid, number)
            time.sleep(gap)
        out, err = child.communicate(timeout=600)
    assert (child.returncode, err) == (128 + number, "")
    assert out.startswith("to continue: fl-lightning fit --config ") and len(out.splitlines()) == 1
    rows = len((newest(tmp_path) / "metrics.csv").read_text().splitlines()) - 1
    assert 3 <= last(newest(tmp_path))["round"] <= rows  # a signal takes back a round that has just been logged


@pytest.mark.long
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    args = ["--model=FedAvg", *DIGITS, "--trainer.max_rounds=500", f"--trainer.default_root_dir={tmp_path}"]
    with process("nohup", SCRIPT, "fit", *args, cwd=tmp_path) as child:
        wait_for(lambda: any(len(p.read_text().splitlines()) > 4 for p in tmp_path.glob("*/*/metrics.csv")))
        os.kill(child.pid, signal.SIGHUP)
        child.communicate(timeout=600)
    assert child.returncode == 0 and last(newest(tmp_path))["round"] == 500


@pytest.mark.long
@pytest.mark.parametrize("end", ["| head -1", "> /dev/full", ">&-"])
def test_real_pipes(end: str, tmp_path: Path) -> None:
    args = " ".join([*DIGITS, "--trainer.enable_progress_bar=true", "--trainer.max_rounds=30"])
    command = f"set -o pipefail; {sys.executable} -m fl_lightning fit --model FedAvg {args} {end}"
    with process("bash", "-c", command, cwd=tmp_path) as child:
        _, err = child.communicate(timeout=600)
    assert (child.returncode, err) == (0, "")
    assert last(newest(tmp_path / "runs"))["round"] == 30


@pytest.mark.parametrize(("end", "code"), [("| head -1", 1), (">&-", 0)])
def test_tables_into_pipes(end: str, code: int, tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m fl_lightning list {end}"
    with process("bash", "-c", command, cwd=tmp_path) as child:
        _, err = child.communicate(timeout=600)
    assert (child.returncode, err) == (code, "")


@pytest.mark.slow
def test_wandb_without_a_key_leaves_nothing(tmp_path: Path) -> None:
    env = {"WANDB_MODE": "online", "HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": ""}
    wandb = ["--trainer.loggers+=WandbLogger", f"--trainer.default_root_dir={tmp_path / 'runs'}"]
    with forked("fit", "--model=FedAvg", *DIGITS, *wandb, cwd=tmp_path, env=env) as child:
        _, err = child.communicate(timeout=600)
    assert child.returncode == 1 and "WandbLogger.mode = online" in err.splitlines()[-1]
    assert not list((tmp_path / "runs").rglob("*"))
