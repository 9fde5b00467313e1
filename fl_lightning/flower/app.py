"""Flower's ClientApp and ServerApp. This is the only module that imports flwr."""

import time
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import flwr.app
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fl_lightning.core import UserError, folded, require
from fl_lightning.flower import server
from fl_lightning.flower.node import Folder, Message, Node, NodeLost
from fl_lightning.trainer import Run, check_interruption

FAILED = 2
"""Flower's code for an exception in a ClientApp. Those of nodes and processes that are gone are others."""
QUERY = 120.0
"""Seconds that a node has to report its number: Flower may list a node for a while after it has gone."""


def client_app(run: Callable[[], Run]) -> ClientApp:
    """Returns the app of the nodes.

    A node's number is the ``partition-id`` of its node config. The node keeps its clients' states in its context, or in
    files if the node config names a ``state-folder``.

    Args:
        run: Returns the run with the node's config, for every message. Flower's simulation pickles it with each.
    """

    def number(message: flwr.app.Message, context: Context) -> flwr.app.Message:
        node = ConfigRecord({"number": int(context.node_config.get("partition-id", 0))})
        return flwr.app.Message(RecordDict({"node": node}), reply_to=message)

    def train(message: flwr.app.Message, context: Context) -> flwr.app.Message:
        config = context.node_config
        try:
            request = unpacked(message.content)
            folder, name = config.get("state-folder"), Path(str(request.values["round"]["run"])).name.lstrip(".")
            states = Records(context.state) if folder is None else Folder(Path(str(folder)).expanduser() / name)
            reply = Node(run(), int(config.get("partition-id", 0))).answer(request, states)
        except UserError as error:
            return flwr.app.Message(flwr.app.Error(FAILED, str(error)), reply_to=message)
        return flwr.app.Message(packed(reply), reply_to=message)

    app = ClientApp()
    app.query()(number)
    app.train()(train)
    return app


def server_app(build: Callable[[], Any]) -> ServerApp:
    """Returns the app of the server.

    Its run config has ``nodes``, the number of nodes (0: one for each client); ``ckpt-path`` ("": a new run);
    ``wait``, the seconds that the server waits for a node to connect, and for a reply; and ``min-replies``, the number
    of clients that must reply (0: all).

    Args:
        build: Builds the objects that the config describes, ``trainer``, ``model`` and ``data``.
    """

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        objects, send = build(), GridSend(grid, float(config["wait"]))
        nodes, ckpt_path = int(config["nodes"]) or None, str(config["ckpt-path"]) or None
        try:
            server.fit(
                send, nodes, objects.trainer, objects.model, objects.data, ckpt_path, int(config["min-replies"]) or None
            )
        except UserError as error:
            raise Ended(str(error)) from None

    app = ServerApp()
    app.main()(main)
    return app


class Ended(UserError):
    """The error of a run; Flower prints the traceback that it finds here, which is none."""

    __traceback__ = property(lambda self: None, lambda self, value: None)


class GridSend:
    """Carries messages over a grid.

    Args:
        grid: Flower's grid.
        wait: Seconds to wait for a node to connect, and for a reply. A node that has not connected in this time is
            waited for again only when it is there.
    """

    def __init__(self, grid: Grid, wait: float) -> None:
        require(wait > 0, "wait", wait, "give seconds")
        self.grid, self.wait = grid, wait
        self._numbers: dict[int, int] = {}
        self._gone: set[int] = set()

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, Message | UserError]:
        ids = self._ids({*messages})
        sent = {node: flwr.app.Message(packed(m), ids[node], "train") for node, m in messages.items() if node in ids}
        lost, late = NodeLost("not connected"), NodeLost(f"no reply after {self.wait:g} s")
        replies: dict[int, Message | UserError] = {node: late if node in sent else lost for node in messages}
        received = self.grid.send_and_receive([*sent.values()], timeout=self.wait) if sent else ()
        # sending gives a message its id; the reply for a node that has gone is the superlink's
        nodes = {message.metadata.message_id: node for node, message in sent.items()}
        for reply in received:
            node = nodes[reply.metadata.reply_to_message_id]
            if reply.has_content():
                replies[node] = unpacked(reply.content)
            else:
                replies[node] = (UserError if reply.error.code == FAILED else NodeLost)(folded(reply.error.reason))
        return replies

    def _ids(self, wanted: set[int]) -> dict[int, int]:
        """Returns Flower's ids of the nodes by number: of several with one number, the first one that replies."""
        end = time.monotonic() + self.wait
        while True:
            check_interruption()
            connected = {*self.grid.get_node_ids()}
            self._numbers = {node: number for node, number in self._numbers.items() if node in connected}
            for node, number in self._answers(connected - self._numbers.keys()).items():
                first = self._by_number().get(number)
                self._numbers[node] = number
                if first is not None and self._answers({first}).get(first) == number:
                    print(
                        f"node {number}: {first} and {node} connect as this node; {node} trains no clients while "
                        f"{first} replies (give each its own partition-id)"
                    )
                elif first is not None:
                    self._numbers[first] = self._numbers.pop(first)  # after the others
            ids = self._by_number()
            missing = wanted - ids.keys()
            if missing <= self._gone or time.monotonic() > end:
                self._gone = (self._gone - ids.keys()) | missing
                return ids
            time.sleep(1)

    def _by_number(self) -> dict[int, int]:
        return {number: node for node, number in reversed(self._numbers.items()) if number >= 0}

    def _answers(self, nodes: set[int]) -> dict[int, int]:
        """Returns the numbers of nodes; for one whose answer holds none it prints a line, and returns -1."""
        queries = [flwr.app.Message(RecordDict(), node, "query") for node in nodes]
        numbers = {}
        for reply in self.grid.send_and_receive(queries, timeout=min(self.wait, QUERY)) if queries else ():
            node = reply.metadata.src_node_id
            if reply.has_content():
                number: object = reply.content.config_records.get("node", {}).get("number")
                problem = f"its number is {number!r:.20}"
            elif reply.error.code == FAILED:
                number, problem = None, folded(reply.error.reason, 200)
            else:
                continue
            if type(number) is int and number >= 0:
                numbers[node] = number
            else:
                numbers[node] = -1
                print(f"Flower's node {node}: {problem}; it trains no clients (give partition-id a number from 0 on)")
        return numbers


class Records(UserDict[str, Mapping[str, Tensor]]):
    """States in the records of a node's context.

    Args:
        records: The context's state.
    """

    def __init__(self, records: RecordDict) -> None:
        self.data: Any = records

    def __getitem__(self, key: str) -> Mapping[str, Tensor]:
        return tensors(self.data[key])

    def __setitem__(self, key: str, state: Mapping[str, Tensor]) -> None:
        self.data[key] = array_record(state)


def packed(message: Message) -> RecordDict:
    """Returns a message as Flower's records."""
    records: dict[str, Any] = {name: array_record(values) for name, values in message.tensors.items()}
    return RecordDict({**records, **{name: ConfigRecord(dict(values)) for name, values in message.values.items()}})


def unpacked(records: RecordDict) -> Message:
    """Returns the message in Flower's records."""
    arrays = {name: tensors(record) for name, record in records.array_records.items()}
    return Message(arrays, {name: dict(record) for name, record in records.config_records.items()})


def array_record(values: Mapping[str, Tensor]) -> ArrayRecord:
    """Returns tensors on the CPU as Flower's record."""
    return ArrayRecord({name: Array(value.numpy()) for name, value in values.items()})


def tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Returns the tensors of Flower's record; bytes of another machine that are no tensor are left out."""
    decoded = {}
    for name, array in record.items():
        with suppress(Exception):
            decoded[name] = torch.from_numpy(array.numpy())
    return decoded
