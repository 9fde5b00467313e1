"""The device against the CPU: all algorithms, resume, nets, features, flatness, precisions, processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fl_lightning as fl
from benchmarks.harness import ROOT
from benchmarks.legs import features
from benchmarks.legs.features import EXACT, agreement, algorithm, compare, data, exact, folder, results, train, verdict
from benchmarks.legs.items import ENGINES, Item, Task, accelerator
from fl_lightning import algorithms
from fl_lightning.trainer import measurements

FIRST = ("FedAvg", "FedSAM", "FedGloSS", "FedSMOO", "FedGMT", "FedGF")
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
PATIENCE = 90.0
"""Seconds that processes have which talk to each other."""
SMALL = (
    "longer blocks, SCAFFOLD, rows on disk, graphed",
    "records dropped by turns, graphed",
    "memory littered, FedSMOO, graphed",
    "net LEAFLSTM, batched",
    "net with BatchNorm, average, sequential",
    "net Frozen, graphed",
    "streamed, graphed",
    "compressed by topk, graphed",
    "rule MultiKrum, graphed",
    "privacy GaussianPrivacy, graphed",
    "faults, graphed",
    "clients evaluated, graphed",
    "same bits again, sequential",
    "rounds as one program, batched",
    "two seeds at once, batched",
    "landscape",
)
"""Checks of nets and features that the CPU does, one of a kind."""


def items(task: Task) -> dict[str, Item]:
    """Returns the checks, in order of value; compiling takes longest, so all but one of its checks are last."""
    device = task.device
    further = features.items(device)
    precisions: dict[str, Item] = {
        **{f"precision, {name}": partial(precision, name, device) for name in PRECISIONS},
        **{
            f"precision, bf16-mixed, {method}, {engine}": partial(precision, "bf16-mixed", device, method, engine)
            for method in ("FedGMT", "MOON")
            for engine in ("graphed", "batched", "sequential")
        },
        "precision, set beforehand": partial(set_beforehand, device),
    }
    if device == "cpu":
        return {
            **of_algorithms(("FedAvg",), ("graphed", "batched", "sequential"), device),
            "resume, sequential": partial(resume, "sequential", device),
            **{name: further[name] for name in SMALL},
            **precisions,
            **{f"flatness, {name}": partial(flatness, name, device) for name in ("LambdaMax", "Discrepancy")},
            "two processes, gloo": partial(processes, 2, "gloo", device),
        }
    rest = [name for name in algorithms.__all__ if name not in FIRST]
    return {
        **of_algorithms(FIRST, ("graphed",), device),
        **{f"resume, {engine}": partial(resume, engine, device) for engine in ("graphed", "batched", "sequential")},
        **further,
        **precisions,
        **{f"flatness, {name}": partial(flatness, name, device) for name in MEASURES},
        **of_algorithms(rest, ("graphed",), device),
        "one process, nccl": partial(processes, 1, "nccl", device),
        "two processes, gloo": partial(processes, 2, "gloo", device),
        **of_algorithms(FIRST, ("sequential", "batched"), device),
        **of_algorithms(("FedSAM",), ("compiled",), device),
        **of_algorithms(rest, ("batched", "sequential"), device),
        "resume, compiled": partial(resume, "compiled", device),
        **of_algorithms((*FIRST, *rest), ("compiled",), device),
    }


def of_algorithms(names: Iterable[str], engines: Iterable[str], device: str) -> dict[str, Item]:
    return {f"{name}, {engine}": partial(compare, name, engine, device) for engine in engines for name in names}


def resume(engine: str, device: str) -> dict[str, Any]:
    """Compares bits: of a run repeated, and of one that is resumed, with rows in memory and on disk."""
    with folder() as path:
        options = {**ENGINES[engine], "precision": "32-true"}
        uninterrupted, repeated = (results(train(device, f"{path}/{i}", max_rounds=4, **options)) for i in range(2))
        runs = {"repeated": repeated}
        for where, memory in (("in memory", 1.0), ("on disk", 0.0)):
            options |= {"client_memory": memory}
            half = train(device, f"{path}/{where}", max_rounds=2, **options)
            last = str(half.folder.last)
            runs[where] = results(train(device, f"{path}/{where}", ckpt_path=last, max_rounds=4, **options))
        checks = {where: agreement(run, uninterrupted, limit=0.0)["ok"] for where, run in runs.items()}
    return {"ok": all(checks.values()), **checks}


def precision(name: str, device: str, method: str = "FedSMOO", engine: str = "sequential") -> dict[str, Any]:
    """Compares the update of three rounds with that in float64 on the CPU."""
    options = {"precision": "32-true", **PRECISIONS[name], **ENGINES[engine]}
    with folder() as path:
        actual = results(train(device, path, method, **options))
    start, end = exact(method)["w0"], exact(method)["server.w"]
    difference = (actual["server.w"] - end).norm() / (end - start).norm()
    return {"difference": float(difference), "loss": float(actual["client/train/loss"])}


def set_beforehand(device: str) -> dict[str, Any]:
    """Checks that a program's own precision of matrix products stays its choice, beside that of a run."""
    precisions = {}
    for value in ("high", "medium"):
        torch.set_float32_matmul_precision(value)
        with folder() as path:
            train(device, path, precision="32-true")
        precisions[value] = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return {"ok": all(key == value for key, value in precisions.items()), **precisions}


def flatness(name: str, device: str) -> dict[str, Any]:
    """Finds the largest relative difference of a measure's numbers to the CPU's, float64; residuals are rounding."""
    values = []
    for where in ("cpu", device):
        with folder() as path:
            monitor = fl.FlatnessMonitor(1, [MEASURES[name]()])
            run = train(where, path, "FedAvg", max_rounds=1, callbacks=[monitor])
            values.append({n: v for n, v in run.metrics.items() if n.startswith("flatness/")})
    expected, actual = values
    numbers = [n for n in expected if not n.endswith("_residual")]
    return verdict([abs(actual[n] - expected[n]) / max(abs(expected[n]), 1e-9) for n in numbers], 1e-6)


def processes(count: int, backend: str, device: str) -> dict[str, Any]:
    """Compares processes that share one device with one alone; NCCL takes one process a device."""
    with folder() as path:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "gpu"}
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, "-m", "benchmarks.legs.correctness", device, backend, path]
        children, logs = [], [Path(path, f"{rank}.log") for rank in range(count)]
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                environment = {**env, "RANK": str(rank), "GROUP_RANK": str(rank)}
                children.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
        until = time.monotonic() + PATIENCE
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        if any(child.poll() is None for child in children):
            time.sleep(2)  # another one may be about to say why
        codes = [child.poll() for child in children]
        for child in children:
            child.kill()
            child.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
        print(*outputs, sep="\n")
        if any(code != 0 for code in codes):
            raise RuntimeError(f"exit codes {codes} (None: it hung): {' | '.join(map(last_error, outputs))}")
        weights = torch.load(f"{path}/w.pt", weights_only=True)
    alone = exact("FedAvg")["server.w"]
    return verdict([float((weights - alone).abs().max() / alone.abs().max())], EXACT)


def last_error(output: str) -> str:
    """Returns the last line of an output that names an error, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return ([line for line in lines if "Error" in line] or lines)[-1][:140]


def process(device: str, backend: str, path: str) -> None:
    """Trains as one of them, and calls every collective of the package, which a run of one process leaves out."""
    from lightning.fabric.strategies import DDPStrategy

    trainer = fl.FederatedTrainer(
        max_rounds=3, clients_per_round=4, accelerator=accelerator(device), strategy="ddp", devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]), precision="64-true", engine="sequential", deterministic=False,
        default_root_dir=path, enable_progress_bar=False,
    )  # fmt: skip
    assert isinstance(trainer.fabric.strategy, DDPStrategy)
    trainer.fabric.strategy._process_group_backend = backend
    run = trainer.fit(algorithm("FedAvg"), data())
    collectives(run.fabric.device)
    if run.fabric.is_global_zero:
        torch.save(run.server.w.cpu(), f"{path}/w.pt")


def collectives(device: torch.device) -> None:
    """Calls each of the backend's collectives; fails if one returns something else than the processes have sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, ranks = torch.full((3,), float(rank), device=device), [torch.full((3,), float(i)) for i in range(world)]
    everyone = [torch.empty_like(mine) for _ in ranks]
    with collective("all_gather"):
        dist.all_gather(everyone, mine)
        assert all(torch.equal(got.cpu(), sent) for got, sent in zip(everyone, ranks, strict=True))
    gathered = [torch.empty_like(mine) for _ in ranks] if rank == 0 else None
    with collective("gather"):
        dist.gather(mine, gathered, dst=0)
        assert gathered is None or all(torch.equal(got.cpu(), sent) for got, sent in zip(gathered, ranks, strict=True))
    scattered = torch.empty_like(mine)
    with collective("scatter"):
        dist.scatter(scattered, [tensor.to(device) for tensor in ranks] if rank == 0 else None, src=0)
        assert torch.equal(scattered, mine)
    total = mine.clone()
    with collective("all_reduce"):
        dist.all_reduce(total)
        assert torch.equal(total.cpu(), sum(ranks, torch.zeros(3)))
    with collective("broadcast"):
        dist.broadcast(mine, src=0)
        assert torch.equal(mine.cpu(), ranks[0])


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Names a collective before it is called, since it may hang, and if it fails."""
    print("calls", name, flush=True)
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or ["it returns something else than was sent"])[0]
        raise RuntimeError(f"{name} of {dist.get_backend()}: {type(error).__name__}: {reason:.200}") from error


if __name__ == "__main__":
    process(*sys.argv[1:])
