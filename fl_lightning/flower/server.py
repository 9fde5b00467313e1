"""The server's end: a run whose clients train on nodes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from fl_lightning import FedDyn, FlexLoRA, LocalObjective
from fl_lightning.core import Draws, Init, State, Upload, UserError, ensure, grouped, require
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Engine, EngineName, Job, LocalResult, engine_class
from fl_lightning.flower.node import CONTEXT, Message, NodeLost, Send, Value, checksum, row_of, version_in
from fl_lightning.trainer import LINES, Callback, ClientStore, FederatedTrainer, Run, listed

KEPT = "state on its node"
"""Name of the client state that the server keeps: the version of the state on the node, see `row_of`."""


def fit(
    send: Send,
    nodes: int | None,
    trainer: FederatedTrainer,
    model: LocalObjective,
    datamodule: FederatedDataModule,
    ckpt_path: str | None = None,
    min_replies: int | None = None,
) -> Run:
    """Runs ``trainer.fit`` with clients that train on nodes; the weights are equal to the bit.

    Args:
        send: Carries messages to nodes.
        nodes: Number of nodes; node p has the clients k with k mod nodes = p. None: one node for each client.
        trainer: The trainer.
        model: The local objective.
        datamodule: The data; the server uses only the number of each client's samples.
        ckpt_path: As for ``trainer.fit``.
        min_replies: Clients that must reply in a phase, or all of a smaller cohort; the others count as dropped. None:
            every client must reply.

    Returns:
        The run.

    Raises:
        UserError: As ``trainer.fit``; or if an option does not fit, or too few clients reply: their node does not
            answer, or has lost a state. The last complete round is saved.
    """
    check(trainer, model, datamodule)
    if trainer.engine == "auto":
        trainer.engine = "sequential"
    require(min_replies is None or min_replies >= 1, "min_replies", min_replies, "give a number of clients from 1 on")
    trainer.make_run = partial(RemoteRun, send, nodes, min_replies)
    return trainer.fit(model, datamodule, ckpt_path)


def check(trainer: FederatedTrainer, model: LocalObjective, datamodule: FederatedDataModule) -> None:
    """Checks that clients can train on nodes.

    Raises:
        UserError: If an option needs all clients in one process.
    """
    engine = trainer.engine
    ensure(
        not (engine != "auto" and engine_class(engine).trains_several) and not trainer.compile,
        f"trainer.engine = {engine}: a node trains one client after another; set it to sequential, compile to false",
    )
    ensure(
        trainer.fabric.world_size == 1,
        f"trainer.devices = {trainer.fabric.world_size}: the server is one process; set devices and num_nodes to 1",
    )
    ensure(
        not getattr(model, "virtual", False),
        "model.absent = virtual: clients' duals change after the round, when they are on the nodes; set it to kept",
    )
    ensure(
        type(model).client_round_end in (LocalObjective.client_round_end, FedDyn.client_round_end),
        f"model = {type(model).__name__}: its client_round_end changes states after the round, when they are on the "
        "nodes; train it without Flower",
    )
    ensure(
        not model.recalled,
        f"model = {type(model).__name__}: its server remembers each client's last model, which Flower's server does "
        "not; train it without Flower",
    )
    ensure(
        not any(isinstance(part, FlexLoRA) for part in model.parts),
        "model.parts: FlexLoRA: Flower sends its products instead of the factors; train it without Flower",
    )
    ensure(
        not model.personal,
        f"model.parts = {', '.join(type(part).__name__ for part in model.parts)}: with Flower no client keeps a model "
        "of its own yet; train without Flower, or leave the part out",
    )
    ensure(not datamodule.stream, "data.stream = true: samples are read on the nodes; set it to false")
    ensure(trainer.clock is None, "trainer.clock: nodes train in the time that they need; set it to null")
    for callback in trainer.callbacks:
        ensure(
            type(callback).on_local_end is Callback.on_local_end,
            f"trainer.callbacks: {type(callback).__name__} needs local models, which stay on the nodes; leave it out "
            "(for flatness, measure the checkpoints)",
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
        min_replies: As for `fit`.
        *args: Arguments of `Run`.

    Raises:
        UserError: As `Run`; or if there are more nodes than clients.
    """

    def __init__(self, send: Send, nodes: int | None, min_replies: int | None, *args: Any) -> None:
        self.send, self.min_replies = send, min_replies
        super().__init__(*args)
        check_nodes(nodes, self.data)
        self.nodes = self.data.num_clients if nodes is None else nodes
        self.clients: Versions = Versions(self.objective, self.server.w)

    @property
    def failure_kinds(self) -> tuple[str, ...]:
        kinds = super().failure_kinds
        return kinds if self.min_replies is None else tuple(dict.fromkeys([*kinds, "dropped"]))

    @property
    def how_to_continue(self) -> list[str]:
        return ["flwr", "run", "APP", "--stream", "--run-config", f'ckpt-path="{self.folder.last}"']

    def make_engine(self, name: EngineName, compile: bool = True) -> Engine:
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
        versions = {self._saved.get(job.client, ""), version_in(row[KEPT]) if row else ""} - {""}
        return {"version": version_in(job.state[KEPT]) if self.inits else "", "keep": " ".join(sorted(versions))}

    def state_dict(self, pin: bool | Path = False) -> dict[str, Any]:
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
        for part in self.objective.parts:
            part.packs = True
        self._lost: set[int] = set()
        self._refused: set[int] = set()

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        by_node = grouped((job.client % self.run.nodes, job) for job in jobs)
        messages = {node: self._message(node_jobs) for node, node_jobs in by_node.items()}
        answers = self.run.send(messages) if messages else {}
        replies = {node: answers.get(node, NodeLost("no reply")) for node in messages}
        received = {node: reply for node, reply in replies.items() if isinstance(reply, Message)}
        failed = {node: reply for node, reply in replies.items() if isinstance(reply, UserError)}
        self._check(jobs, sum(len(by_node[node]) for node in received), failed)
        yield from (
            self._result(job, received[node]) for job in jobs if (node := job.client % self.run.nodes) in received
        )

    def _check(self, jobs: Sequence[Job], replies: int, failed: Mapping[int, UserError]) -> None:
        """Checks that enough clients have replied, and prints which nodes are newly lost, or are back.

        Raises:
            UserError: If they have not.
        """
        required = len(jobs) if self.run.min_replies is None else min(self.run.min_replies, len(jobs))
        if replies < required:
            lost = all(isinstance(error, NodeLost) for error in failed.values())
            remedy = "; start it again, then continue with ckpt-path = last, or allow it by min-replies" if lost else ""
            note = "" if required == len(jobs) else f" ({replies} clients have replied, min-replies is {required})"
            raise UserError(f"{_named(failed)}{note}{remedy}")
        nodes, t = {job.client % self.run.nodes for job in jobs}, self.run.rounds_done
        if new := {node: error for node, error in failed.items() if node not in self._lost}:
            self.run.fabric.print(f"round {t + 1}: {_named(new)}; until it replies again, its clients are dropped")
        if again := sorted(self._lost & (nodes - failed.keys())):
            self.run.fabric.print(f"round {t + 1}: {listed('node', again)}: replies again")
        self._lost = (self._lost - nodes) | failed.keys()

    def _message(self, jobs: Sequence[Job]) -> Message:
        run, received = self.run, {name: value.cpu() for name, value in jobs[0].received.items()}
        about: dict[str, Value] = {
            "run": f"{run.folder.label.replace('/', '-')}-{run.clients.owner}",
            "w0": checksum(run.clients.w0),
            "frozen": run.frozen,
            "nodes": run.nodes,
        }
        clients = {
            f"client.{job.client}": {
                **{name: getattr(job.ctx, name) for name in CONTEXT},
                "seed": job.seed,
                **run.clients.versions(job),
            }
            for job in jobs
        }
        return Message({"down": received}, {"round": about, **clients})

    def _result(self, job: Job, reply: Message) -> LocalResult:
        """Returns what a client has replied; where it is not an upload of this run, NaN, which the server refuses."""
        like, contract = job.received.w, self.run.contract[job.ctx.phase]
        loss, upload = like.new_tensor(torch.nan), dict[str, Tensor]()
        state = State({KEPT: like.new_full((3,), torch.nan)} if self.run.clients.inits else {})
        try:
            values, arrived = reply.values[f"client.{job.client}"], reply.tensors[f"up.{job.client}"]
            upload = self._decoded(
                {name: _checked(name, arrived[name], wanted) for name, wanted in contract.upload.items()}, job
            )
            loss = like.new_tensor(float(values["loss"]))
            # a state that is not finite stays on its node
            if self.run.clients.inits and values["finite"]:
                state = State({KEPT: row_of(_version(values["version"]), like)})
        except (KeyError, TypeError, ValueError) as error:
            upload = {name: like.new_full(v.shape, torch.nan) for name, v in contract.arrived.items()}
            if job.client not in self._refused and len(self._refused) < LINES:
                cause = f"its reply lacks {error}" if isinstance(error, KeyError) else str(error)
                self.run.fabric.print(
                    f"client {job.client}: {cause}; refused (do server and node have the same fl_lightning and config?)"
                )
                self._refused.add(job.client)
        # the local model is not on the wire, and nothing on the server reads it
        w, finite = upload.get("w", like), State(upload).finite() & state.finite()
        return LocalResult(job.client, job.received, w, upload, state, loss, job.ctx, finite)

    def _decoded(self, upload: Upload, job: Job) -> Upload:
        """Returns what has travelled as the upload of a client."""
        draws = self.draws([job])
        draws.move_to(Draws.END)
        for part in self.objective.parts:
            upload = part.arrived(upload, job.received, replace(job.ctx, draws=draws))
        return {name: value.to(job.received.w) for name, value in upload.items()}


def _checked(name: str, value: Tensor, wanted: Tensor) -> Tensor:
    """Returns an uploaded tensor of the shape, dtype and layout of another one.

    Raises:
        ValueError: If it has others.
    """
    actual, expected = ((tuple(x.shape), x.dtype, x.layout) for x in (value, wanted))
    if actual != expected:
        texts = [" ".join([*map(str, form[: 2 + (actual[2] != expected[2])])]) for form in (actual, expected)]
        raise ValueError(f"its upload {name} is {texts[0]}, not {texts[1]}".replace("torch.", ""))
    return value


def _version(value: object) -> str:
    """Returns the version of a client's state in a reply.

    Raises:
        ValueError: If it is none.
    """
    if not re.fullmatch("[0-9a-f]{8}", str(value)):
        raise ValueError(f"its version {value!s:.20} is not one of a state")
    return str(value)


def _named(failed: Mapping[int, UserError]) -> str:
    """Returns which nodes have failed, and why."""
    by_reason = grouped((str(error), node) for node, error in sorted(failed.items()))
    return "; ".join(f"{listed('node', nodes)}: {reason}" for reason, nodes in by_reason.items())
