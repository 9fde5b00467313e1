"""Flower's messages and contexts in one process; `test_flower` runs this file in Flower's environments."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr.app as flwr
import pytest
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fl_lightning import UserError
from fl_lightning.flower import app
from tests.flower.nodes import build, loaded, trained
from tests.runs import assert_same, last, metrics, newest

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
    client = app.client_app(partial(loaded, *args))
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
    client = app.client_app(partial(loaded, *ALL))
    grid = Unreliable(client, [{"partition-id": 0}, {"partition-id": 1}])
    grid.failure = failure
    fit(grid, tmp_path, *ALL, min_replies=2)
    assert [n for _, n in metrics(newest(tmp_path))[f"client/{kind}"]] == [0, 0, 3, 0]
    assert capsys.readouterr().out.count(line) == 1


def test_node_that_is_not_connected_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part when it is there."""
    client = app.client_app(partial(loaded, *ALL))
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
    """They are of a node, or of one that does not connect; Flower, which prints tracebacks, finds none."""
    client = app.client_app(partial(loaded, "--model=FedSMOO"))
    grid = OneProcess(client, [{"partition-id": 0}])
    with pytest.raises(UserError, match=r"^node 1: not connected; start it again") as error:
        fit(grid, tmp_path, "--model=FedSMOO")
    assert traceback.format_exception(error.value) == [f"fl_lightning.flower.app.Ended: {error.value}\n"]
    with pytest.raises(UserError, match=r"^node 0: makes another model"):
        fit(grid, tmp_path, "--model=FedSMOO", "--trainer.seed=1", nodes=1)


class Answering(OneProcess):
    """A grid with answers of one's own to the question for a node's number."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.contexts = dict.fromkeys(answers)
        self.answers = answers

    def reply(self, message: Any) -> Any:
        node = message.metadata.dst_node_id
        content = self.answers[node]
        reply = None if content is None else flwr.Message(content, reply_to=message)
        if reply is not None:
            reply.metadata.__dict__["_src_node_id"] = node
        return reply


def numbered(**values: Any) -> Any:
    return flwr.RecordDict({"node": flwr.ConfigRecord(values)})


def test_number_stays_with_the_first_node_that_replies(capsys: pytest.CaptureFixture[str]) -> None:
    """A second one gets it only when the first is silent or gone, as after a restart."""
    grid = Answering({7: numbered(number=0), 8: numbered(number=1)})
    send = app.GridSend(grid, 1)
    assert send._ids({0, 1}) == {0: 7, 1: 8}
    grid.contexts[9], grid.answers[9] = None, numbered(number=0)
    assert send._ids({0, 1}) == send._ids({0, 1}) == {0: 7, 1: 8}
    line = (
        "node 0: 7 and 9 connect as this node; 9 trains no clients while 7 replies (give each its own partition-id)\n"
    )
    assert capsys.readouterr().out == line
    del grid.contexts[7]
    assert send._ids({0, 1}) == {0: 9, 1: 8}
    grid.contexts[10], grid.answers[10], grid.answers[8] = None, numbered(number=1), None
    assert send._ids({0, 1}) == {0: 9, 1: 10}


STRANGE = {
    "no record": flwr.RecordDict(),
    "tensors": flwr.RecordDict({"node": flwr.ArrayRecord()}),
    "no number": numbered(x=1),
    "text": numbered(number="\x1b[31m0"),
    "list": numbered(number=[0, 1]),
    "nan": numbered(number=float("nan")),
    "fraction": numbered(number=0.5),
    "bool": numbered(number=False),
    "negative": numbered(number=-1),
    "failed": flwr.Error(app.FAILED, "invalid\n literal"),
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
def test_node_that_answers_no_number_trains_nobody(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The others go on, and one line says so."""
    send = app.GridSend(Answering({7: answer, 8: numbered(number=1), 9: numbered(number=0)}), 1)
    assert send._ids({0, 1}) == send._ids({0, 1}) == {0: 9, 1: 8}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Flower's node 7: ") and line.endswith("(give partition-id a number from 0 on)")
    assert line.isprintable()
