"""What pages of the documentation say of memory, many clients, wide cohorts, processes and flatness.

``python -m benchmarks.cases SUITE`` measures the cases of a suite side by side, prints their rows as a table in
Markdown, and writes all numbers to ``--out`` as JSON; ``--only`` chooses cases, and ``--small`` tries them in small.
CPU seconds are those of the case's processes for a unit, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import fl_lightning as fl
from benchmarks.harness import Case, Row, Turns, compete, machine, row
from fl_lightning.core import State
from fl_lightning.flatness import critical_rate, finite_differences, gradient, hessian, lambda_max
from fl_lightning.results.metrics import markdown
from fl_lightning.trainer import resume
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.environment import keep_freed_memory

FEATURES, CLASSES, COHORT = 32, 10, 10
Settings = dict[str, Any]


def linears(*widths: int) -> nn.Module:
    layers = [layer for pair in pairwise(widths) for layer in (nn.ReLU(), nn.Linear(*pair))]
    return nn.Sequential(nn.Flatten(), *layers[1:])


NETS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: linears(FEATURES, 58, CLASSES),  # 2,504 weights
    "large": lambda: linears(FEATURES, 4096, 960, CLASSES),  # 4.1 million
    "linear": lambda: linears(FEATURES, CLASSES),  # 330
    "cnn": lambda: nn.Sequential(  # 6,090, for images of 8 x 8
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    ),
}  # fmt: skip


class Rounds(Callback):
    """Says what each round took, by the clock and of the processor."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.seconds = turns, list[float]()

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        self.started = time.process_time()

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.seconds.append(metrics["time/round_s"])
        flatness = metrics.get("time/flatness_s")
        self.turns.done(self.seconds[-1], cpu_s=time.process_time() - self.started, flatness_s=flatness)


def arrays(root: str, clients: int, samples: int, *shape: int) -> fl.Arrays:
    """Returns random samples, evenly divided."""
    draw, n, path = np.random.default_rng(0), clients * samples, f"{root}/data.npz"
    x, y = draw.standard_normal((n + 100, *(shape or (FEATURES,))), np.float32), draw.integers(0, CLASSES, n + 100)
    np.savez(path, x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:])
    return fl.Arrays(path=path, num_clients=clients, partition=fl.IID(), batch_size=samples)


def trainer(root: str, rounds: int, *callbacks: Callback, **options: Any) -> fl.FederatedTrainer:
    return fl.FederatedTrainer(**{
        "max_rounds": rounds, "clients_per_round": COHORT, "local_steps": 1, "eval_every": rounds, "accelerator": "cpu",
        "threads": 1, "engine": "sequential", "callbacks": [*callbacks], "default_root_dir": root,
        "enable_progress_bar": False, **options,
    })  # fmt: skip


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# docs/adapters.md: what frozen parameters save

TRAINED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "all": lambda net: net,
    "LoRA": lambda net: fl.LoRA(net, targets=["q", "v"], rank=8, trained=["head"]),
    "head": lambda net: fl.Frozen(net, ["head"]),
}


def adapters(settings: Settings, turns: Turns) -> Row:
    """Trains FedDyn with 4 of 8 clients and a transformer."""
    words, length, (dim, blocks, heads) = settings["words"], 32, settings["size"]
    draw = np.random.default_rng(0)
    clients = [(draw.integers(0, words, (4, length)), np.arange(4)) for _ in range(8)]
    data = fl.Arrays(client_arrays=clients, test=(draw.integers(0, words, (8, length)), np.arange(8) % 4))
    turns.ready()
    net = TRAINED[settings["trained"]](fl.TextTransformer(words, length, dim=dim, blocks=blocks, heads=heads))
    with tempfile.TemporaryDirectory() as root:
        federation = trainer(root, 2, Rounds(turns), fl.Checkpoints(), clients_per_round=4)
        run = federation.fit(fl.FedDyn(net=net, optimizer=fl.SGD(0.01)), data)
        files = {path.stem: path.stat().st_size / 1e6 for path in run.folder.checkpoints.iterdir()}
        rows = sum(v.nbytes for row in run.clients.rows().values() for v in row.values())
        return {
            "weights": run.objective.flat.d, "sent_mb": run.metrics["comm/total_bits"] / 8e6, "state_mb": rows / 1e6,
            "checkpoint_mb": files["last"], "frozen_mb": files.get("frozen", 0.0),
        }  # fmt: skip


# docs/benchmarks.md: many clients


def scaffold(settings: Settings, turns: Turns) -> Row:
    """Trains SCAFFOLD with one step on one sample; of several cohorts, returns seconds at first contact and later."""
    clients, cohorts = settings["clients"], None
    if settings["net"] == "large":  # every client takes part twice
        cohorts = 2 * [list(range(k, min(k + COHORT, clients))) for k in range(0, clients, COHORT)]
    rounds = len(cohorts) if cohorts else settings["rounds"]
    options: Settings = {"client_memory": settings["memory"]}
    options |= {"sampler": fl.ReplaySampler(cohorts), "clients_per_round": None} if cohorts else {}
    watch = Rounds(turns)
    turns.ready()
    with tempfile.TemporaryDirectory() as root:
        data, began = arrays(root, clients, 1), time.perf_counter()
        federation = trainer(root, rounds, watch, fl.Checkpoints(every_n_rounds=50), **options)
        run = federation.fit(fl.SCAFFOLD(net=NETS[settings["net"]](), optimizer=fl.SGD(lr=0.01)), data)
        half = len(watch.seconds) // 2
        first, later = (statistics.median(part) for part in (watch.seconds[:half], watch.seconds[half:]))
        rest = time.perf_counter() - began - sum(watch.seconds)
        return {"rest_s": rest, "first_s": first, "later_s": later, "rows_gb": size(run.folder.clients) / 1e9}


class Seen(Callback):
    """Gives every client a row before the first round, and makes a checkpoint after each round."""

    def __init__(self) -> None:
        self.saves: list[float] = []

    def on_fit_start(self, run: Run) -> None:
        self.opened = time.process_time()
        clients, names, d = run.data.num_clients, run.clients.inits, run.objective.flat.d
        for first in range(0, 0 if run.rounds_done else clients, 1000):
            block = range(first, min(clients, first + 1000))
            run.clients.stage({k: State({name: torch.full((d,), float(k)) for name in names}) for k in block})
            run.clients.commit()

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        started = time.process_time()
        resume.save(run, run.folder.last)
        self.saves.append(time.process_time() - started)


def seen(settings: Settings, turns: Turns) -> Row:
    """Measures checkpoints of runs whose clients all have a row, and a restart; in CPU seconds."""
    with tempfile.TemporaryDirectory() as root:
        data = arrays(root, settings["clients"], 1)
        data.setup("fit")
        turns.ready()
        for rounds, checkpoint in ((10, None), (20, "last")):
            watch, started = Seen(), time.process_time()
            federation = trainer(root, rounds, watch, Rounds(turns), fl.Checkpoints(every_n_rounds=rounds),
                                 client_memory=settings["memory"])  # fmt: skip
            run = federation.fit(fl.SCAFFOLD(net=NETS["linear"](), optimizer=fl.SGD(lr=0.01)), data, checkpoint)
        return {
            "restart_s": watch.opened - started, "save_s": statistics.median(watch.saves),
            "save_mb": run.folder.last.stat().st_size / 1e6, "rows_gb": size(run.folder.clients) / 1e9,
        }  # fmt: skip


# docs/planning.md: wide cohorts


def cohorts(settings: Settings, turns: Turns) -> None:
    """Trains FedAvg with one step on ten images of each client, by engine and client_block."""
    clients = settings["clients"]
    with tempfile.TemporaryDirectory() as root:
        data = arrays(root, clients, 10, 1, 8, 8)
        data.setup("fit")
        federation = trainer(root, 8, Rounds(turns), clients_per_round=clients, **settings["trainer"])
        turns.ready()
        federation.fit(fl.FedAvg(net=NETS["cnn"](), optimizer=fl.SGD(lr=0.1)), data)


# docs/planning.md: what processes send each other

SENT: dict[str, Callable[[int, int, int], tuple[float, float]]] = {
    "isend": lambda n, rank, size: (n, 0),
    "irecv": lambda n, rank, size: (0, n),
    "gather": lambda n, rank, size: (n, 0) if rank else (0, n * (size - 1)),
    "scatter": lambda n, rank, size: (0, n) if rank else (n * (size - 1), 0),
    "broadcast": lambda n, rank, size: (0, n) if rank else (n * (size - 1), 0),
    "all_reduce": lambda n, rank, size: (2 * n * (size - 1) / size,) * 2,
}
"""Bytes that a call sends and receives here, by those of its tensor."""


def processes(settings: Settings, turns: Turns) -> Row:
    """Counts MB through the first process in a round: digits, 20 of 100 clients a round, a net of 33,610 weights."""
    size, fork = settings["processes"], get_context("fork")
    turns.ready()
    with socket.socket() as free, tempfile.TemporaryDirectory() as root:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        children = [fork.Process(target=member, args=(rank, port, settings, root)) for rank in range(size)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        counts = json.loads(Path(root, "0.json").read_text())
    return {"first_mb": (counts["sent"] + counts["received"]) / 1e6 / settings["rounds"]}


def member(rank: int, port: int, settings: Settings, root: str) -> None:
    """Trains as one process of the run, and counts."""
    size, rounds, counts = settings["processes"], settings["rounds"], Counter[str]()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "cases"}
    os.environ.update({name: str(value) for name, value in environment.items()})

    def counted(name: str, function: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor):
            sent, received = SENT[name](tensor.nbytes, rank, size)
            counts.update(sent=sent, received=received)
        return function(tensor, *args, **kwargs)

    for name in SENT:
        wrapped = partial(counted, name, getattr(dist, name))
        setattr(dist, name, wrapped)
        if name in ("isend", "irecv"):  # P2POp compares with these
            setattr(distributed_c10d, name, wrapped)
    data = fl.Digits(num_clients=100, partition=fl.Dirichlet(alpha=1.0), batch_size=8)
    federation = trainer(root, rounds, fl.Checkpoints(), clients_per_round=20, local_steps=2, devices=size,
                         strategy="ddp", loggers=[], deterministic=settings["deterministic"])  # fmt: skip
    federation.fit(getattr(fl, settings["method"])(fl.DigitsMLP(hidden=448)), data)
    Path(root, f"{rank}.json").write_text(json.dumps(counts))


# docs/flatness.md: this package beside curvlinops and hessian-eigenthings; products in gradients; the monitor in rounds

LOSS = nn.CrossEntropyLoss(reduction="none")


def repeated(turns: Turns, do: Callable[[], float | None]) -> None:
    """Does something in each unit; what it returns are its products."""
    while True:
        started = time.process_time()
        products = do()
        turns.done(time.process_time() - started, products=products)


def curvature(settings: Settings, turns: Turns) -> None:
    """Measures lambda_max of the Hessian of a transformer with LoRA, to a residual of 1e-3, or by 20 steps."""
    samples, length = settings["samples"], 64
    net = fl.LoRA(fl.TextTransformer(30_000, length), targets=["q", "v"], rank=8, trained=["head"]).eval()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in named.values():  # else B is zero, and so is the block of A
            p.add_(0.05 * torch.randn_like(p))
    x, y = torch.randint(30_000, (samples, length)), torch.randint(4, (samples,))
    batches = list(zip(x.split(64), y.split(64), strict=True))
    find = LIBRARIES[settings["library"]]
    find(net, [(x[:2], y[:2])], named)  # loads what it needs
    turns.ready()
    repeated(turns, lambda: find(net, batches, named))


def ours(net: nn.Module, batches: list[Any], named: dict[str, Any]) -> float:
    return lambda_max(hessian(net, LOSS, batches, parameters=[*named]), tol=1e-3).iterations


def by_differences(net: nn.Module, batches: list[Any], named: dict[str, Any]) -> float:
    return lambda_max(finite_differences(net, LOSS, batches, parameters=[*named]), tol=1e-3).iterations


def critical(net: nn.Module, batches: list[Any], named: dict[str, Any]) -> float:
    """Measures critical sharpness along the gradient, as the first one of a run, without a warm start."""
    return critical_rate(net, LOSS, batches, gradient(net, LOSS, batches)).evaluations


def curvlinops(net: nn.Module, batches: list[Any], named: dict[str, Any]) -> float:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    matrix = HessianLinearOperator(net, nn.CrossEntropyLoss(), [*named.values()], batches, check_deterministic=False)
    operator, products = matrix.to_scipy(), list[int]()
    counted = LinearOperator(operator.shape, lambda v: products.append(1) or operator @ v, dtype="float32")
    eigsh(counted, k=1, which="LA", tol=1e-3, return_eigenvectors=False)
    return len(products)


def eigenthings(net: nn.Module, batches: list[Any], named: dict[str, Any]) -> float:
    import hessian_eigenthings as library

    loss = library.supervised_loss(nn.CrossEntropyLoss())
    matrix = library.HessianOperator(net, batches, loss, param_filter=lambda name, _: name in named)
    library.lanczos(matrix, k=1, max_iter=20, which="LA", seed=0)
    return 20


LIBRARIES = {
    "fl_lightning": ours, "by differences": by_differences, "critical sharpness": critical, "curvlinops": curvlinops,
    "hessian-eigenthings": eigenthings,
}  # fmt: skip


def images(n: int) -> tuple[Tensor, Tensor]:
    """Returns random images of ten classes."""
    y = torch.randint(10, (n,))
    return torch.randn(n, 3, 32, 32) + torch.randn(10, 3, 32, 32)[y], y


def products(settings: Settings, turns: Turns) -> None:
    """Computes a gradient of HsuCNN, or a product with its Hessian, with its graphs kept or without."""
    net, (x, y), what = fl.HsuCNN(), images(settings["samples"]), settings["what"]
    v = torch.randn(sum(p.numel() for p in net.parameters()))
    batches = list(zip(x.split(64), y.split(64), strict=True))
    matrix = hessian(net, LOSS, batches, keep_graph=what == "kept")

    def do() -> None:
        gradient(net, LOSS, batches) if what == "gradient" else matrix @ v

    turns.ready()
    with keep_freed_memory(torch.device("cpu")):  # as in a run
        repeated(turns, do)


def monitor(settings: Settings, turns: Turns) -> None:
    """Trains FedAvg on HsuCNN with the default monitor every ten rounds."""
    x, y = images(settings["samples"] * 20 + 100)
    pixels = (40 * x.permute(0, 2, 3, 1) + 128).clamp(0, 255).to(torch.uint8).numpy()
    parts = np.split(np.arange(len(y) - 100), 20)
    clients, test = [(pixels[part], y[part].numpy()) for part in parts], (pixels[-100:], y[-100:].numpy())
    data = fl.Arrays(client_arrays=clients, test=test, batch_size=64)
    turns.ready()
    with tempfile.TemporaryDirectory() as root:
        watch = fl.FlatnessMonitor(every_n_rounds=10)
        federation = trainer(root, settings["rounds"], watch, Rounds(turns), clients_per_round=5, local_steps=8)
        federation.fit(fl.FedAvg(net=fl.HsuCNN(), optimizer=fl.SGD(lr=0.05)), data)


def here(name: str, function: Callable[..., Any], warm: int = 1, whole: bool = True, **settings: Any) -> Case:
    return Case(name, f"benchmarks.cases.{function.__name__}", settings, warm, whole)


def suites(small: bool) -> dict[str, tuple[list[Case], list[str]]]:
    """Returns the cases of each suite, and the columns of its table."""
    transformer = {"words": 100, "size": (16, 1, 2)} if small else {"words": 70_000, "size": (768, 12, 12)}
    many, wide, rounds, few = (50, 20, 3, 20) if small else (1_000_000, 1_000, 20, 256)
    blocks = [wide] if small else [1_000, 250, 100, 50, 10]
    return {
        "adapters": (
            [here(name, adapters, 0, trained=name, **transformer) for name in TRAINED],
            ["weights", "sent_mb", "state_mb", "checkpoint_mb", "frozen_mb", "peak_gb", "seconds"],
        ),
        "clients": (
            [
                *(
                    here(f"{n:,} clients, client_memory {memory}", scaffold, 5, net="small", clients=n, memory=memory,
                         rounds=10 * rounds)
                    for n, memory in product((many // 10_000 or 20, many), (1.0, 0.0))
                ),
                here("large net", scaffold, 0, net="small" if small else "large", clients=20 if small else 1_262,
                     memory=1.0, rounds=rounds),
            ],
            ["seconds", "high", "rest_s", "first_s", "later_s", "rows_gb", "peak_gb"],
        ),
        "seen": (
            [here(f"client_memory {memory}", seen, clients=many, memory=memory) for memory in (4.0, 0.0)],
            ["seconds", "save_s", "save_mb", "rows_gb", "restart_s", "peak_gb"],
        ),
        "cohorts": (
            [
                here(f"{engine}, {block}", cohorts, 2, clients=wide, trainer={"engine": engine, "client_block": block})
                for engine, block in [("sequential", wide), *product(("batched", "graphed"), blocks)]
            ],
            ["cpu_s", "more_gb"],
        ),
        "processes": (
            [
                here(f"{method}, {n} processes{'' if fixed else ', not deterministic'}", processes, 0, method=method,
                     processes=n, deterministic=fixed, rounds=rounds)
                for method, n, fixed in product(("FedAvg", "FedSMOO", "SCAFFOLD")[2 * small :], (2, 4), (True, False))
            ],
            ["first_mb"],
        ),
        "curvature": (
            [here(name, curvature, whole=False, library=name, samples=few) for name in LIBRARIES],
            ["products", "seconds", "more_gb"],
        ),
        "flatness": (
            [here(what, products, whole=False, what=what, samples=few) for what in ("gradient", "kept", "not kept")]
            + [here("monitor", monitor, 0, samples=few * 2, rounds=10 if small else 30)],
            ["seconds", "vs gradient", "flatness_s"],
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=suites(True))
    parser.add_argument("--only", default="", help="part of the names of the cases to measure")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases, columns = suites(args.small)[args.suite]
    cases = [case for case in cases if args.only in case.name]
    # those that end by themselves one after another: their memory is that of the machine, too
    groups = [[case] for case in cases if case.whole] + [[case for case in cases if not case.whole]]
    rows = list[Row]()
    for group in filter(None, groups):
        players = compete(group, args.turns, seconds=0.0)
        rows += [row(player, players, ["gradient"]) for player in players]
    print(machine(), "\n")
    body = [[line["case"], *(f"{line[key]:.4g}" if key in line else "" for key in columns)] for line in rows]
    print(markdown([[args.suite, *columns], *body]))
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), args.suite: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
