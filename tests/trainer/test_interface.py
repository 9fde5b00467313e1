"""The network interface by which several machines reach each other: found, or asked for in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fl_lightning import UserError
from fl_lightning.trainer.runtime import environment
from tests.runs import DIGITS, assert_same, ended, newest, process, run, state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its interfaces are those of Linux")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, in which none of the variables is set."""
    for name in environment.INTERFACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return os.environ  # type: ignore[return-value]


def machine(monkeypatch: pytest.MonkeyPatch, mine: str, **known: str) -> None:
    """A machine whose interfaces have these addresses; the first process is reached from ``mine``."""
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: list(enumerate(known)))
    monkeypatch.setattr(environment, "_address", known.get)
    monkeypatch.setattr(environment.socket.socket, "connect", lambda *_: None)
    monkeypatch.setattr(environment.socket.socket, "getsockname", lambda _: (mine, 9))


def test_route_names_the_interface(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "10.9.0.2", lo="127.0.0.1", docker0="172.17.0.1", eth0="10.9.0.2")
    variables["NCCL_SOCKET_IFNAME"] = "ib0"
    environment.choose_interface("node0")
    assert [variables[name] for name in environment.INTERFACES] == ["eth0", "ib0"]


def test_name_of_the_own_machine(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives it a loopback address: the one other interface is taken, and of several one is asked for."""
    machine(monkeypatch, "127.0.0.1", lo="127.0.0.1", eth0="10.9.0.1")
    environment.choose_interface("127.0.0.1")
    assert not {*environment.INTERFACES} & variables.keys()
    environment.choose_interface("node0")
    assert variables.pop("GLOO_SOCKET_IFNAME") == variables.pop("NCCL_SOCKET_IFNAME") == "eth0"
    machine(monkeypatch, "127.0.0.1", lo="127.0.0.1", eth0="10.9.0.1", ib0="10.8.0.1")
    line = (
        "^MASTER_ADDR = node0: a loopback address on this machine, whose interfaces are eth0, ib0; give the machine's"
    )
    with pytest.raises(UserError, match=line):
        environment.choose_interface("node0")


def test_unknown_name_is_one_line(variables: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"^MASTER_ADDR = nowhere.invalid: not reached from this machine \(.*\); give"):
        environment.choose_interface("nowhere.invalid")


def test_real_interfaces() -> None:
    assert environment._address("lo") == "127.0.0.1" and environment._address("none") is None


@pytest.fixture
def two_machines() -> Iterator[list[str]]:
    """Two network namespaces in which the machine's own name is a loopback address."""
    names = [f"fl{os.getpid()}{side}" for side in "ab"]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("no network namespaces")
    try:
        commands = [f"netns add {names[1]}", f"link add {names[0]} type veth peer name {names[1]}"]
        for number, name in enumerate(names, 1):
            commands += [f"link set {name} netns {name}", f"-n {name} addr add 10.9.0.{number}/24 dev {name}"]
            commands += [f"-n {name} link set {link} up" for link in ("lo", name)]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_two(machines: list[str], root: Path, code: int = 0, **first: str) -> list[tuple[str, str]]:
    """What a run on two machines says; ``first`` is the environment of the first."""
    node = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=10.9.0.1", "--master_port=29511", "--node_rank"]
    args = ["-m", "fl_lightning", "fit", "--model=SCAFFOLD", *DIGITS, "--trainer.strategy=ddp"]
    with ExitStack() as stack:
        children = []
        for rank, name in enumerate(machines):
            (folder := root / name).mkdir()
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *node, str(rank)]
            env = {} if rank else first
            children.append(stack.enter_context(process(*command, *args, cwd=folder, env=env)))
        return ended(children, code)


@pytest.mark.long
def test_two_machines(two_machines: list[str], tmp_path: Path) -> None:
    """They find the interface, give the bits of one process, and print each line once."""
    outputs = on_two(two_machines, tmp_path)
    assert [text.count("results: ") for text, _ in outputs] == [1, 0]
    tensors = state(newest(tmp_path / two_machines[0] / "runs"))
    assert_same(tensors, state(run("fit", root=tmp_path / "one", model="SCAFFOLD")))


@pytest.mark.long
def test_a_wrong_interface_ends_both_machines(two_machines: list[str], tmp_path: Path) -> None:
    """Each prints a line, and waits for no other."""
    outputs = on_two(two_machines, tmp_path, 1, **dict.fromkeys(environment.INTERFACES, "none0"))
    for number, (_, text) in enumerate(outputs):
        lines = [line for line in text.splitlines() if line.startswith("error")]
        assert len(lines) == 1 and f"process {number} does not reach the others; see their messages, and" in lines[0]
