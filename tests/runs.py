"""Small runs through the command line: in this process, in a fork of it, in a new one; and what they leave behind."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning import DigitsMLP, algorithms
from fl_lightning.commands.main import main
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.storage import checkpoint
from fl_lightning.trainer.storage.client_store import ClientStore

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
    """Runs the console script in this process."""
    before, sys.argv = sys.argv, ["fl-lightning", *args]
    try:
        main()
    finally:
        sys.argv = before


def run(command: str, *args: str, root: Path, model: str = "FedAvg") -> Path:
    """Runs ``fl-lightning <command>`` on the digits in this process; returns the newest run folder."""
    cli(command, f"--model={model}", *DIGITS, f"--trainer.default_root_dir={root}", *args)
    return newest(root)


def newest(root: Path) -> Path:
    return max(root.glob("*/version_*"), key=lambda folder: folder.stat().st_ctime_ns)


def last(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints/last.ckpt")


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor that the last checkpoint of a run folder holds, by name."""
    content = last(folder)
    clients = content["clients"]
    tensors = {"ids": torch.as_tensor(clients["ids"]), "round": torch.tensor(content["round"]), **content["state_dict"]}
    tensors |= {f"server.{name}": value for name, value in content["server"].items()}
    return tensors | {f"client.{name}": value for name, value in clients["rows"].items()}


def rows(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Returns all clients' rows of the last checkpoint, wherever they lie, by name and client; options: the model's."""
    content = last(folder)
    clients, objective = content["clients"], getattr(algorithms, content["identity"]["model"])
    store = ClientStore(objective(DigitsMLP(hidden=8), **options).client_inits(), clients["w0"])
    store.load_state_dict(clients, folder / "clients")
    values = {f"{name}.{k}": value for k, row in store.rows().items() for name, value in row.items()}
    store.close()
    return values


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """Compares bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max()}"


def measurements(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a ``flatness.jsonl``, without one that a crash has cut short; NaN is no JSON."""
    return [
        json.loads(line, parse_constant=int)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns columns of metrics.csv that do not depend on the clock, with the rounds where they were measured."""
    columns = read_metrics(folder / "metrics.csv")
    return {name: values for name, values in columns.items() if not name.startswith("time/")}


# Processes

SCRIPT = str(Path(sys.executable).with_name("fl-lightning"))
"""The console script of this environment."""
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
"""Whether a fork can train: CUDA and autograd's threads for it do not survive one."""
PATH = list(sys.path)
"""Where Python finds modules before a test adds to it."""


class Forked:
    """``fl-lightning`` in a fork of this process: a ``subprocess.Popen`` as far as the tests use one.

    To load torch and Lightning takes many times as long as a small run. All else is as in a process of its own: id and
    process group, working folder, arguments, import path, environment, signals, output, exit code.

    Args:
        args: Arguments of ``fl-lightning``.
        cwd: Working folder.
        env: Environment variables in addition to those of this process.
    """

    def __init__(self, args: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in ("stdout", "stderr")]  # noqa: SIM115
        self._process = multiprocessing.get_context("fork").Process(target=_fork, args=(args, cwd, env, self._files))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
            self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fl-lightning", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (_text(file) for file in self._files)
        return out, err


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _fork(args: tuple[str, ...], cwd: Path, env: Mapping[str, str], files: list[IO[str]]) -> None:
    """Makes a fork a process of its own, then runs the console script."""
    os.setsid()
    gc.freeze()  # what the test left behind is not finalized here
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the tests may run under nohup
        signal.signal(number, signal.SIG_DFL)
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _report_to_stderr()
    os.chdir(cwd)
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    rank_zero_only.rank = int(os.environ.get("RANK", "0"))  # Lightning reads it when it is imported
    sys.argv, sys.path[:] = ["fl-lightning", *args], PATH
    for file in cwd.glob("*.py"):  # another test's module of the same name
        sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()
    try:
        main()
    finally:
        atexit._run_exitfuncs()


def _report_to_stderr() -> None:
    """Sends logs, warnings and errors of threads to stderr, not to pytest."""
    logging.getLogger().handlers.clear()
    for logger in map(logging.getLogger, logging.getLogger().manager.loggerDict):
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: sys.stderr.write(
        warnings.formatwarning(message, category, filename, lineno, line)
    )
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__


Child = Forked | subprocess.Popen[str]


@contextmanager
def ending(child: Child) -> Iterator[Child]:
    """Leaves nothing of the process and its group."""
    try:
        yield child
    finally:
        kill(child)
        child.communicate()


def kill(child: Child) -> None:
    """Sends ``kill -9`` to the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.poll() is None:  # a fork that has no group of its own yet
        os.kill(child.pid, signal.SIGKILL)


def process(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> AbstractContextManager[Child]:
    """Starts a command in a new process group."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipe = subprocess.PIPE
    return ending(
        subprocess.Popen(command, cwd=cwd, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    )


def forked(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> AbstractContextManager[Child]:
    """Starts ``fl-lightning`` with these arguments in a process of its own."""
    return ending(Forked(args, cwd, env or {})) if FORKS else process(SCRIPT, *args, cwd=cwd, env=env)


def killed(*args: str, root: Path) -> Path:
    """Kills an ``fl-lightning`` whose runs lie below ``root`` after nine rounds or more; returns its run folder."""
    with forked(*args, f"--trainer.default_root_dir={root}", cwd=root.parent) as child:
        deadline, logs = time.monotonic() + 600, list[Path]()
        while not logs or len(logs[0].read_text().splitlines()) < 10:  # the header and 9 rounds
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
            logs = list(root.glob("*/*/metrics.csv"))
        kill(child)
        assert child.wait() == -signal.SIGKILL
    return newest(root)


@contextmanager
def group(size: int, *args: str, cwd: Path, nodes: int = 1) -> Iterator[list[Child]]:
    """Starts ``fl-lightning`` in processes that find each other as those of ``torchrun`` do.

    Args:
        size: Number of processes of a node.
        args: Arguments of each.
        cwd: Working folder.
        nodes: Number of nodes, all of which are here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "test"}
    with ExitStack() as stack:
        children = []
        for rank in range(nodes * size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank % size, "GROUP_RANK": rank // size}
            sizes = {"WORLD_SIZE": nodes * size, "LOCAL_WORLD_SIZE": size}
            env = {**address, **{name: str(value) for name, value in {**ranks, **sizes}.items()}}
            children.append(stack.enter_context(forked(*args, cwd=cwd, env=env)))
        yield children


def ended(children: list[Child], code: int = 0) -> list[tuple[str, str]]:
    """Returns what each process said until it ended, with this exit code."""
    texts = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [code] * len(children), texts
    return texts
