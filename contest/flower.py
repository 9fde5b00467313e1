"""Flower: its simulation on Ray, with one client on every core at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Turns
from contest import workloads


class Steps(FedAvg):
    """FedAvg that reports every round's time: from the choice of the clients to the end of aggregation."""

    def __init__(self, turns: Turns, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.turns = turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.started = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(server_round, replies)
        if result[0] is None:
            raise RuntimeError("no client has answered")
        self.turns.done(time.perf_counter() - self.started)
        return result


@cache
def client_data(name: str) -> list[tuple[Tensor, Tensor]]:
    """Loads the data, once in each of Ray's processes."""
    torch.set_num_threads(1)
    return workloads.WORKS[name].data()


def run(settings: dict[str, Any], turns: Turns) -> None:
    name, work = settings["work"], workloads.work(settings)
    server, client = ServerApp(), ClientApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        share = work.cohort / work.clients
        strategy = Steps(turns, fraction_train=share, fraction_evaluate=0.0, min_train_nodes=work.cohort,
                         min_available_nodes=work.clients)  # fmt: skip
        turns.ready()
        strategy.start(grid, ArrayRecord(work.net().state_dict()), num_rounds=10**6)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        work = workloads.WORKS[name]
        x, y = client_data(name)[int(context.node_config["partition-id"])]
        net = work.net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=work.lr, momentum=work.momentum)
        for a, b in work.batches(x, y):
            optimizer.zero_grad()
            F.cross_entropy(net(a), b).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(RecordDict(content), reply_to=message)

    resources = {"init_args": {"num_cpus": work.threads}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=work.clients, backend_config=resources)
