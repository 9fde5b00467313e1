"""The device against the CPU: all algorithms, resume, flatness, precisions, processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fl_lightning as fl
from fl_lightning import algorithms
from fl_lightning.trainer import measurements
from fl_lightning.trainer.run import Run
from legs.items import Item, accelerator

ENGINES: dict[str, dict[str, Any]] = {
    **{name: {"engine": name} for name in ("sequential", "batched", "graphed")},
    "compiled": {"engine": "graphed", "compile": True},
}  # fmt: skip
FIRST = ("FedAvg", "FedSAM", "FedGloSS", "FedSMOO", "FedGMT", "FedGF")
EXACT = 1e-9
"""Largest relative difference in float64."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {}, "tf32": {"tf32": True}, "bf16-mixed": {"precision": "bf16-mixed"}
}  # fmt: skip
MEASURES: dict[str, Callable[[], measurements.Measure]] = {
    "LambdaMax": measurements.LambdaMax,
    "HessianTrace": partial(measurements.HessianTrace, probes=12),
    "Sharpness": measurements.Sharpness,
    "Discrepancy": measurements.Discrepancy,
    "AdaptiveSharpness": measurements.AdaptiveSharpness,
    "LPF": measurements.LPF,
    "ClientLambdaMax": measurements.ClientLambdaMax,
}


def items(device: str, end: float, _: list[str]) -> dict[str, Item]:
    """The checks, in order of value; compiling takes longest, so all but two of its checks are last."""
    rest = [name for name in algorithms.__all__ if name not in FIRST]
    *engines, compiled = ENGINES
    if device == "cpu":
        return {
            **{f"FedAvg, {engine}": partial(compare, "FedAvg", engine, device) for engine in engines},
            "resume, sequential": partial(resume, "sequential", device),
            **{f"precision, {name}": partial(precision, name, device) for name in PRECISIONS},
            "precision, set beforehand": partial(set_beforehand, device),
            **{f"flatness, {name}": partial(flatness, name, device) for name in ("LambdaMax", "Discrepancy")},
            "two processes, gloo": partial(processes, 2, "gloo", device),
        }
    return {
        **{f"{name}, {engine}": partial(compare, name, engine, device) for name in FIRST for engine in engines},
        **{f"resume, {engine}": partial(resume, engine, device) for engine in engines},
        **{f"precision, {name}": partial(precision, name, device) for name in PRECISIONS},
        "precision, set beforehand": partial(set_beforehand, device),
        **{f"flatness, {name}": partial(flatness, name, device) for name in MEASURES},
        "two processes, gloo": partial(processes, 2, "gloo", device),
        "one process, nccl": partial(processes, 1, "nccl", device),
        "FedSAM, compiled": partial(compare, "FedSAM", compiled, device),
        "resume, compiled": partial(resume, compiled, device),
        **{f"{name}, {engine}": partial(compare, name, engine, device) for name in rest for engine in engines},
        **{f"{name}, {compiled}": partial(compare, name, compiled, device) for name in (*FIRST, *rest)},
    }


class Net(torch.nn.Sequential):
    """Convolution, GroupNorm and two linear layers: 5,000 weights."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            torch.nn.Conv2d(3, 16, 3), torch.nn.GroupNorm(4, 16), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(144, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5),
        )  # fmt: skip


def data() -> fl.Arrays:
    """Clients with 3 to 31 images."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256, (n, 8, 8, 3), np.uint8), np.arange(n) % 5) for n in (19, 7, 31, 12, 3, 24, 40)]
    return fl.Arrays(client_arrays=pairs[:-1], test=pairs[-1], batch_size=8, augment=fl.Augment(crop=1))


def train(device: str, name: str = "FedSMOO", rounds: int = 3, ckpt_path: str | None = None, **options: Any) -> Run:
    """A short run with momentum, weight decay, clipping and a decaying learning rate."""
    settings = {"precision": "64-true", "engine": "sequential", "default_root_dir": "runs", "name": "run", **options}
    trainer = fl.FederatedTrainer(
        max_rounds=rounds, clients_per_round=4, accelerator=accelerator(device), enable_progress_bar=False, **settings
    )
    own = name in ("FedAdamW", "FedMuon", "LocalMuon")  # an optimizer
    sgd = None if own else fl.SGD(0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
    return trainer.fit(getattr(algorithms, name)(net=Net(), optimizer=sgd), data(), ckpt_path)


@contextmanager
def folder() -> Any:
    with tempfile.TemporaryDirectory() as path:
        yield path


@cache
def exact(name: str = "FedSMOO") -> Run:
    """A run in float64 on the CPU, one client after another."""
    with folder() as path:
        return train("cpu", name, default_root_dir=path)


def compare(name: str, engine: str, device: str) -> dict[str, Any]:
    """The largest difference of the server's vectors to those of the CPU, relative to the largest entry; float64."""
    cpu = exact(name).server
    with folder() as path:
        there = train(device, name, default_root_dir=path, **ENGINES[engine]).server
    pairs = [(there[n].cpu().double(), cpu[n].double()) for n in cpu]
    return verdict([float((x - y).abs().max() / y.abs().max().clamp(min=1e-3)) for x, y in pairs], EXACT)


def verdict(differences: list[float], limit: float) -> dict[str, Any]:
    """The largest of some differences, which is NaN if one is, and whether it is small enough."""
    difference = float(np.max(differences))
    return {"ok": difference <= limit, "difference": difference}


def resume(engine: str, device: str) -> dict[str, Any]:
    """Bit for bit: a run repeated, and one that is resumed, with rows in memory and on disk."""
    with folder() as path:
        options = {**ENGINES[engine], "precision": "32-true"}
        whole, again = (train(device, rounds=4, default_root_dir=f"{path}/{i}", **options) for i in range(2))
        same = {"repeated": again}
        for where, memory in (("in memory", 1.0), ("on disk", 0.0)):
            options |= {"default_root_dir": f"{path}/{where}", "client_memory": memory}
            half = train(device, rounds=2, **options)
            same[where] = train(device, rounds=4, ckpt_path=str(half.folder.last), **options)
        found = {
            where: all(torch.equal(run.server[n], whole.server[n]) for n in whole.server) for where, run in same.items()
        }
    return {"ok": all(found.values()), **found}


def precision(name: str, device: str) -> dict[str, Any]:
    """The update of three rounds against that in float64 on the CPU."""
    with folder() as path:
        other = train(device, default_root_dir=path, **{"precision": "32-true", **PRECISIONS[name]})
    start = exact().clients.w0.double()
    moved, update = other.server.w.cpu().double() - start, exact().server.w - start
    return {"difference": float((moved - update).norm() / update.norm()), "loss": other.metrics["client/train/loss"]}


def set_beforehand(device: str) -> dict[str, Any]:
    """A program that has chosen the precision of matrix products is left with its choice, and a run has its own."""
    found = {}
    for value in ("high", "medium"):
        torch.set_float32_matmul_precision(value)
        with folder() as path:
            train(device, precision="32-true", default_root_dir=path)
        found[value] = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return {"ok": all(key == value for key, value in found.items()), **found}


def flatness(name: str, device: str) -> dict[str, Any]:
    """The largest relative difference of a measure's numbers to those of the CPU, float64; residuals are rounding."""
    values = []
    for where in ("cpu", device):
        with folder() as path:
            run = train(
                where, "FedAvg", 1, default_root_dir=path, callbacks=[fl.FlatnessMonitor(1, [MEASURES[name]()])]
            )
            values.append({n: v for n, v in run.metrics.items() if n.startswith("flatness/")})
    cpu, there = values
    numbers = [n for n in cpu if not n.endswith("_residual")]
    return verdict([abs(there[n] - cpu[n]) / max(abs(cpu[n]), 1e-9) for n in numbers], 1e-6)


def processes(count: int, backend: str, device: str) -> dict[str, Any]:
    """Processes that share one device, against one alone; NCCL takes one process a device."""
    with folder() as path:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "gpu"}
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, "-m", "legs.correctness", device, backend, path]
        home = Path(__file__).parents[1]
        children = [
            subprocess.Popen(command, cwd=home, env={**env, "RANK": str(rank), "GROUP_RANK": str(rank)})
            for rank in range(count)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(f"exit codes {codes} of the processes; the log has their errors")
        found = torch.load(f"{path}/w.pt", weights_only=True)
    alone = exact("FedAvg").server.w
    return verdict([float((found - alone).abs().max() / alone.abs().max())], EXACT)


def process(device: str, backend: str, path: str) -> None:
    """One of them: it trains, and calls every collective of the package, which a run of one process leaves out."""
    from lightning.fabric.strategies import DDPStrategy

    trainer = fl.FederatedTrainer(
        max_rounds=3, clients_per_round=4, accelerator=accelerator(device), strategy="ddp", devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]), precision="64-true", engine="sequential", deterministic=False,
        default_root_dir=path, enable_progress_bar=False,
    )  # fmt: skip
    assert isinstance(trainer.fabric.strategy, DDPStrategy)
    trainer.fabric.strategy._process_group_backend = backend
    sgd = fl.SGD(0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
    run = trainer.fit(fl.FedAvg(net=Net(), optimizer=sgd), data())
    collectives(run.fabric.device)
    if run.fabric.is_global_zero:
        torch.save(run.server.w.cpu(), f"{path}/w.pt")


def collectives(device: torch.device) -> None:
    """Fails if one of the backend's collectives returns something else than the processes have sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, ranks = torch.full((3,), float(rank), device=device), [torch.full((3,), float(i)) for i in range(world)]
    everyone = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(got.cpu(), sent) for got, sent in zip(everyone, ranks, strict=True))
    gathered = [torch.empty_like(mine) for _ in ranks] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    assert gathered is None or all(torch.equal(got.cpu(), sent) for got, sent in zip(gathered, ranks, strict=True))
    scattered = torch.empty_like(mine)
    dist.scatter(scattered, [each.to(device) for each in ranks] if rank == 0 else None, src=0)
    assert torch.equal(scattered, mine)
    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total.cpu(), sum(ranks, torch.zeros(3)))
    dist.broadcast(mine, src=0)
    assert torch.equal(mine.cpu(), ranks[0])


if __name__ == "__main__":
    process(*sys.argv[1:])
