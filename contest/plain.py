"""The loop that the papers' repositories write: a deep copy and a torch optimizer per client, tensor by tensor.

FedSMOO and FedGMT do it as the FL-SAM repository does: parameters are concatenated in every step, and duals enter as
dot products that go through autograd. Batches come from memory, cropped and flipped at once, which is generous: most
repositories transform sample by sample.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from benchmarks.harness import Turns
from contest.workloads import BETA, EMA, RHO, TAU, Work, work

Batches = Iterable[tuple[Tensor, Tensor]]


def run(settings: dict[str, Any], turns: Turns) -> None:
    workload = work(settings)
    method, data = METHODS[settings["method"]](workload.net(), workload), workload.data()
    turns.ready()
    while True:
        started = time.perf_counter()
        method.round(torch.randperm(workload.clients)[: workload.cohort].tolist(), data)
        turns.done(time.perf_counter() - started)


class FedAvg:
    """Averages state dicts by samples."""

    def __init__(self, net: nn.Module, work: Work) -> None:
        self.net, self.work = net, work

    def round(self, cohort: list[int], data: list[tuple[Tensor, Tensor]]) -> None:
        states, sizes = [], []
        for client in cohort:
            local = copy.deepcopy(self.net)
            self.train(client, local, self.optimizer(local), self.work.batches(*data[client]))
            states.append(local.state_dict())
            sizes.append(len(data[client][1]))
        total = sum(sizes)
        parts = [size / total for size in sizes]
        self.net.load_state_dict({k: sum(p * s[k] for p, s in zip(parts, states, strict=True)) for k in states[0]})

    def optimizer(self, local: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(local.parameters(), lr=self.work.lr, momentum=self.work.momentum)

    def train(self, client: int, local: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            optimizer.step()


class FedSAM(FedAvg):
    def train(self, client: int, local: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            grads = [p.grad for p in local.parameters()]
            scale = RHO / (torch.norm(torch.stack([g.norm() for g in grads])) + 1e-12)
            ascent = [scale * g for g in grads]
            move(local, ascent, 1)
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            move(local, ascent, -1)
            optimizer.step()


class Dual(FedAvg):
    """A dual vector for each client, and the server's, their mean."""

    def __init__(self, net: nn.Module, work: Work) -> None:
        super().__init__(net, work)
        self.w = vector(net).detach()
        self.zeros = torch.zeros_like(self.w)
        self.duals: dict[int, Tensor] = {}
        self.dual = self.zeros

    def round(self, cohort: list[int], data: list[tuple[Tensor, Tensor]]) -> None:
        ends = []
        for client in cohort:
            local = copy.deepcopy(self.net)
            self.train(client, local, self.optimizer(local), self.work.batches(*data[client]))
            ends.append(vector(local).detach())
            self.duals[client] = self.duals.get(client, self.zeros) - (ends[-1] - self.w) / BETA
        mean = torch.stack(ends).mean(0)
        self.dual = self.dual - len(cohort) / self.work.clients * (mean - self.w) / BETA
        self.w = mean - BETA * self.dual
        vector_to_parameters(self.w, self.net.parameters())


class FedSMOO(Dual):
    def __init__(self, net: nn.Module, work: Work) -> None:
        super().__init__(net, work)
        self.mus: dict[int, Tensor] = {}
        self.s = self.zeros

    def round(self, cohort: list[int], data: list[tuple[Tensor, Tensor]]) -> None:
        self.sent: list[Tensor] = []
        super().round(cohort, data)
        mean = torch.stack(self.sent).mean(0)
        self.s = RHO * mean / (mean.norm() + 1e-12)

    def train(self, client: int, local: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        dual, mu = self.duals.get(client, self.zeros), self.mus.get(client, self.zeros)
        shapes = [p.shape for p in local.parameters()]
        s_hat = self.zeros
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            delta = torch.cat([p.grad.reshape(-1) for p in local.parameters()]) - mu - self.s
            s_hat = RHO * delta / (delta.norm() + 1e-12)
            mu = mu + s_hat - self.s
            ascent = [v.view(shape) for v, shape in zip(s_hat.split([s.numel() for s in shapes]), shapes, strict=True)]
            move(local, ascent, 1)
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            move(local, ascent, -1)
            w = vector(local)
            (torch.sum(w * -dual) + torch.sum((w - self.w) ** 2) / (2 * BETA)).backward()
            optimizer.step()
        self.mus[client] = mu
        self.sent.append(mu - s_hat)


class FedGMT(Dual):
    def __init__(self, net: nn.Module, work: Work) -> None:
        super().__init__(net, work)
        self.teacher = copy.deepcopy(net)

    def round(self, cohort: list[int], data: list[tuple[Tensor, Tensor]]) -> None:
        super().round(cohort, data)
        vector_to_parameters(EMA * vector(self.teacher).detach() + (1 - EMA) * self.w, self.teacher.parameters())

    def train(self, client: int, local: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        dual, kl = self.duals.get(client, self.zeros), nn.KLDivLoss(reduction="batchmean")
        for x, y in batches:
            optimizer.zero_grad()
            with torch.no_grad():
                target = F.softmax(self.teacher(x) / TAU, dim=1)
            logits = local(x)
            loss = F.cross_entropy(logits, y) + TAU**2 * kl(F.log_softmax(logits / TAU, dim=1), target)
            (loss + torch.sum(vector(local) * -dual)).backward()
            optimizer.step()


METHODS: dict[str, type[FedAvg]] = {cls.__name__: cls for cls in (FedAvg, FedSAM, FedSMOO, FedGMT)}


def vector(net: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in net.parameters()])


@torch.no_grad()
def move(net: nn.Module, vectors: list[Tensor], sign: int) -> None:
    for p, v in zip(net.parameters(), vectors, strict=True):
        p.add_(v, alpha=sign)
