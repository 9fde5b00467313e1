"""Digits (workload W3): seconds a round of our trainer beside a plain loop, interleaved, and the floor.

The plain loop does what the papers' repositories do: a deep copy of the model and a torch optimizer for every client.
Evaluation is left out on both sides. Run it while nothing else runs: ``make bench``.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning import IID, SAM, SGD, Digits, DigitsCNN, DigitsMLP, FedAvg, FederatedTrainer
from fl_lightning.callbacks import Callback

ROUNDS, COHORT, LR, RHO = 40, 10, 0.01, 0.05


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round_logged(self, trainer: FederatedTrainer, metrics: dict[str, float]) -> None:
        self.seconds.append(metrics["time/round_s"])


def ours(net: nn.Module, data: Digits, sam: bool) -> list[float]:
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=COHORT, eval_every=ROUNDS, accelerator="cpu", threads=1,
            callbacks=[times], default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(FedAvg(net=net, optimizer=SGD(lr=LR), ascent=SAM(RHO) if sam else None), data)
    return times.seconds[5:]


def plain(net: nn.Module, data: Digits, sam: bool) -> list[float]:
    loss, seconds = nn.CrossEntropyLoss(), []
    for t in range(ROUNDS):
        started = time.perf_counter()
        state, total = None, 0
        for client in torch.randperm(data.num_clients)[:COHORT].tolist():
            local = copy.deepcopy(net)
            sgd = torch.optim.SGD(local.parameters(), lr=LR)
            draw = torch.Generator().manual_seed(t * 1000 + client)
            for x, y in data.client_batches(client, 1, None, draw, torch.float32):
                sgd.zero_grad()
                loss(local(x), y).backward()
                if sam:
                    grads = [p.grad for p in local.parameters()]
                    scale = RHO / (torch.norm(torch.stack([g.norm() for g in grads])) + 1e-12)
                    steps = [scale * g for g in grads]
                    with torch.no_grad():
                        for p, e in zip(local.parameters(), steps, strict=True):
                            p.add_(e)
                    sgd.zero_grad()
                    loss(local(x), y).backward()
                    with torch.no_grad():
                        for p, e in zip(local.parameters(), steps, strict=True):
                            p.sub_(e)
                sgd.step()
            n = int(data.client_sizes[client])
            weighted = {k: v * n for k, v in local.state_dict().items()}
            state = weighted if state is None else {k: state[k] + v for k, v in weighted.items()}
            total += n
        net.load_state_dict({k: v / total for k, v in state.items()})
        seconds.append(time.perf_counter() - started)
    return seconds[5:]


def floor(net: nn.Module, data: Digits, sam: bool) -> float:
    """Seconds for the round's floating-point operations at the best matmul rate measured now."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    best = min(_timed(lambda: a @ b) for _ in range(50))
    rate = 2 * 512**3 / best
    counter = FlopCounterMode(display=False)
    with counter:
        for x, y in data.client_batches(0, 1, None, torch.Generator().manual_seed(0), torch.float32):
            nn.functional.cross_entropy(net(x), y).backward()
    return counter.get_total_flops() * COHORT * (2 if sam else 1) / rate


def _timed(f: object) -> float:
    started = time.perf_counter()
    f()  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    data = Digits(num_clients=50, partition=IID(), batch_size=16)
    data.setup()
    print(f"torch {torch.__version__}, 1 thread, load average before {os.getloadavg()[0]:.2f}")
    print("ms a round, medians of two interleaved runs each")
    print(f"{'net':10} {'method':7} {'plain loop':>10} {'ours':>8} {'ratio':>6} {'floor':>8} {'of floor':>8}")
    for net in (DigitsMLP, DigitsCNN):
        for sam in (False, True):
            torch.manual_seed(0)
            theirs, mine = [], []
            for _ in range(2):
                theirs += plain(net(), data, sam)
                mine += ours(net(), data, sam)
            a, b = statistics.median(theirs), statistics.median(mine)
            low = floor(net(), data, sam)
            print(
                f"{net.__name__:10} {'FedSAM' if sam else 'FedAvg':7} {a * 1e3:10.2f} {b * 1e3:8.2f} {a / b:6.2f} "
                f"{low * 1e3:8.3f} {low / b:8.1%}"
            )
    print(f"load average after {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
