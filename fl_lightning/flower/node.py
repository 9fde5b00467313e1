"""The node's end: a node trains its clients and keeps their states; the messages between it and the server."""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

from torch import Tensor

from fl_lightning.core import ClientContext, State, UserError, ensure, files
from fl_lightning.engine import Job
from fl_lightning.trainer import Run

Value: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Message:
    """A message to a node, or its reply.

    Attributes:
        tensors: Named tensors on the CPU, by record. A message to a node has ``down``, the state that the algorithm
            sends; a reply has ``up.<k>``, the upload of client k.
        values: Plain values, by record. A message to a node has ``round``, and ``client.<k>`` for each of its clients
            that trains; a reply has ``client.<k>``.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Mapping[str, Value]]


class NodeLost(UserError):
    """A node is not there, or does not reply."""


Send: TypeAlias = Callable[[Mapping[int, Message]], Mapping[int, Message | UserError]]
"""Carries messages to nodes (by their numbers, from 0) and returns their replies, or why a node has none."""

NOT_SENT = {"flat", "class_counts", "draws", "logs", "drawn"}
"""What a node makes itself of a context, or has no use for, since its server has rounds."""
CONTEXT = tuple(field.name for field in fields(ClientContext) if field.name not in NOT_SENT)
"""Attributes of a client's context that go over the wire."""


def checksum(*tensors: Tensor) -> int:
    """Returns the CRC-32 of the tensors' bytes."""
    crc = 0
    for tensor in tensors:
        crc = crc32(tensor.detach().cpu().numpy().tobytes(), crc)
    return crc


# The version of a client's state is the CRC-32 of its content as 8 hexadecimal digits; "" before first contact


def version_of(state: Mapping[str, Tensor]) -> str:
    """Returns the version of a state."""
    return f"{checksum(*(state[name] for name in sorted(state))):08x}"


def row_of(version: str, like: Tensor) -> Tensor:
    """Returns a version as numbers ``(3,)``, exact in float32, which the server keeps as the client's state."""
    return like.new_tensor([1, *divmod(int(version, 16), 1 << 16)])


def version_in(row: Tensor) -> str:
    """Returns the version in a row of `row_of`; "" for zeros."""
    known, high, low = map(int, row.tolist())
    return f"{(high << 16) + low:08x}" if known else ""


Kept = MutableMapping[str, Mapping[str, Tensor]]
"""The states of a node's clients: named tensors by ``<client>.<version>``."""


class Node:
    """Answers the server's messages.

    Args:
        run: A run with the server's config that never starts. It holds the model, its device and this node's data.
        number: The node's number, from 0.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        for part in run.objective.parts:
            part.packs = True
        self.engine = run.make_engine("debug" if run.settings.engine == "debug" else "sequential")
        self._w0 = checksum(run.server.w)

    def answer(self, message: Message, states: Kept) -> Message:
        """Trains the clients that a message names, one after another, and stores their new states as versions.

        Args:
            message: The server's message.
            states: The states that this node keeps for the server's run.

        Returns:
            The reply, with each client's upload.

        Raises:
            UserError: If node and server differ, or a state is missing. The transport adds the node's number.
        """
        about, run = message.values["round"], self.run
        same = about["w0"] == self._w0 and about["frozen"] == run.frozen
        ensure(
            same and message.tensors["down"].keys() == {*run.objective.wire[0]},
            "makes another model than the server; give both the same config, init_weights and versions of torch",
        )
        received = State({name: value.to(run.server.w) for name, value in message.tensors["down"].items()})
        uploads: dict[str, Mapping[str, Tensor]] = {}
        replies: dict[str, Mapping[str, Value]] = {}
        with run.settings.environment():
            for record in [name for name in message.values if name != "round"]:
                client = int(record.removeprefix("client."))
                ensure(
                    client < run.data.num_clients and client % int(about["nodes"]) == self.number,
                    f"client {client}: not one of node {self.number}; give {about['nodes']} nodes their partition-id",
                )
                upload, replies[record] = self._train(client, received, message.values[record], states)
                uploads[f"up.{client}"] = upload
        return Message(uploads, replies)

    def _train(
        self, client: int, received: State, values: Mapping[str, Value], states: Kept
    ) -> tuple[dict[str, Tensor], dict[str, Value]]:
        run = self.run
        ctx = ClientContext(flat=run.objective.flat, **{name: values[name] for name in CONTEXT})  # type: ignore[arg-type]
        samples = int(run.data.client_sizes[client])
        ensure(
            ctx.n_k == samples,
            f"client {client}: has {samples} samples here, {ctx.n_k} on the server; give both the same data",
        )
        row = None if values["version"] == "" else self._row(client, str(values["version"]), states)
        fresh = State.initial(run.objective.scratch_inits(), run.clients.w0, received.w)
        state = run.clients.get(client, received.w, row) | fresh
        job = Job(client, state, received, ctx, run.minibatches(client, ctx), int(values["seed"]))
        (result,) = self.engine.train([job])
        keep = {str(values["version"]), *str(values["keep"]).split()}
        version = _stored(client, result.state, keep, states) if result.state else ""
        upload = {name: value.cpu() for name, value in result.upload.items()}
        return upload, {"loss": float(result.loss), "finite": bool(result.finite), "version": version}

    def _row(self, client: int, version: str, states: Kept) -> State:
        key = f"{client}.{version}"
        ensure(
            key in states,
            f"client {client}: its node has no state {version}; continue with the node's own folder and "
            "ckpt_path = last, or start again",
        )
        state = states[key]
        ensure(
            {name: tuple(value.shape) for name, value in state.items()} == self.run.clients.shapes,
            f"client {client}: its state {version} is that of another algorithm or optimizer; continue with the run's "
            "own config",
        )
        return State({name: value.to(self.run.server.w) for name, value in state.items()})


def _stored(client: int, state: State, keep: set[str], states: Kept) -> str:
    """Stores a client's new state, removes all versions but this one and those in ``keep``, and returns its version."""
    tensors = {name: value.cpu() for name, value in state.items()}
    version = version_of(tensors)
    states[f"{client}.{version}"] = tensors
    needed = {f"{client}.{needed_version}" for needed_version in {version, *keep}}
    for old in [key for key in states if key.startswith(f"{client}.") and key not in needed]:
        del states[old]
    return version


class Folder(Kept):
    """States in files, each written atomically and with a checksum.

    Args:
        path: The folder; it is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, key: str) -> Mapping[str, Tensor]:
        try:
            return dict(files.load(self._file(key)))
        except FileNotFoundError:
            raise KeyError(key) from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._file(key)}: {error}; this client's state is lost, restore it or start again"
            ) from None

    def __setitem__(self, key: str, state: Mapping[str, Tensor]) -> None:
        files.save(self._file(key), dict(state))

    def __delitem__(self, key: str) -> None:
        self._file(key).unlink()

    def __contains__(self, key: object) -> bool:
        return self._file(str(key)).is_file()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self.path.glob("*.state")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, key: str) -> Path:
        ensure(re.fullmatch(r"\d+\.[0-9a-f]{8}", key) is not None, f"state {key[:40]!r}: not a client and a version")
        return self.path / f"{key}.state"
