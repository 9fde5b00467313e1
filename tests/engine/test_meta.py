"""A round on torch's device ``meta``: its tensors have no values that one could read, and what lies elsewhere shows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import FedAvg, FederatedTrainer, LocalObjective, algorithms
from fl_lightning.core import FlatNet, State
from fl_lightning.engine import GraphedEngine
from fl_lightning.engine.record import Stage
from fl_lightning.engine.rounds import Drawn, Rounds, Table
from fl_lightning.trainer.cohort import Cohort
from tests.engine.test_engines import Net, data
from tests.problem import optimizer_for

META = torch.device("meta")


class Engine(GraphedEngine):
    """Keeps its record."""

    def step_stage(self, named: Any, ctx: Any) -> Stage:
        self.stage = super().step_stage(named, ctx)
        return self.stage


def from_the_host(objective: LocalObjective, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """Trains a round, its steps recorded; returns what the record takes from the host.

    Returns:
        What the record says of each value of the host, the operation that takes it, and how many values that takes.
    """
    trainer = FederatedTrainer(max_rounds=2, clients_per_round=3, local_steps=2, accelerator="cpu", threads=1)
    run = trainer.start(objective, data())
    cohort, server = Cohort.draw(run, 0), State({name: v.to(META) for name, v in run.server.items()})
    run.data.to(META)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # torch refuses this one question on meta
    engine = Engine(objective.to(META), FlatNet(objective.net), nullcontext)
    table = Table(dict.fromkeys(cohort.clients), run.clients.inits, server.w)
    rounds, drawn = (
        Rounds(engine, server.w, run.seed, run.fabric),
        Drawn(cohort.clients, cohort.contexts, 3, cohort.shares),
    )
    minibatches = run.minibatch_table(cohort.clients, cohort.contexts)
    (trained,) = rounds.train([drawn], minibatches, server, table)
    assert all(v.is_meta for v in trained.server.values())
    on_host, on_meta = (
        {node for node in engine.stage.graph.graph.nodes if node.meta.get("device") == device}
        for device in (torch.device("cpu"), torch.device(META))
    )
    pairs = [(node, user) for node in on_host for user in node.users if user in on_meta]
    return [(node.meta, user.target, len(user.all_input_nodes)) for node, user in pairs]


@pytest.mark.sampled(quick=8, slow=2)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_rounds_read_no_value_and_records_take_but_numbers_from_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA passes a number of the host to a kernel of two tensors, and copies it for `where`."""
    optimizer = optimizer_for(name, 0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
    for value, taken_by, inputs in from_the_host(getattr(algorithms, name)(Net(), optimizer=optimizer), monkeypatch):
        assert value["val"].ndim == 0 and inputs == 2 and "where" not in str(taken_by)


class Reads(FedAvg):
    """Reads a value in a local step."""

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return g * 2 if g.sum() > 0 else g, client


class Mixes(FedAvg):
    """Takes a tensor of the host in a local step."""

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return torch.where(g > 0, g, torch.tensor(2.0)), client


def test_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    ((value, taken_by, _),) = from_the_host(Mixes(Net()), monkeypatch)
    assert value["device"].type == "cpu" and "where" in str(taken_by)
    with pytest.raises(RuntimeError, match="depends on values of tensors"):
        from_the_host(Reads(Net()), monkeypatch)
