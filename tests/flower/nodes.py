"""A server and its nodes in one process, and the run that the trainer makes of the same config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_lightning import FedAvg
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.core import State, UserError
from fl_lightning.flower import server
from fl_lightning.flower.node import Folder, Kept, Message, Node, version_in
from fl_lightning.trainer.run import Run
from tests.runs import DIGITS

SHORT = ["--trainer.local_steps=3", "--trainer.eval_every=4"]


def build(root: Path, *args: str) -> Any:
    """Returns trainer, model and data of a small run on the digits."""
    objects = parsed(*args).build()
    objects.trainer.default_root_dir = root
    return objects


@cache
def parsed(*args: str) -> FederatedCLI:
    """Parses once, since that takes longer than such a run."""
    return FederatedCLI("fit", *DIGITS, *SHORT, *args)


@cache
def loaded(*args: str) -> Run:
    """Returns the run of a node, which never starts."""
    objects = build(Path("unused"), *args)
    run: Run = objects.trainer.load(objects.model, objects.data, None)
    return run


def trained(root: Path, *args: str, ckpt_path: str | None = None) -> Run:
    """Returns the run that the trainer makes."""
    objects = build(root, *args)
    return objects.trainer.fit(objects.model, objects.data, ckpt_path)


class BatchNormed(nn.Sequential):
    """The digits' net with running statistics."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Noting(FedAvg):
    """Its clients keep the server's new model."""

    client_state = {"seen": "zeros"}

    def client_round_end(self, client: State, server: State) -> State:
        return client.replace(seen=server.w)


class Nodes:
    """Nodes in this process, which share model and data, and what was sent to them and back.

    Args:
        root: Folder of their files.
        args: The config.
        number: Their number.
        stored: Whether they keep states in files; else in memory.
    """

    def __init__(self, root: Path, *args: str, number: int = 2, stored: bool = False) -> None:
        self.root, self.args, self.number = root, args, number
        objects = build(root / "unused", *args)
        run = objects.trainer.load(objects.model, objects.data, None)
        self.nodes = [Node(run, p) for p in range(number)]
        self.kept: list[Kept] = [Folder(root / f"node{p}") if stored else {} for p in range(number)]
        self.log: list[tuple[Message, Message]] = []

    def __call__(self, messages: Mapping[int, Message]) -> dict[int, Message | UserError]:
        replies: dict[int, Any] = {p: self.nodes[p].answer(message, self.kept[p]) for p, message in messages.items()}
        self.log += [(message, replies[p]) for p, message in messages.items()]
        return replies

    def fit(self, ckpt_path: str | None = None, *args: str, min_replies: int | None = None) -> Run:
        """Returns the server's run."""
        objects = build(self.root, *self.args, *args)
        return server.fit(self, self.number, objects.trainer, objects.model, objects.data, ckpt_path, min_replies)

    def states(self, run: Run) -> dict[int, dict[str, torch.Tensor]]:
        """Returns the clients' states that count for the server, by client."""
        versions = {k: version_in(row[server.KEPT]) for k, row in run.clients.rows().items()}
        return {k: dict(self.kept[k % self.number][f"{k}.{version}"]) for k, version in versions.items()}
