"""pfl (pfl-research): its PyTorch model, simulated backend and FederatedAveraging; it has no SAM.

Batches are cached by pfl, in one order and without augmentation, which costs it less than the others.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Turns
from contest.workloads import work


class Module(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Steps(TrainingProcessCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.turns.ready()
        self.started = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.turns.done(time.perf_counter() - self.started)
        self.started = time.perf_counter()
        return False, Metrics()


def run(settings: dict[str, Any], turns: Turns) -> None:
    workload = work(settings)
    clients = [PyTorchTensorDataset((x.float().div_(workload.scale), y)) for x, y in workload.data()]
    data = FederatedDataset(clients.__getitem__, get_user_sampler("random", list(range(workload.clients))))
    module = Module(workload.net())
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    never = 10**9
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=never,
            evaluation_frequency=never,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch),
        NNEvalHyperParams(local_batch_size=500),
        callbacks=[Steps(turns)],
        send_metrics_to_platform=False,
    )
