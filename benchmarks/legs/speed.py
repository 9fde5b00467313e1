"""Local steps and clients a second: floors of the device, engines, cohorts, seeds as one program, and a plain loop."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any

import torch
from contest import plain
from contest.ours import OPTIONS, Data
from contest.workloads import WORKS, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fl_lightning as fl
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.callbacks import Callback, Checkpoints
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.environment import float32_products
from legs.items import Item, accelerator, wait

PLAIN = "plain loop"
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "batched": {"engine": "batched"},
    "graphed": {"engine": "graphed"},
    "compiled": {"engine": "graphed", "compile": True},
}
FORMATS: dict[str, dict[str, Any]] = {"float32": {}, "tf32": {"tf32": True}, "bf16": {"precision": "bf16-mixed"}}
COHORTS = (5, 10, 20, 50, 100)
SEEDS = (1, 4, 16, 32)
ROUNDS = {"W1": 20, "W3-MLP": 20}
"""Rounds that count, 3 of other works; the one before them does not."""


def resnet() -> torch.nn.Module:
    return fl.ResNet18GN()


def works(device: str) -> dict[str, Work]:
    """The works of bench_engine.py on images, with 10 local steps of W2, and one with a large net; or the digits."""
    if device == "cpu":
        return {"W3-MLP": replace(WORKS["W3-MLP"], cohort=3)}
    w2 = replace(WORKS["W2"], steps=10)
    heavy = replace(w2, name="W2, ResNet18GN", ours="ResNet18GN", net=resnet)
    return {work.name: work for work in (WORKS["W1"], w2, heavy)}


def items(device: str, end: float, _: list[str]) -> dict[str, Item]:
    """The measurements, in order of value; compiling takes longest, and is last."""
    small, chosen = device == "cpu", works(device)
    *engines, compiled = ENGINES
    found: dict[str, Item] = {"floors": partial(floors, device)}

    def add(work: Work, who: str, *, method: str = "FedAvg", form: str = "float32", seeds: int = 1) -> None:
        parts = [work.name, method, who, form, f"cohort of {work.cohort}", *([f"{seeds} seeds"] if seeds > 1 else [])]
        do = partial(loop, form=form) if who == PLAIN else partial(ours, engine=who, form=form, seeds=seeds)
        found[", ".join(parts)] = partial(do, work, device, method)

    for work in chosen.values():
        for who in (PLAIN, *engines):
            add(work, who)
    first = next(iter(chosen.values()))
    for cohort in (5,) if small else COHORTS:
        for who in engines[1:]:
            add(replace(first, cohort=cohort), who)
    for seeds in (2,) if small else SEEDS:
        for who in engines[1:]:
            add(first, who, seeds=seeds)
    if small:
        return found
    for work in chosen.values():
        for method in ("FedSAM", "FedSMOO", "FedGMT"):
            for who in (PLAIN, engines[-1]):
                add(work, who, method=method)
    for form in ("tf32", "bf16"):
        for work in chosen.values():
            for who in (*([PLAIN] if form == "tf32" else []), *reversed(engines)):
                add(work, who, form=form)
    if find_spec("pfl"):
        found |= {f"{name}, pfl": partial(pfl, name) for name in ("W1", "W2")}
    for form in FORMATS:
        for work in chosen.values():
            add(work, compiled, form=form)
    return found


class Times(Callback):
    """The seconds of each round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.rounds.append(metrics["time/round_s"])


def ours(work: Work, device: str, method: str, engine: str, form: str, seeds: int) -> dict[str, Any]:
    """This package; with several seeds as one program."""
    forget(device)
    data, every, rounds = Data(work), [Times() for _ in range(seeds)], ROUNDS.get(work.name, 3)
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            fl.FederatedTrainer(
                max_rounds=1 + rounds, clients_per_round=work.cohort, local_steps=work.steps, eval_every=10**5,
                accelerator=accelerator(device), seed=seed, name=f"seed {seed}", default_root_dir=folder,
                callbacks=[times, Checkpoints(every_n_rounds=10**5)], enable_progress_bar=False,
                **ENGINES[engine], **FORMATS[form],
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
    about = {"work": work.name, "method": method, "who": engine, "form": form, "seeds": seeds}
    return {**about, **rates(work, seconds, seeds), "first_s": total - rounds * seconds, **memory(device)}


def forget(device: str) -> None:
    """Frees what the item before has left, and measures the peak of memory from here on."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def loop(work: Work, device: str, method: str, form: str) -> dict[str, Any]:
    """A deep copy and a torch optimizer for each client; the data lie on the device."""
    forget(device)
    trainer = plain.METHODS[method](work.net().to(device), work)
    data = [(x.to(device), y.to(device)) for x, y in work.data()]

    def one() -> None:
        trainer.round(torch.randperm(work.clients)[: work.cohort].tolist(), data)

    with float32_products(form == "tf32"):
        one()
        seconds = median(timed(one, device) for _ in range(ROUNDS.get(work.name, 3)))
    about = {"work": work.name, "method": method, "who": PLAIN, "form": form, "seeds": 1}
    return {**about, **rates(work, seconds), **memory(device), **cost(trainer, work, data[0])}


class Operations(TorchDispatchMode):
    """Counts what is not a view: about the kernels of a step, of which some operations have several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def cost(trainer: plain.FedAvg, work: Work, client: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    """FLOPs and operations of one local step."""
    local = copy.deepcopy(trainer.net)
    batches = list(islice(work.batches(*client), 1))
    with FlopCounterMode(display=False) as flops:
        trainer.train(0, local, trainer.optimizer(local), batches)
    with Operations() as operations:
        trainer.train(0, local, trainer.optimizer(local), batches)
    return {"step_flops": flops.get_total_flops(), "step_operations": operations.count}


def pfl(name: str) -> dict[str, Any]:
    """pfl in a process of its own, on the device that it chooses."""
    from bench_engine import compete

    work = works("cuda")[name]
    spec = {"kind": "peer_pfl", "work": name, "method": "FedAvg", "steps": work.steps}
    (player,) = compete({"pfl": spec}, 2, 1, 1.0)
    about = {"work": name, "method": "FedAvg", "who": "pfl", "form": "float32", "seeds": 1}
    return {**about, **rates(work, median(turn.seconds for turn in player.turns))}


def rates(work: Work, seconds: float, seeds: int = 1) -> dict[str, float]:
    clients = seeds * work.cohort
    return {
        "cohort": work.cohort, "round_s": seconds, "steps": work.steps, "steps_per_s": clients * work.steps / seconds,
        "clients_per_s": clients / seconds,
    }  # fmt: skip


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
