"""The server's end: a run whose clients train on nodes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Init, State, UserError, ensure, require
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import ENGINES, Engine, EngineName, Job, LocalResult
from fl_lightning.flower.messages import CONTEXT, Message, Send, Value, checksum, row_of, version_in
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.storage.client_store import ClientStore
from fl_lightning.trainer.trainer import FederatedTrainer

KEPT = "state on its node"
"""Name of the client state that the server keeps: the version of the state on the node, see `row_of`."""


def fit(
    send: Send,
    nodes: int | None,
    trainer: FederatedTrainer,
    model: LocalObjective,
    datamodule: FederatedDataModule,
    ckpt_path: str | None = None,
) -> Run:
    """Runs ``trainer.fit`` with clients that train on nodes; the weights are equal to the bit.

    Args:
        send: Carries messages to nodes.
        nodes: Number of nodes; node p has the clients k with k mod nodes = p. None: one node for each client.
        trainer: The trainer.
        model: The local objective.
        datamodule: The data; the server uses only the number of each client's samples.
        ckpt_path: As for ``trainer.fit``.

    Returns:
        The run.

    Raises:
        UserError: As ``trainer.fit``; or if an option does not fit, a node does not answer, or a node has lost a
            state. The last complete round is saved.
    """
    check(trainer, datamodule)
    if trainer.engine == "auto":
        trainer.engine = "sequential"
    trainer.make_run = partial(RemoteRun, send, nodes)
    return trainer.fit(model, datamodule, ckpt_path)


def check(trainer: FederatedTrainer, datamodule: FederatedDataModule) -> None:
    """Checks that clients can train on nodes.

    Raises:
        UserError: If an option needs all clients in one process.
    """
    engine = trainer.engine
    ensure(
        not (engine != "auto" and ENGINES[engine].trains_several) and not trainer.compile,
        f"trainer.engine = {engine}: a node trains one client after another; set it to sequential, compile to false",
    )
    ensure(
        trainer.fabric.world_size == 1,
        f"trainer.devices = {trainer.fabric.world_size}: the server is one process; set devices and num_nodes to 1",
    )
    ensure(not datamodule.stream, "data.stream = true: samples are read on the nodes; set it to false")
    for callback in trainer.callbacks:
        name = type(callback).__name__
        ensure(
            type(callback).on_local_end is Callback.on_local_end,
            f"trainer.callbacks: {name} needs local models, which stay on the nodes; leave it out (for flatness, "
            "measure the checkpoints)",
        )


def check_nodes(nodes: int | None, datamodule: FederatedDataModule) -> None:
    """Checks the number of nodes; None means one for each client.

    Raises:
        UserError: If there are more nodes than clients.
    """
    m = datamodule.num_clients
    require(nodes is None or 1 <= nodes <= m, "nodes", nodes, f"there are {m} clients; choose from 1 to {m}")


class RemoteRun(Run):
    """A run whose clients train on nodes.

    Args:
        send: Carries messages to nodes.
        nodes: Number of nodes; None: one for each client.
        *args: Arguments of `Run`.

    Raises:
        UserError: As `Run`; or if there are more nodes than clients.
    """

    def __init__(self, send: Send, nodes: int | None, *args: Any) -> None:
        self.send = send
        super().__init__(*args)
        check_nodes(nodes, self.data)
        self.nodes = self.data.num_clients if nodes is None else nodes
        self.clients: Versions = Versions(self.objective, self.server.w)

    @property
    def how_to_continue(self) -> str:
        return f"flwr run APP --stream --run-config 'ckpt-path=\"{self.folder.last}\"'"

    def make_engine(self, name: EngineName) -> Engine:
        return RemoteEngine(self)


class Versions(ClientStore):
    """The valid versions of the clients' states; the states themselves are on the nodes.

    A checkpoint, or the transaction of a round, restores the versions and thereby the states: a node keeps the version
    of the last checkpoint until the next one is written.

    Args:
        objective: The local objective; if its clients keep no state, there are no versions either.
        w0: The initial model, ``(d,)``.

    Attributes:
        owner: Distinguishes the run from others of the same name on the same nodes; checkpoints keep it.
    """

    def __init__(self, objective: LocalObjective, w0: Tensor) -> None:
        inits: dict[str, Init] = {KEPT: lambda w0: w0.new_zeros(3)} if objective.client_inits() else {}
        super().__init__(inits, w0)
        self.owner = uuid4().hex[:12]
        self._saved: dict[int, str] = {}
        self._being_saved: dict[int, str] = {}

    def versions(self, job: Job) -> dict[str, Value]:
        """Returns the version that a client trains from, and the versions that its node keeps in reserve."""
        row = self.row(job.client)  # a round that fails in its second phase returns to this row
        kept = {self._saved.get(job.client, ""), version_in(row[KEPT]) if row else ""} - {""}
        return {"version": version_in(job.state[KEPT]) if self.inits else "", "keep": " ".join(sorted(kept))}

    def state_dict(self, pin: bool = False) -> dict[str, Any]:
        self._being_saved = self._saved if pin else self._all()
        return {**super().state_dict(pin), "owner": self.owner}

    def saved(self) -> None:
        super().saved()
        self._saved = self._being_saved

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        super().load_state_dict(state, folder)
        self.owner = state.get("owner", self.owner)  # a checkpoint of `fit` has none
        self._saved = self._all()

    def _all(self) -> dict[int, str]:
        return {client: version_in(row[KEPT]) for client, row in self.rows().items()}


class RemoteEngine(Engine):
    """Trains on the nodes: each phase sends one message to every node that has clients of the cohort.

    Args:
        run: The run.
    """

    def __init__(self, run: RemoteRun) -> None:
        super().__init__(run.objective, run.net, run.fabric.autocast)
        self.run = run

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        by_node: dict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            by_node[job.client % self.run.nodes].append(job)
        asked = {node: self._message(its) for node, its in by_node.items()}
        replies = self.run.send(asked) if asked else {}
        for job in jobs:
            node = job.client % self.run.nodes
            ensure(node in replies, f"node {node}: no reply; start it, then continue with ckpt_path = last")
            yield self._result(job, replies[node])

    def _message(self, jobs: Sequence[Job]) -> Message:
        run, received = self.run, {name: value.cpu() for name, value in jobs[0].received.items()}
        about: dict[str, Value] = {
            "run": f"{run.folder.label.replace('/', '-')}-{run.clients.owner}",
            "w0": checksum(run.clients.w0),
            "frozen": run.frozen,
            "nodes": run.nodes,
        }
        clients: dict[str, Mapping[str, Value]] = {}
        for job in jobs:
            context = {name: getattr(job.ctx, name) for name in CONTEXT}
            clients[f"client.{job.client}"] = {**context, "seed": job.seed, **run.clients.versions(job)}
        return Message({"down": received}, {"round": about, **clients})

    def _result(self, job: Job, reply: Message) -> LocalResult:
        names, like = self.objective.wire[1], job.received.w
        try:
            values, arrived = reply.values[f"client.{job.client}"], reply.tensors[f"up.{job.client}"]
            upload = {name: arrived[name].to(like) for name in names}
            loss, finite = like.new_tensor(float(values["loss"])), State(upload).finite()
            # a state that is not finite stays on its node; NaN makes the server refuse it like any other
            row = row_of(str(values["version"]), like) if self.run.clients.inits else None
            state = State({} if row is None else {KEPT: row if values["finite"] else row * torch.nan})
        except (KeyError, ValueError) as error:
            raise UserError(
                f"client {job.client}: the reply of its node lacks {error}; the node needs the same version of "
                "fl_lightning and the same config"
            ) from None
        # the local model is not on the wire, and nothing on the server reads it
        w = upload.get("w", job.received.w)
        return LocalResult(job.client, job.received, w, upload, state, loss, job.ctx, finite & state.finite())
