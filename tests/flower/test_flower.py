"""Flower itself: its messages and contexts in one process, and a superlink with two supernodes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.flower.nodes import build, trained
from tests.runs import assert_same, cli, last, newest, state

flwr = pytest.importorskip("flwr.app", reason="needs the extra flower, in an environment of its own")
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fl_lightning.flower import app  # noqa: E402

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1  # as the process of a ServerApp has them


class OneProcess(Grid):
    """A grid whose nodes are calls of the ClientApp."""

    set_run = create_message = push_messages = pull_messages = None
    run = None

    def __init__(self, client: Any, configs: list[dict[str, Any]]) -> None:
        self.client = client
        self.contexts = {id: flwr.Context(1, id, config, flwr.RecordDict(), {}) for id, config in enumerate(configs, 7)}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Iterable[Any]:
        return [self.client(message, self.contexts[message.metadata.dst_node_id]) for message in messages]


def fit(grid: OneProcess, root: Path, *args: str, nodes: int = 2, ckpt_path: str = "") -> None:
    config = {"nodes": nodes, "ckpt-path": ckpt_path, "wait": 1}
    app.server_app(partial(build, root, *args))(grid, flwr.Context(1, 0, {}, flwr.RecordDict(), config))


@pytest.mark.parametrize(
    "args",
    [
        ["--model=FedSMOO"],
        ["--model=SCAFFOLD"],
        ["--model=FedDyn"],
        ["--model=MOON"],
        ["--model=FedGAMMA"],
        ["--model=NaiveFedGloSS"],
    ],
    ids=lambda args: args[0],
)
@pytest.mark.parametrize("stored", [False, True], ids=["in the context", "in files"])
def test_apps_give_the_bits_of_the_trainer(args: list[str], stored: bool, tmp_path: Path) -> None:
    """The second node has connected first; the server starts again, with files after another run of the same name."""
    client = app.client_app(partial(build, tmp_path / "unused", *args))
    folder = {"state-folder": str(tmp_path / "states")} if stored else {}
    grid = OneProcess(client, [{"partition-id": 1, **folder}, {"partition-id": 0, **folder}])
    fit(grid, tmp_path, *args, "--trainer.max_rounds=2")
    run = newest(tmp_path)
    if stored:
        fit(grid, tmp_path / "other", *args, "--model.optimizer.lr=0.01")
    fit(grid, tmp_path, *args, "--trainer.max_rounds=4", ckpt_path="last")
    trained(tmp_path / "trainer", *args, "--trainer.max_rounds=4")
    assert_same(
        last(run)["server"],
        last(newest(tmp_path / "trainer"))["server"],
    )
    assert all(bool(context.state) != stored for context in grid.contexts.values())


def test_errors_are_lines(tmp_path: Path) -> None:
    """Of a node, and of a node that does not connect."""
    from fl_lightning import UserError

    client = app.client_app(partial(build, tmp_path / "unused", "--model=FedSMOO"))
    grid = OneProcess(client, [{"partition-id": 0}])
    with pytest.raises(UserError, match=r"^nodes 1: not connected after 1 s; "):
        fit(grid, tmp_path, "--model=FedSMOO")
    with pytest.raises(UserError, match=r"^node 0: makes another model"):
        fit(grid, tmp_path, "--model=FedSMOO", "--trainer.seed=1", nodes=1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    """Returns when something listens there."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


@contextmanager
def running(*command: str, log: Path, env: dict[str, str]) -> Iterator[int]:
    """A process of Flower's; it and its children end with the block."""
    with log.open("w") as file:
        child = subprocess.Popen(command, cwd=log.parent, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            yield child.pid
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.mark.slow
def test_superlink_and_supernodes_give_the_bits_of_the_trainer(tmp_path: Path) -> None:
    """FedSMOO on the digits over loopback.

    A second app continues the first one's run from its checkpoint, after a node was killed and started again.
    """
    args = ["--model=FedSMOO", "--model.net=DigitsMLP", "--model.net.hidden=8", "--data=Digits", "--data.num_clients=4"]
    args += ["--trainer.clients_per_round=4", "--trainer.accelerator=cpu", "--trainer.threads=1"]
    args += ["--trainer.enable_progress_bar=false", "--trainer.engine=sequential"]
    rounds = "--trainer.max_rounds={}".format
    bin, home, port = Path(sys.executable).parent, tmp_path / "home", free_port()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    with ExitStack() as stack:
        start = partial(running, env=env)
        link = [str(bin / "flower-superlink"), "--insecure", "--port", str(port)]
        link.append("--disable-runtime-dependency-installation")
        stack.enter_context(start(*link, log=tmp_path / "link.log"))
        wait_for(port)

        def node(p: int) -> int:
            config = f'partition-id={p} state-folder="{tmp_path}/state{p}"'
            command = [str(bin / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
            command += ["--port", str(free_port()), "--node-config", config]
            return stack.enter_context(start(*command, log=tmp_path / f"node{p}.log"))

        nodes = [node(p) for p in range(2)]
        for number in (1, 2):
            if number == 2:
                os.killpg(nodes[1], signal.SIGKILL)
                node(1)
            folder = str(tmp_path / f"app{number}")
            cli("flower", folder, "--nodes=2", *args, rounds(number), f"--trainer.default_root_dir={tmp_path}/runs")
            resume = [] if number == 1 else ["--run-config", 'ckpt-path="last"']
            said = subprocess.run(
                [bin / "flwr", "run", folder, "--stream", *resume],
                cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600,
            )  # fmt: skip
            logs = "".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
            done = [last(newest(tmp_path / "runs"))["round"]] if (tmp_path / "runs").exists() else []
            assert done == [number], said.stdout + said.stderr + logs
    cli("fit", *args, rounds(2), f"--trainer.default_root_dir={tmp_path}/trainer")
    found, expected = state(newest(tmp_path / "runs")), state(newest(tmp_path / "trainer"))
    assert_same(*({k: v for k, v in each.items() if not k.startswith("client.")} for each in (found, expected)))
    states = [file.name for file in tmp_path.glob("state*/*/*.state")]
    assert {re.match(r"\d+", name)[0] for name in states} == {"0", "1", "2", "3"}
