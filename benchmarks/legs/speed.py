"""Local steps and clients a second: floors, engines, a plain loop, JAX, several seeds."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fl_lightning as fl
from benchmarks.harness import Case, Row, compete, row
from benchmarks.legs.items import ENGINES, Item, Task, accelerator, synchronize
from contest import plain
from contest.ours import Data, model_of
from contest.workloads import WORKS, Work
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.callbacks import Callback, Checkpoints
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.environment import float32_products

PLAIN, JAX, FREE = "plain loop", "JAX", "nondeterministic cuDNN"
FORMATS: dict[str, dict[str, Any]] = {"float32": {}, "tf32": {"tf32": True}, "bf16": {"precision": "bf16-mixed"}}
ORDER = ("graphed", PLAIN, "sequential", "batched")
ROUNDS = {"W1": 20, "W2": 3, "W3-MLP": 20}
"""Rounds that count, one of other works."""
WARM = 2
"""Rounds that do not count: the steps of a run's first round are recorded apart, those of the others in the second."""
BRIEF = 2
"""Local steps of a warm-up that is no whole round."""
JAX_SECONDS = 2.5
"""After which JAX begins no round."""


def resnet() -> nn.Module:
    return fl.ResNet18GN()


HEAVY = replace(WORKS["W2"], name="W2, ResNet18GN", ours="ResNet18GN", net=resnet)


def items(task: Task) -> dict[str, Item]:
    """Returns the measurements, in order of value; compiling takes longest, and is last."""
    chosen = List(task.device)
    return in_small(chosen) if task.device == "cpu" else in_full(chosen)


class List:
    """The measurements so far; it begins with the floors."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.found: dict[str, Item] = {"floors": partial(floors, device)}

    def add(self, work: Work, who: str, form: str, method: str = "FedAvg", seeds: int = 1, free: bool = False) -> None:
        """Adds a plain loop, or an engine, with several seeds as one program or with ``free`` cuDNN."""
        parts = [work.name, method, who, form, f"cohort of {work.cohort}"]
        parts += [f"{seeds} seeds"] * (seeds > 1) + [FREE] * free
        do = loop if who == PLAIN else partial(ours, engine=who, seeds=seeds, free=free)
        self.found[", ".join(parts)] = partial(do, work, self.device, method, form=form)

    def add_jax(self, work: Work, form: str, vmap: bool = True) -> None:
        """Adds JAX where it is installed, with the clients at once or one after another."""
        if find_spec("jax"):
            who = JAX if vmap else f"{JAX}, one by one"
            self.found[f"{work.name}, FedAvg, {who}, {form}"] = partial(jax_rounds, work, self.device, who, form)


def in_full(chosen: List) -> dict[str, Item]:
    w1, add = WORKS["W1"], chosen.add
    for form, contestants in (
        ("float32", (PLAIN, JAX, "sequential", "batched", "graphed")),
        ("bf16", ("graphed", PLAIN, JAX, "batched", "sequential")),
        ("tf32", ("graphed", PLAIN, "batched")),
    ):
        for who in contestants:
            chosen.add_jax(w1, form) if who == JAX else add(w1, who, form)
    for who in ORDER:
        add(HEAVY, who, "bf16")
    for form, method, who in product(("bf16", "float32"), ("FedSAM", "FedSMOO", "FedGMT"), ORDER[:2]):
        add(w1, who, form, method)
    for form in ("bf16", "float32"):
        add(w1, "graphed", form, free=True)
        for who in ("graphed", "batched"):
            add(w1, who, form, seeds=16)
        for cohort, who in product((100, 20), ("graphed", "batched")):
            add(replace(w1, cohort=cohort), who, form)
        chosen.add_jax(w1, form, vmap=False)
    chosen.add_jax(w1, "tf32")
    for work, form, who in product((WORKS["W2"], HEAVY), ("bf16", "tf32", "float32"), ORDER):
        add(work, who, form)
    if find_spec("pfl"):
        chosen.found |= {f"{name}, pfl": partial(pfl, WORKS[name]) for name in ("W1", "W2")}
    for form, work in product(("bf16", "float32", "tf32"), (w1, WORKS["W2"], HEAVY)):
        add(work, "compiled", form)
    return chosen.found


def in_small(chosen: List) -> dict[str, Item]:
    """Returns something of every kind but compiled records, to try the program."""
    mlp, cnn = (replace(WORKS[name], cohort=3) for name in ("W3-MLP", "W3-CNN"))
    add = chosen.add
    for who in (PLAIN, "sequential", "batched", "graphed"):
        add(mlp, who, "float32")
    for form, who in product(("bf16", "tf32"), ORDER[:2]):
        add(mlp, who, form)
    for who in ORDER[:3]:
        add(cnn, who, "float32")
    for who in ORDER[:2]:
        add(mlp, who, "float32", "FedSMOO")
    add(mlp, "graphed", "float32", free=True)
    add(mlp, "graphed", "float32", seeds=2)
    small = replace(WORKS["W1"], name="W1, small", clients=4, cohort=2, samples=10, batch=4, steps=4)
    chosen.add_jax(small, "bf16")
    return chosen.found


class Times(Callback):
    """The seconds of each round; those of a program are alike. It ends the run.

    Args:
        warm: First rounds, which do not count: each runs by itself.
        count: Those that do.

    Attributes:
        rounds: The seconds of all rounds.
        logged: When one or more rounds had ended, and the number of all until then.
        longest: Most rounds of a program.
    """

    def __init__(self, warm: int, count: int) -> None:
        self.warm, self.last = warm, warm + count
        self.rounds: list[float] = []
        self.logged: list[tuple[float, int]] = []
        self.longest = 0

    def needs_round(self, t: int) -> bool:
        return t < self.warm or t + 1 >= self.last

    def on_round_end(self, run: Run) -> None:
        run.should_stop = run.rounds_done >= self.last

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        new = run.rounds_done - len(self.rounds)
        self.rounds += [metrics["time/round_s"]] * new
        self.logged.append((time.perf_counter(), run.rounds_done))
        self.longest = max(self.longest, new)

    def wall(self) -> dict[str, float]:
        """Returns the mean time of a round with all between two; without the last one, which is evaluated."""
        between = self.logged[self.warm - 1 : -1] if self.warm else []
        if len(between) < 2:
            return {}
        (begun, first), (ended, last) = between[0], between[-1]
        return {"wall_round_s": (ended - begun) / (last - first)}


def ours(work: Work, device: str, method: str, engine: str, form: str, seeds: int, free: bool) -> dict[str, Any]:
    """Times this package; several seeds are one program.

    Rounds warm up, or a run of few steps where only one round counts and nothing is recorded.
    """
    forget(device)
    rounds, brief = ROUNDS.get(work.name, 1), work.name not in ROUNDS and engine in ("sequential", "batched")
    train = partial(fit, device=device, method=method, engine=engine, form=form, seeds=seeds, deterministic=not free)
    started = time.perf_counter()
    if brief:
        train(replace(work, steps=BRIEF), warm=0, count=1)
    timers = train(work, warm=0 if brief else WARM, count=rounds)
    total = time.perf_counter() - started
    # several runs share their rounds: each sees the time of all
    seconds = median(max(durations) for durations in zip(*(times.rounds[-rounds:] for times in timers), strict=True))
    who = f"{engine}, {FREE}" if free else engine
    return {
        "work": work.name, "method": method, "who": who, "form": form, "seeds": seeds, **rates(work, seconds, seeds),
        "first_s": total - rounds * seconds, "program": timers[0].longest, **timers[0].wall(), **memory(device),
    }  # fmt: skip


def fit(
    work: Work,
    *,
    device: str,
    method: str,
    engine: str,
    form: str,
    seeds: int,
    deterministic: bool,
    warm: int,
    count: int,
) -> list[Times]:
    """Trains some rounds with every seed; returns the times that each run sees.

    With one process, ``deterministic`` only chooses cuDNN's kernels.
    """
    timers = [Times(warm, count) for _ in range(seeds)]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            fl.FederatedTrainer(
                max_rounds=10**5, clients_per_round=work.cohort, local_steps=work.steps, eval_every=10**5,
                accelerator=accelerator(device), seed=seed, name=f"seed {seed}", default_root_dir=folder,
                callbacks=[times, Checkpoints(every_n_rounds=10**5)], enable_progress_bar=False,
                deterministic=deterministic, **ENGINES[engine], **FORMATS[form],
            )
            for seed, times in enumerate(timers)
        ]  # fmt: skip
        models = [model_of(work, method) for _ in trainers]
        if seeds == 1:
            trainers[0].fit(models[0], Data(work))
        else:
            parallel_runs.fit(trainers, models, Data(work))
    return timers


def forget(device: str) -> None:
    """Frees what the item before has left, and measures the peak of memory from here on."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Mixed(nn.Module):
    """A net under autocast, which is left before the optimizer's step, as it keeps the weights that it has cast."""

    def __init__(self, net: nn.Module, device: str) -> None:
        super().__init__()
        self.net, self.device = net, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.net(x).float()


def loop(work: Work, device: str, method: str, form: str) -> dict[str, Any]:
    """Times a loop with a deep copy and a torch optimizer for each client; the data lie on the device."""
    forget(device)
    net, data = work.net().to(device), [(x.to(device), y.to(device)) for x, y in work.data()]
    if form == "bf16":
        net = Mixed(net, device)

    def one_round(trainer: plain.FedAvg) -> None:
        trainer.round(torch.randperm(work.clients)[: work.cohort].tolist(), data)

    with float32_products(form == "tf32"):
        one_round(plain.METHODS[method](net, replace(work, steps=BRIEF)))
        trainer = plain.METHODS[method](net, work)
        seconds = median(timed(partial(one_round, trainer), device) for _ in range(ROUNDS.get(work.name, 1)))
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
    """Returns FLOPs and operations of one local step."""
    local = copy.deepcopy(trainer.net)
    batches = list(islice(work.batches(*client), 1))
    with FlopCounterMode(display=False) as flops:
        trainer.train(0, local, trainer.optimizer(local), batches)
    with Operations() as operations:
        trainer.train(0, local, trainer.optimizer(local), batches)
    return {"step_flops": flops.get_total_flops(), "step_operations": operations.count}


def jax_rounds(work: Work, device: str, who: str, form: str) -> dict[str, Any]:
    """Times JAX on the same device."""
    spec = {name: getattr(work, name) for name in ("clients", "cohort", "samples", "batch", "steps")}
    cells = peer(work, "JAX", JAX_SECONDS, **spec, device=device, form=form, vmap=who == JAX)
    peak = {"peak_gb": cells["device_gb"]} if "device_gb" in cells else {}
    return {
        **cells["about"],
        "who": who,
        "rounds": cells["units"],
        "first_s": cells["first_s"],
        "jax": cells["jax"],
        **peak,
    }


def pfl(work: Work) -> dict[str, Any]:
    """Times pfl, on the device that it chooses."""
    return peer(work, "pfl", 1.0, steps=work.steps)["about"]


def peer(work: Work, who: str, seconds: float, form: str = "float32", **settings: Any) -> Row:
    """Times a contestant in a process of its own; what is reported of every one is ``about``.

    Raises:
        RuntimeError: If it fails.
    """
    forget(settings.get("device", ""))
    spec = {"work": work.name.partition(",")[0], "method": "FedAvg", "threads": work.threads, "form": form, **settings}
    players = compete([Case(who, f"contest.{who.lower()}.run", spec, warm=3)], 1, seconds=seconds)
    if not players:
        raise RuntimeError(f"{who} fails; the log has its error")
    cells = row(players[0], players)
    about = {"work": work.name, "method": "FedAvg", "who": who, "form": form, "seeds": 1}
    return {**cells, "about": {**about, **rates(work, cells["seconds"])}}


def rates(work: Work, seconds: float, seeds: int = 1) -> dict[str, float]:
    clients = seeds * work.cohort
    return {
        "cohort": work.cohort, "round_s": seconds, "steps": work.steps, "steps_per_s": clients * work.steps / seconds,
        "clients_per_s": clients / seconds,
    }  # fmt: skip


def memory(device: str) -> dict[str, float]:
    return {"peak_gb": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def timed(do: Callable[[], object], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - started


def floors(device: str) -> dict[str, Any]:
    """Counts small operations a second, launched one by one and as a CUDA graph, and FLOP/s of a large product."""
    x, y = torch.randn(2, 64, device=device)
    count, size = 1000, 512 if device == "cpu" else 8192

    def small() -> None:
        for _ in range(count):
            x.add_(y)

    timed(small, device)
    rates = {"launches_per_s": count / min(timed(small, device) for _ in range(5))}
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            small()
        timed(graph.replay, device)
        rates["graphed_launches_per_s"] = count / min(timed(graph.replay, device) for _ in range(5))
    for label in FORMATS:
        a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16 if label == "bf16" else torch.float32)
        with float32_products(label == "tf32"):
            multiply = partial(torch.matmul, a, b)
            timed(multiply, device)
            rates[f"{label}_flops"] = 2 * size**3 / min(timed(multiply, device) for _ in range(5))
    return rates
