"""Flower itself: its messages and contexts in one process, and a superlink with two supernodes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.flower.nodes import build, trained
from tests.runs import assert_same, cli, last, metrics, newest, state

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
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id  # as Flower's own grid does
        return [reply for message in messages if (reply := self.reply(message)) is not None]

    def reply(self, message: Any) -> Any:
        return self.client(message, self.contexts[message.metadata.dst_node_id])


class Unreliable(OneProcess):
    """A grid whose node 1 fails in the third exchange: Flower says so, or nothing comes, or what comes is no upload."""

    failure = "silent"
    exchanges = 0

    def reply(self, message: Any) -> Any:
        reply, node = super().reply(message), self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        self.exchanges += message.metadata.message_type == "train" and node == 1
        if message.metadata.message_type != "train" or node != 1 or self.exchanges != 3:
            return reply
        if self.failure == "gone":  # from the superlink, as in flwr/server/superlink/linkstate/utils.py
            reply = flwr.Message(flwr.Error(5, "Error: Node Unavailable - \n it is gone"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
        elif self.failure == "garbage":
            for record in reply.content.array_records.values():
                for name in record:
                    record[name] = flwr.Array("float32", (3,), "numpy.ndarray", b"no array")
        return None if self.failure == "silent" else reply


def fit(grid: OneProcess, root: Path, *args: str, nodes: int = 2, ckpt_path: str = "", min_replies: int = 0) -> None:
    config = {"nodes": nodes, "ckpt-path": ckpt_path, "wait": 1, "min-replies": min_replies}
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


ALL = ["--model=SCAFFOLD", "--trainer.clients_per_round=6", "--trainer.max_rounds=4"]


@pytest.mark.parametrize(
    ("failure", "kind", "line"),
    [
        ("silent", "dropped", "node 1: no reply after 1 s; until"),
        ("gone", "dropped", "node 1: Error: Node Unavailable - it is gone; until"),
        ("garbage", "refused", "client 1: its reply lacks"),
    ],
)
def test_node_that_fails_costs_its_clients_a_round(
    failure: str, kind: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = app.client_app(partial(build, tmp_path / "unused", *ALL))
    grid = Unreliable(client, [{"partition-id": 0}, {"partition-id": 1}])
    grid.failure = failure
    fit(grid, tmp_path, *ALL, min_replies=2)
    assert [n for _, n in metrics(newest(tmp_path))[f"client/{kind}"]] == [0, 0, 3, 0]
    assert capsys.readouterr().out.count(line) == 1


def test_node_that_is_not_connected_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes part when it is there."""
    client = app.client_app(partial(build, tmp_path / "unused", *ALL))
    grid, waited = OneProcess(client, [{"partition-id": 0}, {"partition-id": 1}]), list[float]()
    later, rounds = grid.contexts.pop(8), iter(range(3))

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    answer = grid.reply

    def reply(message: Any) -> Any:
        if message.metadata.message_type == "train" and next(rounds, None) == 2:
            grid.contexts[8] = later
        return answer(message)

    grid.reply = reply
    fit(grid, tmp_path, *ALL, min_replies=2)
    assert [n for _, n in metrics(newest(tmp_path))["client/dropped"]] == [3, 3, 3, 0]
    assert 1 <= len(waited) <= 2


def test_errors_are_lines(tmp_path: Path) -> None:
    """Of a node, and of a node that does not connect; Flower, which prints tracebacks, finds none."""
    from fl_lightning import UserError

    client = app.client_app(partial(build, tmp_path / "unused", "--model=FedSMOO"))
    grid = OneProcess(client, [{"partition-id": 0}])
    with pytest.raises(UserError, match=r"^node 1: not connected; start it again") as error:
        fit(grid, tmp_path, "--model=FedSMOO")
    assert traceback.format_exception(error.value) == [f"fl_lightning.flower.app.Ended: {error.value}\n"]
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


SMALL = ["--model.net=DigitsMLP", "--model.net.hidden=8", "--data=Digits", "--data.num_clients=4"]
SMALL += ["--trainer.clients_per_round=4", "--trainer.accelerator=cpu", "--trainer.threads=1"]
SMALL += ["--trainer.enable_progress_bar=false", "--trainer.engine=sequential"]


class Network:
    """A superlink, its supernodes, and the apps that run on them.

    Args:
        root: Folder of everything.
        stack: Ends all processes.
    """

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack, self.port, self.bin = root, stack, free_port(), Path(sys.executable).parent
        (home := root / "home").mkdir()
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}')
        self.env = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        self.env |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        link = ["--insecure", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("link", "flower-superlink", *link)
        wait_for(self.port)

    def start(self, name: str, program: str, *args: str) -> int:
        command = [str(self.bin / program), *args]
        return self.stack.enter_context(running(*command, log=self.root / f"{name}.log", env=self.env))

    def node(self, p: int) -> int:
        config = f'partition-id={p} state-folder="{self.root}/state{p}"'
        ports = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        return self.start(f"node{p}", "flower-supernode", "--insecure", *ports, "--node-config", config)

    def app(self, name: str, nodes: int, *args: str) -> str:
        folder = str(self.root / name)
        cli("flower", folder, f"--nodes={nodes}", *SMALL, *args, f"--trainer.default_root_dir={self.root}/runs")
        return folder

    def run(self, folder: str, *settings: str) -> Any:
        """Starts an app."""
        config = ["--run-config", " ".join(settings)] if settings else []
        command = [str(self.bin / "flwr"), "run", folder, "--stream", *config]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.root, env=self.env, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def logs(self) -> str:
        return "".join(log.read_text()[-3000:] for log in self.root.glob("*.log"))

    def rounds(self) -> int:
        """Rounds of the newest run's last checkpoint."""
        found = [*self.root.glob("runs/*/*/checkpoints/last.ckpt")]
        return int(last(newest(self.root / "runs"))["round"]) if found else 0


@pytest.mark.slow
def test_superlink_and_supernodes_give_the_bits_of_the_trainer(tmp_path: Path) -> None:
    """FedSMOO on the digits over loopback.

    A second app continues the first one's run from its checkpoint, after a node was killed and started again.
    """
    rounds = "--trainer.max_rounds={}".format
    with ExitStack() as stack:
        network = Network(tmp_path, stack)
        nodes = [network.node(p) for p in range(2)]
        for number in (1, 2):
            if number == 2:
                os.killpg(nodes[1], signal.SIGKILL)
                network.node(1)
            folder = network.app(f"app{number}", 2, "--model=FedSMOO", rounds(number))
            said, _ = network.run(folder, *(['ckpt-path="last"'] * (number == 2))).communicate(timeout=600)
            assert network.rounds() == number, said + network.logs()
    cli("fit", "--model=FedSMOO", *SMALL, rounds(2), f"--trainer.default_root_dir={tmp_path}/trainer")
    found, expected = state(newest(tmp_path / "runs")), state(newest(tmp_path / "trainer"))
    assert_same(*({k: v for k, v in each.items() if not k.startswith("client.")} for each in (found, expected)))
    states = [file.name for file in tmp_path.glob("state*/*/*.state")]
    assert {re.match(r"\d+", name)[0] for name in states} == {"0", "1", "2", "3"}


@pytest.mark.slow
def test_run_goes_on_without_a_killed_and_a_hanging_node(tmp_path: Path) -> None:
    """Their clients are dropped; without that leave a run of the same nodes ends in one line, and is saved."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack)
        nodes = [network.node(p) for p in range(3)]
        every = "[{class_path: Checkpoints, init_args: {every_n_rounds: 1}}]"
        model = ["--model=SCAFFOLD", f"--trainer.callbacks={every}"]
        app = network.run(network.app("app1", 3, *model, "--trainer.max_rounds=3"), "wait=100", "min-replies=1")
        end = time.monotonic() + 400
        while network.rounds() < 1 and time.monotonic() < end and app.poll() is None:
            time.sleep(0.5)
        os.killpg(nodes[1], signal.SIGKILL)
        os.killpg(nodes[2], signal.SIGSTOP)
        said, _ = app.communicate(timeout=600)
        dropped = [n for _, n in metrics(newest(tmp_path / "runs"))["client/dropped"]]
        assert len(dropped) == 3 and dropped[0] == 0 and dropped[2] == 2, said + network.logs()
        assert re.search(r"round [23]: node.*; until it replies again, its clients are dropped", said)
        folder = network.app("app2", 3, *model, "--trainer.max_rounds=4")
        said, _ = network.run(folder, "wait=60", 'ckpt-path="last"').communicate(timeout=600)
        os.killpg(nodes[2], signal.SIGCONT)
    assert network.rounds() == 3
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "continue with ckpt-path = last" in line]
    assert len(lines) == 1 and "nodes 1, 2: not connected; start it again" in lines[0], said
