"""Short runs that a device repeats after the CPU: algorithms, nets, features, and what a CUDA graph might get wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import fl_lightning as fl
from benchmarks.legs.items import ENGINES, Item, accelerator
from fl_lightning import algorithms
from fl_lightning import flatness as measure
from fl_lightning.core import FlatSpec
from fl_lightning.engine import GraphedEngine
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.run import Run

BATCHED = ("batched", "graphed")
EXACT = 1e-9
"""Largest relative difference in float64."""
NEVER = 10**5
Objective = Callable[[], fl.LocalObjective]


class Net(nn.Sequential):
    """Convolution, GroupNorm and two linear layers: 5,000 weights."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 5),
        )  # fmt: skip


class Residual(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Linear(8, 5)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x)).relu()
        y = self.norms[1](self.first(x)).relu()
        return self.fc((x + self.norms[2](self.second(y))).relu().mean((2, 3)))


def data(
    size: int = 8,
    clients: Sequence[int] = (19, 7, 31, 12, 3, 24),
    batch_size: int | None = 8,
    augment: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> fl.Arrays:
    """Returns clients with 3 to 31 images of 5 classes."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256, (n, size, size, 3), np.uint8), np.arange(n) % 5) for n in (*clients, 40)]
    crop = fl.Augment(**({"crop": 1} if augment is None else augment))
    return fl.Arrays(client_arrays=pairs[:-1], test=pairs[-1], batch_size=batch_size, augment=crop, stream=stream)


def text() -> fl.Arrays:
    """Returns clients with 3 to 24 texts of 5 tokens out of 20."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 20, (n, 5)), np.arange(n) % 5) for n in (19, 7, 12, 3, 24, 40)]
    return fl.Arrays(client_arrays=pairs[:-1], test=pairs[-1], batch_size=8)


def algorithm(name: str, net: Callable[[], nn.Module] = Net, **options: Any) -> fl.LocalObjective:
    """Returns an algorithm, with momentum, weight decay, clipping and a decaying learning rate if it takes SGD."""
    torch.manual_seed(1)
    has_optimizer = name in ("FedAdamW", "FedMuon", "LocalMuon")  # of their own
    sgd = None if has_optimizer else fl.SGD(0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
    return getattr(algorithms, name)(net=net(), **{"optimizer": sgd, **options})


class Litter(Callback):
    """Fills memory between rounds, and frees it or keeps it for a round: what a graph reads and writes is its own."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        if not all(bool(v.isnan().all()) for v in self.kept):
            raise ValueError("a step has written to memory that is not its own")
        sizes = [1 << 24, *np.random.default_rng(ctx.t).integers(1, 1 << 20, 40).tolist()]
        self.kept = [torch.full((n,), torch.nan, dtype=torch.float64, device=run.fabric.device) for n in sizes][::2]
        noise = torch.Generator(run.fabric.device).manual_seed(ctx.t)
        for n in sizes:
            torch.randn(n, device=run.fabric.device, generator=noise)


class Logged(Callback):
    """Counts how often it is called: once for all rounds that run as one program, if it does not need each."""

    def __init__(self, every_round: bool) -> None:
        self.each, self.count = every_round, 0

    def needs_round(self, t: int) -> bool:
        return self.each

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.count += 1


class Case(NamedTuple):
    """What is trained.

    Attributes:
        make: Returns the algorithm with its net.
        data: Returns the data.
        options: Of the trainer, where they differ from those of `train`.
        there: Further ones on the device, of which the result must not depend.
        engines: Those that are compared with the CPU.
        kept: Most records of the graphed engine.
        limit: Largest relative difference.
    """

    make: Objective
    data: Callable[[], fl.Arrays] = data
    options: Mapping[str, Any] = {}
    there: Callable[[], Mapping[str, Any]] = dict
    engines: Sequence[str] = ("graphed",)
    kept: int = GraphedEngine.KEPT
    limit: float = EXACT


def monitor(*measures: Any) -> list[Callback]:
    return [fl.FlatnessMonitor(3, [*measures])]


ALL, SEQUENTIAL = ("graphed", "batched", "sequential"), ("sequential",)
NETS = {
    "net LEAFLSTM": Case(
        partial(algorithm, "FedAvg", lambda: fl.LEAFLSTM(vocabulary=20, dim=4, hidden=16, num_classes=5)), text,
        engines=ALL,
    ),
    "net TextTransformer": Case(
        partial(algorithm, "FedAvg", lambda: fl.TextTransformer(20, 5, dim=16, blocks=1, heads=2, num_classes=5)),
        text, engines=("graphed", "sequential"),
    ),
    "net ViTCIFAR": Case(
        partial(algorithm, "FedAvg", lambda: fl.ViTCIFAR(5, dim=16, blocks=1, heads=2)), partial(data, 32),
        engines=("graphed", "sequential"),
    ),
    **{
        f"net with BatchNorm, {policy}": Case(
            partial(algorithm, "FedSAM", Residual, buffers=policy), engines=SEQUENTIAL, options={"max_rounds": 2}
        )
        for policy in ("average", "reset", "local")
    },
    "net ResNet18GN": Case(
        partial(algorithm, "FedAvg", lambda: fl.ResNet18GN(5)),
        options={"max_rounds": 1, "clients_per_round": 2, "local_steps": 2}, engines=("graphed", "sequential"),
    ),
    # not the convolution alone: before a GroupNorm that trains, torch before 2.15 crashes on the CPU
    "net Frozen": Case(partial(algorithm, "FedSMOO", lambda: fl.Frozen(Net(), ["5", "7"])), engines=("graphed",)),
    **(
        {"net LoRA": Case(partial(algorithm, "FedSAM", lambda: fl.LoRA(Net(), ["5"], rank=2, trained=["7"])))}
        if find_spec("peft")
        else {}
    ),
}  # fmt: skip
private = partial(algorithm, "FedAvg", weighting="uniform")
FEATURES = {
    "streamed": Case(partial(algorithm, "FedSMOO"), partial(data, stream=True), engines=("graphed", "sequential")),
    "rows on disk": Case(partial(algorithm, "SCAFFOLD"), options={"client_memory": 0.0}),
    **{
        f"compressed by {method}": Case(
            lambda method=method, options=options: algorithm(
                "SCAFFOLD", parts=[fl.Compress(method, **options)]
            )
        )
        for method, options in {"topk": {"rate": 0.1}, "randk": {"rate": 0.1}, "qsgd": {}, "sign": {}}.items()
    },
    **{
        f"rule {type(rule).__name__}": Case(partial(algorithm, "FedSMOO"), options={"aggregation": rule})
        for rule in (fl.CoordinateMedian(), fl.TrimmedMean(), fl.NormClipping(), fl.Krum(0.0), fl.MultiKrum(0.0))
    },
    **{
        # uploads and noise are cut to a grid of 1e-10 standard deviations, and rounding may change a number's place
        f"privacy {rule.__name__}": Case(
            private,
            options={"privacy": rule(noise_multiplier=1.0, noise_seed=0, delta=0.1), "clients_per_round": 5},
            limit=1e-8,
        )
        for rule in ((fl.GaussianPrivacy, fl.AdaptivePrivacy) if find_spec("dp_accounting") else ())
    },
    "faults": Case(
        partial(algorithm, "SCAFFOLD"),
        options={"faults": fl.Faults(0.2, 0.2, corrupt=fl.Corrupt(0.3, "noise")), "on_divergence": "continue"},
    ),
    "asynchronous": Case(
        partial(algorithm, "FedAvg"),
        options={"asynchronous": fl.FedBuff(2, 3), "clock": fl.Clock(sec_per_sample=1.0), "max_rounds": 6},
    ),
    "SWA": Case(lambda: algorithm("SCAFFOLD", averaging=fl.SWA(start=1, cycle=2))),
    "AdamW that is kept": Case(lambda: algorithm("FedSAM", optimizer=fl.AdamW(state="keep"))),
    "optimizer of torch": Case(
        lambda: algorithm("FedSAM", optimizer=fl.TorchOptimizer("Adam", 0.01)), engines=SEQUENTIAL
    ),
    "clients evaluated": Case(
        partial(algorithm, "FedAvg"), options={"callbacks": monitor(fl.ClientEvaluation(local_models=True))}
    ),
    "cutout and mixup": Case(partial(algorithm, "FedSAM"), partial(data, augment={"cutout": 2, "mixup": 1.0})),
    "full batch": Case(partial(algorithm, "FedSAM"), partial(data, batch_size=None)),
}  # fmt: skip
GROWING = (4, 12, 20, 44, 60, 92)
"""Numbers of samples; in minibatches of 8 these are 1 to 12 steps."""
LONGER = fl.ReplaySampler([[0, 1], [1, 2], [0, 2], [1, 3], [2, 4], [0, 1], [3, 5], [1, 4]])
"""Rounds of 2, 3, 3, 6, 8, 2, 12 and 8 steps: a graph is captured for more steps than before, or used for fewer."""
OTHERS = fl.ReplaySampler([[0, 1], [2, 3, 4], [5, 0], [1, 2, 3, 4], [3, 5], [0, 2, 4], [1, 3], [5, 1, 2], [0, 4]] * 2)
"""Cohorts of two, three and four, each with a record of its own."""
LONG = {
    **{
        f"longer blocks, {name}{suffix}": Case(
            partial(algorithm, name), partial(data, clients=GROWING),
            {"max_rounds": len(LONGER.rounds), "sampler": LONGER, **options},
        )
        for name, suffix, options in (
            ("FedSMOO", "", {}), ("SCAFFOLD", ", rows on disk", {"client_memory": 0.0}), ("FedGMT", "", {})
        )
    },
    **{
        f"records by turns, {name}": Case(
            lambda name=name, options=options: algorithm(
                name,
                optimizer=fl.SGD(0.05, momentum=0.9, schedule=fl.Cosine(0.1)),
                **{key: value() if callable(value) else value for key, value in options.items()},
            ),
            options={"max_rounds": 12, "sampler": OTHERS},
        )
        for name, options in {
            "NaiveFedGloSS": {"ascent": lambda: fl.SAM(0.1, warmup=5), "rho_schedule": "linear", "warmup": 7},
            "FedGloSS": {"ascent": lambda: fl.SAM(0.1, warmup=5), "rho_schedule": "linear", "warmup": 7},
            "FedSMOO": {"warmup": 5},
            "FedGF": {},
        }.items()
    },
    "records dropped by turns": Case(
        partial(algorithm, "FedSMOO"), options={"max_rounds": 12, "sampler": OTHERS}, kept=2
    ),
    "memory littered, FedSMOO": Case(
        partial(algorithm, "FedSMOO"), options={"max_rounds": 8}, there=lambda: {"callbacks": [Litter()]}
    ),
    "memory littered, records by turns": Case(
        partial(algorithm, "NaiveFedGloSS"), options={"max_rounds": 12, "sampler": OTHERS},
        there=lambda: {"callbacks": [Litter()]},
    ),
}  # fmt: skip
CASES = {**{name: Case(partial(algorithm, name)) for name in algorithms.__all__}, **NETS, **FEATURES, **LONG}


def items(device: str) -> dict[str, Item]:
    """Returns the checks of this file but for plain algorithms, in order of value; on the CPU, one engine each."""
    checks: dict[str, Item] = {}
    for name, case in {**LONG, **NETS, **FEATURES}.items():
        for engine in case.engines:
            checks[f"{name}, {engine}"] = partial(compare, name, engine, device)
    for engine in (*BATCHED, "sequential"):
        checks[f"same bits again, {engine}"] = partial(again, engine, device)
    for engine in BATCHED:
        checks[f"rounds as one program, {engine}"] = partial(program, engine, device)
        checks[f"two seeds at once, {engine}"] = partial(seeds, engine, device)
    checks["landscape"] = partial(landscape, device)
    if find_spec("peft"):
        checks["curvature of a merged LoRA"] = partial(merged, device)
    return checks


@contextmanager
def folder() -> Iterator[str]:
    """Makes a folder that exists for a while."""
    with tempfile.TemporaryDirectory() as path:
        yield path


def trainer_for(device: str, path: str, **options: Any) -> fl.FederatedTrainer:
    """Returns a trainer of three rounds, in float64 and one client after another where no option says otherwise."""
    settings = {
        "max_rounds": 3, "precision": "64-true", "engine": "sequential", "default_root_dir": path, "name": "run",
        **({} if "sampler" in options else {"clients_per_round": 4}), **options,
    }  # fmt: skip
    return fl.FederatedTrainer(accelerator=accelerator(device), enable_progress_bar=False, **settings)


def train(
    device: str,
    path: str,
    name: str = "FedSMOO",
    ckpt_path: str | None = None,
    case: Case | None = None,
    **options: Any,
) -> Run:
    """Trains a case."""
    case = case or CASES[name]
    trainer = trainer_for(device, path, **{**case.options, **options})
    return trainer.fit(case.make(), case.data(), ckpt_path)


def results(run: Run) -> dict[str, Tensor]:
    """Returns a run's first weights, its state, and the metrics of its last round that are not times."""
    tensors = {"w0": run.clients.w0, **{f"server.{name}": run.server[name] for name in run.server}}
    tensors |= {f"client {k}.{name}": row[name] for k, row in run.clients.rows().items() for name in row}
    for name, value in run.metrics.items():
        if name.startswith(("server/", "client/", "flatness/")) and not name.endswith("_residual"):
            tensors[name] = torch.tensor(value)
    return {name: value.detach().cpu().double() for name, value in tensors.items()}


@cache
def exact(name: str = "FedSMOO") -> dict[str, Tensor]:
    """Trains a case in float64 on the CPU, one client after another."""
    with folder() as path:
        return results(train("cpu", path, name))


def compare(name: str, engine: str, device: str) -> dict[str, Any]:
    """Compares all that a case results in with `exact`."""
    case = CASES[name]
    with folder() as path, mock.patch.object(GraphedEngine, "KEPT", case.kept):
        actual = results(train(device, path, name, **ENGINES[engine], **case.there()))
    return agreement(actual, exact(name), case.limit)


def agreement(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = EXACT) -> dict[str, Any]:
    """Finds the largest difference, relative to the largest entry of its tensor, and says where if it is too large."""
    if actual.keys() != expected.keys():
        raise ValueError(f"one has something that the other has not: {sorted(actual.keys() ^ expected.keys())[:5]}")
    differences = {name: relative(actual[name], expected[name]) for name in expected}
    outcome = verdict([*differences.values()], limit)
    exceeding = [name for name, difference in differences.items() if not difference <= limit]
    return {**outcome, **({"where": ", ".join(exceeding[:3]), "wrong": len(exceeding)} if exceeding else {})}


def relative(x: Tensor, y: Tensor) -> float:
    """Returns the largest difference relative to the largest entry; NaN and infinity differ from other numbers."""
    if x.shape != y.shape:
        return float("nan")
    equal = (x == y) | (x.isnan() & y.isnan())
    distances = torch.where(equal, 0.0, (x - y).abs())
    scale = torch.where(y.isfinite(), y, 0.0).abs()
    return float(distances.max() / scale.max().clamp(min=1e-3)) if y.numel() else 0.0


def verdict(differences: list[float], limit: float) -> dict[str, Any]:
    """Returns the largest of some differences, which is NaN if one is, and whether it is small enough."""
    difference = float(np.max(differences))
    return {"ok": difference <= limit, "difference": difference}


def again(engine: str, device: str) -> dict[str, Any]:
    """Trains HsuCNN in float32 twice, with different memory: equal bits."""
    images = partial(data, 32, (64, 50, 33), 32, {"crop": 4})
    case = Case(partial(algorithm, "FedAvg", lambda: fl.HsuCNN(5)), images)
    runs = []
    for callbacks in ([], [Litter()]):
        with folder() as path:
            options = {
                "precision": "32-true",
                "max_rounds": 2,
                "local_steps": 3,
                "clients_per_round": 3,
                "callbacks": callbacks,
            }
            runs.append(results(train(device, path, case=case, **options, **ENGINES[engine])))
    return agreement(runs[0], runs[1], limit=0.0)


def program(engine: str, device: str) -> dict[str, Any]:
    """Trains rounds as one program, and one by one: equal bits."""
    runs = []
    calls = {}
    for every_round in (False, True):
        logged = Logged(every_round)
        callbacks = [logged, fl.Checkpoints(NEVER)]
        options = {"max_rounds": 10, "eval_every": NEVER, "callbacks": callbacks, "precision": "32-true"}
        with folder() as path:
            runs.append(results(train(device, path, "FedSMOO", **options, **ENGINES[engine])))
        calls["one by one" if every_round else "as one"] = logged.count
    outcome = agreement(runs[0], runs[1], limit=0.0)
    return {**outcome, "ok": outcome["ok"] and calls["as one"] < calls["one by one"] == 10, "programs": calls["as one"]}


def seeds(engine: str, device: str) -> dict[str, Any]:
    """Trains two seeds at once, and compares each with itself alone on the CPU."""
    outcomes = []
    with folder() as path:
        trainers = [trainer_for(device, path, **{**ENGINES[engine], "seed": i, "name": f"seed {i}"}) for i in range(2)]
        for i, run in enumerate(parallel_runs.fit(trainers, [algorithm("FedSMOO") for _ in trainers], data())):
            outcomes.append(agreement(results(run), results(train("cpu", f"{path}/alone", "FedSMOO", seed=i))))
    return max(outcomes, key=lambda outcome: (not outcome["ok"], outcome["difference"]))


def batch(device: str) -> list[tuple[Tensor, Tensor]]:
    """Makes some samples on a device."""
    x = torch.rand(40, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [(x.to(device), (torch.arange(40) % 5).to(device))]


def sample_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def on_both(device: str, do: Callable[[str], dict[str, Tensor]], limit: float) -> dict[str, Any]:
    """Compares what a function finds on the device and on the CPU."""
    actual, expected = ({n: torch.as_tensor(v).cpu().double() for n, v in do(at).items()} for at in (device, "cpu"))
    return agreement(actual, expected, limit)


def landscape(device: str) -> dict[str, Any]:
    """Measures the loss over a small plane."""

    def plane(at: str) -> dict[str, Tensor]:
        net = Net().double().to(at)
        w = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        directions = measure.random_plane(FlatSpec(net), w)
        steps = np.linspace(-0.5, 0.5, 5)
        surface = measure.surface(net, sample_loss, {"test": batch(at)}, w, directions, steps, steps)
        return {name: torch.as_tensor(value) for name, value in surface.loss.items()}

    return on_both(device, plane, EXACT)


def merged(device: str) -> dict[str, Any]:
    """Measures the largest eigenvalue of the Hessian of a net that LoRA's adapters were merged into."""

    def largest(at: str) -> dict[str, Tensor]:
        net = Net()
        adapted = fl.LoRA(net, ["5"], rank=2, trained=["7"]).double()
        noise = torch.Generator().manual_seed(2)
        for p in adapted.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        merged_net = adapted.to(at).merged()
        pair = measure.lambda_max(measure.hessian(merged_net, sample_loss, batch(at)))
        return {"value": torch.as_tensor(pair.value)}

    return on_both(device, largest, 1e-6)
