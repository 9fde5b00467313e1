"""Flower's programs in the environments of ``make flower-env``: the guide as it stands, with a node that is lost."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runs import assert_same, cli, last, metrics, newest, state

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(sh|toml)\n(.*?)```", (ROOT / "docs/guides/flower.md").read_text(), re.DOTALL)
INSTALL, APP, START, GO_ON, SIMULATE = (block.splitlines() for language, block in BLOCKS if language == "sh")
(CONFIG,) = (block for language, block in BLOCKS if language == "toml")
ENVIRONMENTS = ROOT / ".venv-flower"
MOST = 900.0
"""Seconds after which something hangs."""


class Network:
    """Shells in one folder, in one of Flower's environments; each of the page's ports is a free one.

    Args:
        root: The folder.
        environment: Name of the environment.
    """

    def __init__(self, root: Path, environment: str) -> None:
        self.root, self.bin, self.started = root, ENVIRONMENTS / environment / "bin", list[Any]()
        self.ports = {port: str(free_port()) for port in ("8000", "9001", "9002")}
        self.ray = tempfile.mkdtemp(prefix="ray")  # paths of its sockets have at most 107 letters
        (home := root / "home").mkdir()
        (home / "config.toml").write_text(self.local(CONFIG))
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_HOME": str(home), "RAY_TMPDIR": self.ray}
        self.env |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env |= dict(pair.split("=") for line in INSTALL for pair in shlex.split(line)[1:] if "=" in pair)

    def local(self, text: str) -> str:
        return re.sub(r"\b(8000|9001|9002)\b", lambda port: self.ports[port[0]], text)

    def start(self, line: str, name: str) -> subprocess.Popen[bytes]:
        """Runs a line of the page in a shell of its own, which writes to ``<name>.log``."""
        with (self.root / f"{name}.log").open("w") as log:
            shell = ["bash", "-c", f"exec {self.local(line)}"]
            self.started.append(
                subprocess.Popen(
                    shell, cwd=self.root, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
        return self.started[-1]

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def serve(self, line: str, port: str) -> None:
        """Starts a superlink, and returns when it listens."""
        link = self.start(line, "link")

        def listens() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
                return True
            return link.poll() is not None

        until(listens)

    def run(self, line: str, name: str) -> str:
        """Returns what a command says until it ends."""
        self.start(line, name).wait(MOST)
        return self.log(name)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return newest(self.root / "runs")

    def rounds(self) -> int:
        """Counts the rounds in the metrics of the run."""
        files = [*self.root.glob("runs/*/*/metrics.csv")]
        return len(files[0].read_text().splitlines()) - 1 if files else 0

    def lose(self, node: subprocess.Popen[bytes], app: subprocess.Popen[bytes], how: signal.Signals) -> None:
        """Ends a node once the first round is complete, which takes it seconds before its next reply."""
        until(lambda: self.rounds() >= 1 or app.poll() is not None)
        node.send_signal(how)
        node.wait(MOST)

    def end(self) -> None:
        """Kills every process that has this folder's FLWR_HOME, since Flower and Ray start new sessions."""
        for child in self.started:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        mine = f"FLWR_HOME={self.env['FLWR_HOME']}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mine in environment.read_bytes().split(b"\0"):
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        shutil.rmtree(self.ray, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST
    while not holds():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.1)


@pytest.fixture(params=["lowest", "newest"])
def environment(request: pytest.FixtureRequest) -> str:
    if not (ENVIRONMENTS / ".installed").is_file():
        pytest.fail("Flower is in an environment of its own, which is not there yet: make flower-env", pytrace=False)
    return str(request.param)


@pytest.fixture
def network(environment: str, tmp_path: Path) -> Iterator[Network]:
    """Makes the network with the page's app."""
    network = Network(tmp_path, environment)
    try:
        (line,) = APP
        output = network.run(line, "app")
        assert "start with: flwr run digits" in output, output
        yield network
    finally:
        network.end()


def assert_bits_of_fit(network: Network) -> None:
    """Compares all that the server keeps, but not the clients' states, which are on the nodes."""
    config, root = network.root / "digits/config.yaml", network.root / "fit"
    cli("fit", "--config", str(config), f"--trainer.default_root_dir={root}", "--trainer.enable_progress_bar=false")
    actual, expected = state(network.folder), state(newest(root))
    assert_same(*({k: v for k, v in tensors.items() if not k.startswith("client.")} for tensors in (actual, expected)))


newest_only = pytest.mark.parametrize("environment", ["newest"], indirect=True)


def test_apps_in_one_process(environment: str) -> None:
    python = ENVIRONMENTS / environment / "bin/python"
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "tests/flower/in_flower.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_guide_with_a_lost_node(network: Network, environment: str) -> None:
    """The second node ends after the first round, stopped or killed; the run ends in a line, and goes on from there."""
    link, *nodes, run = START
    network.serve(link, network.ports["8000"])
    _, lost = (network.start(line, f"node{p}") for p, line in enumerate(nodes))
    app = network.start(run, "first")
    network.lose(lost, app, signal.SIGTERM if environment == "lowest" else signal.SIGKILL)
    app.wait(MOST)
    output = network.log("first")
    assert re.search(r"node 1: [^\n]*; start it again, then continue with ckpt-path = last", output), output
    assert "Traceback" not in output and last(network.folder)["round"] == 1, output
    network.start(nodes[1], "node1 again")
    (line,) = GO_ON
    output = network.run(line, "second")
    assert last(network.folder)["round"] == 2 and "Traceback" not in output, output
    assert_bits_of_fit(network)
    states = [file.name for file in network.root.glob("states/*/*/*.state")]
    assert states and {int(name.partition(".")[0]) % 2 for name in states} == {0, 1}


@pytest.mark.long
@newest_only
def test_run_goes_on_without_a_killed_node(network: Network) -> None:
    """Its clients are dropped."""
    link, *nodes, run = START
    network.serve(link, network.ports["8000"])
    _, lost = (network.start(line, f"node{p}") for p, line in enumerate(nodes))
    app = network.start(f"{run} --run-config min-replies=1", "run")
    network.lose(lost, app, signal.SIGKILL)
    app.wait(MOST)
    output = network.log("run")
    first, second = (n for _, n in metrics(network.folder)["client/dropped"])
    assert first == 0 < second, output
    assert re.search(r"round 2: node 1: .*; until it replies again, its clients are dropped", output), output


@pytest.mark.long
@newest_only
def test_local_simulation(network: Network) -> None:
    """The superlink that ``flwr run`` would start itself, and leave behind, is there already."""
    port = network.ports["8000"]
    network.env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = port
    network.serve(f"flower-superlink --insecure --simulation --host 127.0.0.1 --port {port}", port)
    *_, line = SIMULATE
    output = network.run(line, "run")
    assert last(network.folder)["round"] == 2 and "Traceback" not in output, output
    assert_bits_of_fit(network)
