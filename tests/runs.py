"""Small runs through the command line, and what they leave behind, for the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fl_lightning.commands.main import main
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer import checkpoint

DIGITS = [
    "--model.net=DigitsMLP",
    "--model.net.hidden=8",
    "--data=Digits",
    "--data.num_clients=6",
    "--data.batch_size=32",
    "--trainer.clients_per_round=3",
    "--trainer.max_rounds=2",
    "--trainer.accelerator=cpu",
    "--trainer.threads=1",
    "--trainer.engine=sequential",
    "--trainer.enable_progress_bar=false",
]
"""Six clients with 240 digits each, three a round; 610 weights."""


def cli(*args: str) -> None:
    """The console script, in this process."""
    before, sys.argv = sys.argv, ["fl-lightning", *args]
    try:
        main()
    finally:
        sys.argv = before


def run(command: str, *args: str, root: Path, model: str = "FedAvg") -> Path:
    """``fl-lightning <command>`` on the digits in this process; the newest run folder."""
    cli(command, f"--model={model}", *DIGITS, f"--trainer.default_root_dir={root}", *args)
    return newest(root)


def newest(root: Path) -> Path:
    return max(root.glob("*/version_*"), key=lambda folder: folder.stat().st_ctime_ns)


def last(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints/last.ckpt")


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the last checkpoint of a run folder holds, by name."""
    found = last(folder)
    clients = found["clients"]
    tensors = {"ids": torch.as_tensor(clients["ids"]), "round": torch.tensor(found["round"]), **found["state_dict"]}
    tensors |= {f"server.{name}": value for name, value in found["server"].items()}
    return tensors | {f"client.{name}": value for name, value in clients["rows"].items()}


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max()}"


def metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Columns of metrics.csv that do not depend on the clock, with the rounds where they were measured."""
    columns = read_metrics(folder / "metrics.csv")
    return {name: values for name, values in columns.items() if not name.startswith("time/")}


SCRIPT = str(Path(sys.executable).with_name("fl-lightning"))
"""The console script of this environment."""


@contextmanager
def process(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, of which nothing is left afterwards."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield child
    finally:
        kill(child)
        child.communicate()


def kill(child: subprocess.Popen[str]) -> None:
    """``kill -9`` to the process and its children."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
