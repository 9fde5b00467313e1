"""Clients on nodes: the trainer's weights and states to the bit, the declared wire, failures on either side."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import DigitsMLP, UserError
from fl_lightning.core import State, generator
from fl_lightning.flower.node import Message, NodeLost, row_of, version_in, version_of
from fl_lightning.trainer.aggregation.noise import NoiseKey
from tests.flower.nodes import Nodes, build, trained
from tests.runs import DIGITS, FORKS, assert_same, cli, last, metrics, newest, run, state

ROUNDS = "--trainer.max_rounds=4"
FAULTS = [
    "--trainer.faults=Faults",
    "--trainer.faults.drop_after=0.2",
    "--trainer.faults.corrupt=Corrupt",
    "--trainer.faults.corrupt.share=0.3",
    "--trainer.faults.stragglers=Stragglers",
    "--trainer.faults.stragglers.deadline=2",
]
FAILED = ("refused", "dropped", "late")
NORMED = "tests.flower.nodes.BatchNormed"
METHODS = ("topk", "randk", "qsgd", "sign")
NEW = ("FedTOGA", "LocalMuon", "FedMuon", "FedAdamW")
CASES = {
    "FedSMOO": ["--model=FedSMOO"],
    "SCAFFOLD": ["--model=SCAFFOLD"],
    "FedDyn": ["--model=FedDyn"],
    "FedGAMMA": ["--model=FedGAMMA"],
    "MOON": ["--model=MOON"],
    "FedGloSS": ["--model=FedGloSS", "--model.ascent=SAM", "--model.averaging=SWA"],
    "two phases": ["--model=NaiveFedGloSS"],
    "no state": ["--model=FedSAM"],
    "faults": ["--model=FedSMOO", *FAULTS],
    "class counts": ["--model=FedLC"],
    **{p: ["--model=FedGAMMA", f"--model.net={NORMED}", f"--model.buffers={p}"] for p in ("average", "local", "reset")},
    **{name: [f"--model={name}"] for name in NEW},
    **{m: ["--model=SCAFFOLD", "--model.parts+=Compress", f"--model.parts.method={m}"] for m in METHODS},
    "robust": ["--model=FedDyn", "--trainer.aggregation=CoordinateMedian"],
}


FURTHER = (*NEW, *METHODS[1:], "FedGAMMA", "no state", "robust", "class counts", "average", "reset")


@pytest.mark.parametrize(
    "args", [pytest.param(CASES[c], id=c, marks=[pytest.mark.slow] * (c in FURTHER)) for c in CASES]
)
def test_nodes_give_the_bits_of_the_trainer(args: list[str], tmp_path: Path) -> None:
    """Weights, all of the server's state, metrics, and what the clients keep are the same."""
    expected = trained(tmp_path / "trainer", *args, ROUNDS)
    nodes = Nodes(tmp_path, *args, ROUNDS)
    run = nodes.fit()
    assert_same(run.server, expected.server)
    assert metrics(run.folder.path) == metrics(expected.folder.path)
    assert run.state.failures == expected.state.failures
    assert run.state.failures.keys() == ({*FAILED} if FAULTS[0] in args else set())
    states, rows = nodes.states(run), expected.clients.rows()
    assert states.keys() == rows.keys()
    for client, row in rows.items():
        assert_same(states[client], row)
        assert sum(key.startswith(f"{client}.") for key in nodes.kept[client % 2]) <= 3


def test_wire_is_what_the_algorithm_declares(tmp_path: Path) -> None:
    """It is the declared tensors, as many numbers as the run counts, and plain values of a few names."""
    nodes = Nodes(tmp_path, "--model=FedGloSS", "--model.ascent=SAM", ROUNDS)
    run = nodes.fit()
    down, up = ({*names} for names in run.objective.wire)
    shapes = {name: value.shape for name, value in run.server.items()}
    numbers = 0
    for message, reply in nodes.log:
        clients = {name.removeprefix("client.") for name in message.values} - {"round"}
        assert message.tensors.keys() == {"down"} and message.tensors["down"].keys() == down
        assert all(value.shape == shapes[name] for name, value in message.tensors["down"].items())
        assert reply.tensors.keys() == {f"up.{k}" for k in clients} and {f"client.{k}" for k in clients} == {
            *reply.values
        }
        assert all(upload.keys() == up for upload in reply.tensors.values())
        numbers += len(clients) * sum(value.numel() for value in message.tensors["down"].values())
        numbers += sum(value.numel() for upload in reply.tensors.values() for value in upload.values())
        for name, values in {**message.values, **{f"reply.{k}": reply.values[f"client.{k}"] for k in clients}}.items():
            assert values.keys() == NAMES[name.partition(".")[0]]
            assert all(type(value) in (bool, int, float, str) for value in values.values())
    assert 32 * numbers == run.state.total_bits


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("method", METHODS)
def test_codes_travel(method: str, tmp_path: Path) -> None:
    """An upload is the bytes of its code, as many as the bits that are counted."""
    nodes = Nodes(tmp_path, *CASES[method], "--trainer.max_rounds=2")
    run = nodes.fit()
    uploads = [upload for _, reply in nodes.log for upload in reply.tensors.values()]
    down = [message.tensors["down"].values() for message, reply in nodes.log for _ in reply.tensors]
    assert all(value.dtype == torch.uint8 for upload in uploads for value in upload.values())
    sent = 8 * sum(value.nbytes for upload in uploads for value in upload.values())
    received = 8 * sum(value.nbytes for values in down for value in values)
    assert 0 <= sent + received - run.state.total_bits < 8 * 2 * len(uploads)
    if method == "topk":  # a place that does not exist is refused
        nodes.log.clear()
        upload, like = {**uploads[0]}, torch.zeros(610)
        upload["w"] = torch.full_like(upload["w"], 255)
        (part,) = run.objective.parts
        with pytest.raises(UserError, match=r"^its upload w has a place beyond its 610 numbers$"):
            part.arrived(upload, State({"w": like}), None)  # type: ignore[arg-type]


NAMES = {
    "round": {"run", "w0", "frozen", "nodes"},
    "client": {"t", "rounds", "m", "phase", "lr", "K", "K_missed", "k_lr", "n_k", "n_mean", "seed", "version", "keep"},
    "reply": {"loss", "finite", "version"},
}


PRIVATE = [
    "--model=FedAvg",
    "--model.weighting=uniform",
    "--trainer.max_rounds=2",
    "--trainer.precision=64-true",
    "--trainer.privacy=GaussianPrivacy",
    "--trainer.privacy.delta=1e-3",
    "--trainer.privacy.noise_multiplier=1",
]


@pytest.mark.parametrize("hole", [False, True], ids=["as it is", "with a hole"])
def test_messages_hold_no_seed_of_the_noise(hole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From no integer of its messages a node makes the noise of a release; it does if the run's seed is the key.

    A release on the grid minus its own noise is the sum, whose norm is at most that of three clients.
    """
    if hole:
        monkeypatch.setattr(NoiseKey, "fresh", classmethod(lambda cls: cls.of_seed(987654321)))
    nodes = Nodes(tmp_path, *PRIVATE, "--trainer.seed=987654321")
    run = nodes.fit()
    key, sent, integers = run.aggregation.noise_key, dict[int, torch.Tensor](), set[int]()
    assert key is not None
    for message, _ in nodes.log:
        values = [value for fields in message.values.values() for value in fields.values()]
        integers |= {value for value in values if type(value) is int}
        assert not any(key.secret.hex()[:8] in str(value) for value in values)
        for fields in message.values.values():
            if "t" in fields:
                sent[int(fields["t"])] = message.tensors["down"]["w"]
    released = (sent[1] - sent[0]) * 3

    def rest(noise: torch.Tensor) -> float:
        return float((released - noise).norm())

    size = len(released)
    guesses = [NoiseKey.of_seed(i).normal(size, "noise", 0, 0, "w") for i in integers]
    guesses += [torch.randn(size, generator=generator(i, "privacy", 0, 0), dtype=torch.float64) for i in integers]
    assert rest(key.normal(size, "noise", 0, 0, "w")) <= 3 < size**0.5 / 2
    assert (min(map(rest, guesses)) <= 3) == hole


# Failures

EVERY_TWO = "--trainer.callbacks=[{class_path: Checkpoints, init_args: {every_n_rounds: 2}}]"
STATEFUL = ["--model=FedSMOO", "--trainer.max_rounds=5", EVERY_TWO]


class Failing(Nodes):
    """Nodes of which the n-th exchange fails, after they have trained."""

    at = 4

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, Message | UserError]:
        replies, self.at = super().__call__(messages), self.at - 1
        if not self.at:
            self.fail()
        return replies

    def fail(self) -> None:
        raise UserError("the network is down")


class Dying(Failing):
    """The process dies."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Returns the server's state after a run without failures."""
    return dict(trained(tmp_path_factory.mktemp("expected"), *STATEFUL).server)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what is left of server and nodes that died in round 4; the last checkpoint is that of round 2."""
    root = tmp_path_factory.mktemp("left")
    process = multiprocessing.get_context("fork").Process(target=lambda: Dying(root, *STATEFUL, stored=True).fit())
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    return root


@pytest.fixture
def dead(left: Path, tmp_path: Path) -> Path:
    """Returns a test's own copy of it."""
    return Path(shutil.copytree(left, tmp_path, dirs_exist_ok=True))


forks = pytest.mark.skipif(not FORKS, reason="a fork cannot train here")


@forks
def test_killed_server_and_nodes_go_on_to_the_same_bits(dead: Path, expected: dict[str, torch.Tensor]) -> None:
    """The nodes have states of rounds that the server does not know of."""
    assert last(newest(dead))["round"] == 2
    assert_same(Nodes(dead, *STATEFUL, stored=True).fit("last").server, expected)


@forks
@pytest.mark.parametrize(("damage", "line"), [(Path.unlink, "has no state"), (Path.touch, "checksum")])
def test_lost_state_is_one_line(damage: Any, line: str, dead: Path) -> None:
    """No client begins again with initial values; the run stays where it was."""
    for file in dead.glob("node*/*.state"):
        damage(file)
        if line == "checksum":
            file.write_bytes(file.read_bytes()[:-20] + bytes(20))
    with pytest.raises(UserError, match=line):
        Nodes(dead, *STATEFUL, stored=True).fit("last")
    assert last(newest(dead))["round"] == 2


@pytest.mark.parametrize("at", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_round_that_fails_in_a_phase_is_done_again(at: int, tmp_path: Path) -> None:
    """In the first or second phase of NaiveFedGloSS, the nodes return to the states before the round."""
    args = ["--model=NaiveFedGloSS", "--trainer.max_rounds=3", "--trainer.clients_per_round=6"]
    nodes = Failing(tmp_path, *args)
    nodes.at = at
    with pytest.raises(UserError, match="network"):
        nodes.fit()
    assert_same(nodes.fit("last").server, trained(tmp_path / "trainer", *args).server)


class Strange(Nodes):
    """Node 1 changes each of its uploads, and its clients' versions."""

    change: Callable[[torch.Tensor], torch.Tensor | None]
    version: str | None = None

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, Message | UserError]:
        replies = super().__call__(messages)
        if isinstance(reply := replies.get(1), Message):
            changed = {k: {name: self.change(v) for name, v in upload.items()} for k, upload in reply.tensors.items()}
            tensors = {k: {n: v for n, v in upload.items() if v is not None} for k, upload in changed.items()}
            versions = {} if self.version is None else {"version": self.version}
            replies[1] = Message(tensors, {k: {**v, **versions} for k, v in reply.values.items()})
        return replies


OTHERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "one number": (lambda w: torch.full((1,), 5.0), r"its upload w is \(1,\) float32, not \(610,\) float32"),
    "scalar": (lambda w: torch.tensor(5.0), r"\(\) float32"),
    "column": (lambda w: w[:, None], r"\(610, 1\)"),
    "longer": (lambda w: torch.cat([w, w]), r"\(1220,\)"),
    "empty": (lambda w: w[:0], r"\(0,\)"),
    "complex": (lambda w: w.to(torch.complex64), r"\(610,\) complex64, not \(610,\) float32"),
    "double": (torch.Tensor.double, "float64"),
    "int": (torch.Tensor.long, "int64"),
    "bool": (lambda w: w > 0, "bool"),
    "sparse": (torch.Tensor.to_sparse, "float32 sparse_coo, not .* float32 strided"),
    "missing": (lambda w: None, "its reply lacks 'w'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["FedAvg", pytest.param("SCAFFOLD", marks=pytest.mark.slow)])
def test_upload_of_another_form_counts_as_not_finite(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is that of uploads of NaN, and a line names what is wrong."""
    args = [f"--model={model}", "--trainer.clients_per_round=6"]

    def run(name: str, change: Callable[[torch.Tensor], torch.Tensor | None], version: str | None = None) -> Any:
        nodes = Strange(tmp_path / name, *args)
        nodes.change, nodes.version = change, version
        return nodes.fit()

    expected = run("nan", lambda w: w * torch.nan)
    assert expected.metrics["client/refused"] == 3
    capsys.readouterr()
    for name, (change, line) in OTHERS.items():
        actual, output = run(name, change), capsys.readouterr().out
        assert_same(actual.server, expected.server)
        assert metrics(actual.folder.path) == metrics(expected.folder.path)
        assert re.findall(f"^client 1: .*{line}.*; refused", output, re.M) and output.count("client 1: ") == 1
    if model == "SCAFFOLD":
        assert_same(run("version", lambda w: w, "7" * 9).server, expected.server)


class Lost(Nodes):
    """Node 1 is lost in some exchanges, from 1: it trains, and its reply does not arrive."""

    lost: tuple[int, ...] = ()
    error: UserError | None = NodeLost("gone")

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, Message | UserError]:
        replies, self.exchange = super().__call__(messages), getattr(self, "exchange", 0) + 1
        if self.exchange in self.lost and replies.pop(1, None) is not None and self.error is not None:
            replies[1] = self.error
        return replies


ALL = ["--trainer.clients_per_round=6"]


@pytest.mark.parametrize("model", ["FedSMOO", pytest.param("SCAFFOLD", marks=pytest.mark.slow)])
def test_clients_of_a_lost_node_are_dropped(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is that of the trainer in which they are not available; they go on from the states that they had."""
    available = [[*range(6)], [0, 2, 4], [0, 2, 4], [*range(6)]]
    faults = ["--trainer.faults=Faults", f"--trainer.faults.available={available}"]
    expected = trained(tmp_path / "trainer", f"--model={model}", *ALL, ROUNDS, *faults)
    nodes = Lost(tmp_path, f"--model={model}", *ALL, ROUNDS)
    nodes.lost = (2, 3)
    capsys.readouterr()
    run = nodes.fit(min_replies=3)
    assert_same(run.server, expected.server)
    assert run.state.failures == expected.state.failures == {"dropped": {1: 2, 3: 2, 5: 2}}
    assert [n for _, n in metrics(run.folder.path)["client/dropped"]] == [0, 3, 3, 0]
    for client, row in expected.clients.rows().items():
        assert_same(nodes.states(run)[client], row)
    lines = [line for line in capsys.readouterr().out.splitlines() if " node " in line]
    assert lines == [
        "round 2: node 1: gone; until it replies again, its clients are dropped",
        "round 4: node 1: replies again",
    ]


@pytest.mark.parametrize("lost", [(3,), (4,)], ids=["first phase", "second phase"])
def test_node_lost_in_a_phase(lost: tuple[int, ...], tmp_path: Path) -> None:
    """A client lost in the first phase of a round takes no part in the second; the run goes on."""
    nodes = Lost(tmp_path, "--model=NaiveFedGloSS", *ALL, "--trainer.max_rounds=3")
    nodes.lost = lost
    run = nodes.fit(min_replies=1)
    assert [n for _, n in metrics(run.folder.path)["client/dropped"]] == [0, 3, 0]
    assert len(nodes.log) == (12 if lost == (4,) else 11)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("error", "least", "line"),
    [
        (
            NodeLost("gone"),
            None,
            "node 1: gone; start it again, then continue with ckpt-path = last, or allow it by .*",
        ),
        (None, None, "node 1: no reply; start it again, .*"),
        (UserError("a state is lost"), None, "node 1: a state is lost"),
        (NodeLost("gone"), 4, r"node 1: gone \(3 clients have replied, min-replies is 4\); start it again, .*"),
    ],
)
def test_too_few_replies_end_the_run(error: UserError | None, least: int | None, line: str, tmp_path: Path) -> None:
    """They do in one line; the last complete round is saved, and the run goes on from it to the same bits."""
    nodes = Lost(tmp_path, "--model=SCAFFOLD", *ALL, ROUNDS)
    nodes.lost, nodes.error = (3,), error
    with pytest.raises(UserError, match=f"^{line}$"):
        nodes.fit(min_replies=least)
    assert last(newest(tmp_path))["round"] == 2
    run = nodes.fit("last", min_replies=least)
    assert_same(run.server, trained(tmp_path / "trainer", "--model=SCAFFOLD", *ALL, ROUNDS).server)


def test_small_cohort_needs_all_of_its_clients(tmp_path: Path) -> None:
    run = Nodes(tmp_path, "--model=FedAvg").fit(min_replies=100)
    assert run.metrics["client/dropped"] == 0
    with pytest.raises(UserError, match=r"^min_replies = 0: "):
        Nodes(tmp_path, "--model=FedAvg").fit(min_replies=0)


def test_node_that_differs_is_refused(tmp_path: Path) -> None:
    """It has another seed, other data, another node's number, or another frozen layer below the same trained one."""
    nodes = Nodes(tmp_path, "--model=FedAvg")
    for argument, line in (("--trainer.seed=1", "makes another model"), ("--data.num_clients=5", "samples here")):
        with pytest.raises(UserError, match=line):
            nodes.fit(None, argument)
    nodes.nodes.reverse()
    with pytest.raises(UserError, match="partition-id"):
        nodes.fit()
    torch.save(
        {name: v for name, v in DigitsMLP(hidden=8).state_dict().items() if name[0] == "1"}, tmp_path / "body.pt"
    )
    net = ["--model.net=Frozen", "--model.net.net=DigitsMLP", "--model.net.net.hidden=8", "--model.net.trained=[3]"]
    nodes = Nodes(tmp_path / "frozen", "--model=FedAvg", *net)
    with pytest.raises(UserError, match="makes another model"):
        nodes.fit(None, f"--model.net.weights={tmp_path / 'body.pt'}")
    assert nodes.fit().objective.flat.d == 90


def test_runs_of_one_name_keep_their_states_apart(tmp_path: Path) -> None:
    """Two servers' runs have names of their own on a node; a run that continues has its own."""
    servers = [Nodes(tmp_path / root, "--model=SCAFFOLD", stored=True) for root in "ab"]
    folders = [server.fit(*args).folder for server in servers for args in ((), ("last", "--trainer.max_rounds=3"))]
    assert {folder.label for folder in folders} == {"SCAFFOLD-Digits/version_0"}
    named = [{message.values["round"]["run"] for message, _ in server.log} for server in servers]
    assert [len(names) for names in named] == [1, 1] and named[0] != named[1]


def test_kept_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    args = ["--model=FedAvg", "--trainer.clients_per_round=6"]

    def nodes(name: str, *options: str) -> Nodes:
        optimizer = [f"--model.optimizer={name}", "--model.optimizer.state=keep"]
        return Nodes(tmp_path, *args, *optimizer, *options, stored=True)

    nodes("AdamW").fit()
    with pytest.raises(UserError, match=r"its state \w{8} is that of another algorithm or optimizer"):
        nodes("Lion", ROUNDS).fit("last")


def test_versions_are_exact() -> None:
    """They are in float32; zeros are no version, and a version is one of content."""
    like = torch.zeros(1)
    for version in ("00000000", "ffffffff", "0001ff80"):
        assert version_in(row_of(version, like)) == version
    assert version_in(torch.zeros(3)) == ""
    states = [{"a": torch.tensor([1.0]), "b": torch.tensor([x])} for x in (0.0, -0.0, 1.0)]
    assert len({version_of(x) for x in states}) == 3 and version_of(states[0]) == version_of({**states[0]})


# Checkpoints and options


def test_trainer_takes_a_checkpoint_only_if_nothing_is_on_nodes(tmp_path: Path) -> None:
    """One of a stateful algorithm can be evaluated, and continued on its nodes only."""
    run = Nodes(tmp_path / "smoo", "--model=FedSMOO").fit()
    path = str(run.folder.last)
    objects = build(tmp_path / "smoo", "--model=FedSMOO")
    assert objects.trainer.test(objects.model, objects.data, path) == {
        name: run.metrics[name] for name in ("server/test/acc", "server/test/loss")
    }
    with pytest.raises(UserError, match="its client state"):
        trained(tmp_path / "smoo", "--model=FedSMOO", "--trainer.max_rounds=3", ckpt_path=path)
    args = ("--model=FedSAM", "--trainer.max_rounds=3")
    run = Nodes(tmp_path / "sam", "--model=FedSAM").fit()
    resumed = trained(tmp_path / "sam", *args, ckpt_path=str(run.folder.last))
    assert_same(resumed.server, trained(tmp_path, *args).server)


def test_command_writes_an_app_of_the_config(tmp_path: Path) -> None:
    """Its config.yaml gives the run of the same arguments."""
    args = ["--model=FedSMOO", *DIGITS, "--trainer.engine=auto", f"--trainer.default_root_dir={tmp_path}/runs"]
    cli("flower", str(tmp_path / "My App"), "--nodes=2", *args)
    app = tmp_path / "My App"
    assert {path.name for path in app.iterdir()} == {
        "LICENSE", "client_app.py", "config.yaml", "pyproject.toml", "server_app.py"
    }  # fmt: skip
    text = (app / "pyproject.toml").read_text()
    assert '\nname = "my-app"\n' in text and "\nnodes = 2\n" in text and "$" not in text
    cli("fit", "--config", str(app / "config.yaml"))
    assert_same(state(newest(tmp_path / "runs")), state(run("fit", root=tmp_path / "direct", model="FedSMOO")))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--trainer.engine=batched"], "trainer.engine = batched"),
        (["--trainer.engine=auto", "--trainer.compile=true"], "trainer.engine = auto"),
        (["--trainer.devices=2", "--trainer.strategy=ddp"], "trainer.devices = 2"),
        (["--data.stream=true"], "data.stream = true"),
        (["--model=AFedPD"], "model.absent = virtual"),
        (["--model=tests.flower.nodes.Noting"], "model = Noting: its client_round_end "),
        (["--trainer.callbacks=[FlatnessMonitor]"], "trainer.callbacks: FlatnessMonitor"),
        (["--trainer.callbacks=[Trajectory]"], "trainer.callbacks: Trajectory"),
        (["--nodes=0"], "nodes = 0"),
        (["--nodes=7"], "nodes = 7: there are 6 clients"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_command_refuses_in_one_line(args: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        cli("flower", str(tmp_path / "app"), "--model=FedAvg", *DIGITS, *args)
    assert re.fullmatch(f"error: {re.escape(line)}.*", str(end.value.code)) and not (tmp_path / "app").exists()


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"{re.escape(str(tmp_path))}/file/app.*Not a directory"):
        cli("flower", str(tmp_path / "file/app"), "--model=FedAvg", *DIGITS)
