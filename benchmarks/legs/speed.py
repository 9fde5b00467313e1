"""Local steps and clients a second: floors of the device, engines, cohorts, seeds as one program, and a plain loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from contest import plain
from contest.ours import OPTIONS, Data
from contest.workloads import WORKS, Work

import fl_lightning as fl
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.callbacks import Callback, Checkpoints
from fl_lightning.trainer.run import Run
from legs.items import Item, Results, accelerator, wait

ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "batched": {"engine": "batched"},
    "graphed": {"engine": "graphed"},
    "graphed, compiled": {"engine": "graphed", "compile": True},
}
FORMATS: dict[str, dict[str, Any]] = {"float32": {}, "tf32": {"tf32": True}, "bf16": {"precision": "bf16-mixed"}}
COHORTS = (5, 10, 20, 50, 100)
SEEDS = (1, 4, 16, 32)
ROUNDS = 3
"""Rounds that count; the one before them does not."""


def resnet() -> torch.nn.Module:
    return fl.ResNet18GN()


def works(device: str) -> dict[str, Work]:
    """The workloads of bench_engine.py on images, and a large net; in small, the digits."""
    if device == "cpu":
        return {"W3-MLP": replace(WORKS["W3-MLP"], cohort=3)}
    heavy = replace(WORKS["W2"], name="W2, ResNet18GN", ours="ResNet18GN", net=resnet)
    return {"W1": WORKS["W1"], "W2": WORKS["W2"], heavy.name: heavy}


def items(device: str, results: Results, _: list[str]) -> dict[str, Item]:
    """The measurements, in order of value."""
    small, chosen = device == "cpu", works(device)
    engines = {name: e for name, e in ENGINES.items() if not (small and e.get("compile"))}
    formats = {"float32": {}} if small else FORMATS
    found: dict[str, Item] = {"floors": partial(floors, device)}
    for name, work in chosen.items():
        found[f"{name}, plain loop"] = partial(loop, work, device)
        for label, options in formats.items():
            for engine, how in engines.items():
                found[f"{name}, {engine}, {label}"] = partial(ours, work, device, {**how, **options})
    first = next(iter(chosen))
    for cohort in (5,) if small else COHORTS:
        for engine in ("batched", "graphed"):
            work = replace(chosen[first], cohort=cohort)
            found[f"{first}, {engine}, cohort of {cohort}"] = partial(ours, work, device, ENGINES[engine])
    for seeds in (2,) if small else SEEDS:
        for engine in ("batched", "graphed"):
            found[f"{first}, {engine}, {seeds} seeds"] = partial(
                ours, chosen[first], device, ENGINES[engine], seeds=seeds
            )
    for name, work in chosen.items():
        for method in () if small else ("FedSAM", "FedSMOO", "FedGMT"):
            found[f"{name}, {method}"] = partial(ours, work, device, ENGINES["graphed"], method)
            found[f"{name}, {method}, plain loop"] = partial(loop, work, device, method)
    if find_spec("pfl"):
        found[f"{first}, pfl"] = partial(pfl, first)
    return found


class Times(Callback):
    """The seconds of each round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.rounds.append(metrics["time/round_s"])


def ours(work: Work, device: str, how: dict[str, Any], method: str = "FedAvg", seeds: int = 1) -> dict[str, Any]:
    """This package; with several seeds as one program."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    data, every = Data(work), [Times() for _ in range(seeds)]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            fl.FederatedTrainer(
                max_rounds=1 + ROUNDS, clients_per_round=work.cohort, local_steps=work.steps, eval_every=10**5,
                accelerator=accelerator(device), seed=seed, name=f"seed {seed}", default_root_dir=folder,
                callbacks=[times, Checkpoints(every_n_rounds=10**5)], enable_progress_bar=False, **how,
            )
            for seed, times in enumerate(every)
        ]  # fmt: skip
        sgd = fl.SGD(lr=work.lr, momentum=work.momentum)
        models = [getattr(fl, method)(net=getattr(fl, work.ours)(), optimizer=sgd, **OPTIONS[method]) for _ in trainers]
        started = time.perf_counter()
        if seeds == 1:
            trainers[0].fit(models[0], data)
        else:
            parallel_runs.fit(trainers, models, data)
        total = time.perf_counter() - started
    # several runs share their rounds: each sees the time of all
    seconds = median(max(rounds) for rounds in zip(*(times.rounds[1:] for times in every), strict=True))
    return {**rates(work, seconds, seeds), "first_s": total - ROUNDS * seconds, **memory(device)}


def loop(work: Work, device: str, method: str = "FedAvg") -> dict[str, Any]:
    """A deep copy and a torch optimizer for each client; the data lie on the device."""
    trainer = plain.METHODS[method](work.net().to(device), work)
    data = [(x.to(device), y.to(device)) for x, y in work.data()]

    def one() -> None:
        trainer.round(torch.randperm(work.clients)[: work.cohort].tolist(), data)

    one()
    return {**rates(work, median(timed(one, device) for _ in range(ROUNDS))), **memory(device)}


def pfl(name: str) -> dict[str, Any]:
    """pfl in a process of its own, on the device that it chooses."""
    from bench_engine import compete

    (player,) = compete({"pfl": {"kind": "peer_pfl", "work": name, "method": "FedAvg"}}, 2, 1, 1.0)
    return rates(WORKS[name], median(turn.seconds for turn in player.turns))


def rates(work: Work, seconds: float, seeds: int = 1) -> dict[str, float]:
    clients = seeds * work.cohort
    return {"round_s": seconds, "steps_per_s": clients * work.steps / seconds, "clients_per_s": clients / seconds}


def memory(device: str) -> dict[str, float]:
    return {"peak_gb": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def timed(do: Callable[[], object], device: str) -> float:
    wait(device)
    started = time.perf_counter()
    do()
    wait(device)
    return time.perf_counter() - started


def floors(device: str) -> dict[str, Any]:
    """Small operations a second, launched one by one and as a CUDA graph, and FLOP/s of a large matrix product."""
    x, count, size = torch.zeros(64, device=device), 1000, 512 if device == "cpu" else 8192

    def small() -> None:
        for _ in range(count):
            x.add_(1.0)

    timed(small, device)
    found = {"launches_per_s": count / min(timed(small, device) for _ in range(5))}
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            small()
        found["graphed_launches_per_s"] = count / min(timed(graph.replay, device) for _ in range(5))
    for label, dtype, tf32 in (
        ("float32", torch.float32, "highest"), ("tf32", torch.float32, "high"), ("bf16", torch.bfloat16, "highest")
    ):  # fmt: skip
        torch.set_float32_matmul_precision(tf32)
        a, b = torch.randn(2, size, size, device=device, dtype=dtype)
        timed(lambda a=a, b=b: a @ b, device)
        found[f"{label}_flops"] = 2 * size**3 / min(timed(lambda a=a, b=b: a @ b, device) for _ in range(5))
    torch.set_float32_matmul_precision("highest")
    return found
