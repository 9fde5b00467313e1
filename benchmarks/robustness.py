"""Accuracy under bad clients on the digits: methods, aggregation rules, and kinds and shares of bad uploads.

``python benchmarks/robustness.py`` trains what docs/robustness.csv does not hold yet (in all a quarter of an hour),
and draws docs/robustness.png; ``--draw`` trains nothing.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fl_lightning import (
    SAM,
    SGD,
    Aggregation,
    CoordinateMedian,
    Corrupt,
    Digits,
    DigitsMLP,
    Dirichlet,
    Faults,
    FedAvg,
    FederatedTrainer,
    FedGloSS,
    FedSAM,
    Krum,
    LocalObjective,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from fl_lightning.core import figures
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer import loop, parallel_runs

DOCS = Path(__file__).resolve().parents[1] / "docs"
CSV, FIGURE = DOCS / "robustness.csv", DOCS / "robustness.png"
ROUNDS, LAST, SEEDS = 100, 10, (0, 1, 2)
METHODS: dict[str, Callable[..., LocalObjective]] = {
    "FedAvg": FedAvg,
    "FedSAM": lambda net, **options: FedSAM(net, rho=0.1, **options),
    "FedGloSS": lambda net, **options: FedGloSS(net, rho=0.1, ascent=SAM(0.1), **options),
}
RULES: dict[str, Callable[[], Aggregation | None]] = {
    "mean": lambda: None,
    "NormClipping": NormClipping,
    "CoordinateMedian": CoordinateMedian,
    "TrimmedMean 0.4": lambda: TrimmedMean(0.4),
    "Krum 0.4": lambda: Krum(0.4),
    "MultiKrum 0.4": lambda: MultiKrum(0.4),
}
KINDS: dict[str, float] = {"nan": 1.0, "sign_flip": 4.0, "scale": 50.0, "noise": 50.0}
SHARES = (0.1, 0.2, 0.4)


Setting = tuple[str, str, str, str]
"""Method, rule, kind and share."""


def accuracies(settings: Sequence[Setting], seed: int) -> list[float]:
    """Mean test accuracy of the last rounds of runs trained as one program; 0.1, chance, where one diverged."""
    data = Digits(num_clients=50, batch_size=16, partition=Dirichlet(1.0))
    trainers, models = [], []
    with tempfile.TemporaryDirectory() as root:
        for number, (method, rule, kind, share) in enumerate(settings):
            torch.manual_seed(seed)
            models.append(METHODS[method](DigitsMLP(), optimizer=SGD(0.1, weight_decay=4e-4)))
            faults = Faults(corrupt=Corrupt(float(share), kind, KINDS[kind])) if kind in KINDS else None  # type: ignore[arg-type]
            trainers.append(
                FederatedTrainer(
                    max_rounds=ROUNDS, clients_per_round=20, eval_every=ROUNDS, eval_last=LAST, faults=faults,
                    aggregation=RULES[rule](), accelerator="cpu", threads=1, engine="batched", seed=seed,
                    default_root_dir=root, name=str(number), enable_progress_bar=False,
                )
            )  # fmt: skip
        with trainers[0].environment():
            runs = parallel_runs.start(trainers, models, data, [None] * len(trainers))
            broken = loop.train(runs)
        values = [read_metrics(run.folder.metrics).get("server/test/acc", []) for run in runs]
    return [
        0.1 if run in broken else statistics.mean(value for _, value in found)
        for run, found in zip(runs, values, strict=True)
    ]


def train() -> None:
    done = {tuple(row[:4]) for row in rows()}
    with CSV.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(["method", "rule", "kind", "share", "accuracy"])
        for share in (0.0, *reversed(SHARES)):
            for method in METHODS:
                kinds = KINDS if share else ["none"]
                settings = [(method, rule, kind, str(share)) for kind in kinds for rule in RULES]
                todo = [setting for setting in settings if setting not in done]
                found = [accuracies(todo, seed) for seed in SEEDS] if todo else []
                writer.writerows(
                    [*setting, round(statistics.mean(of), 4)] for setting, *of in zip(todo, *found, strict=True)
                )
                file.flush()


def rows() -> list[list[str]]:
    return list(csv.reader(CSV.open()))[1:] if CSV.exists() else []


def draw() -> None:
    import matplotlib.pyplot as plt

    found = {tuple(row[:4]): 100 * float(row[4]) for row in rows()}
    with figures.style():
        figure, axes = plt.subplots(len(METHODS), len(KINDS), figsize=(figures.PAGE, 5), sharex=True, sharey=True)
        for axis_row, method in zip(axes, METHODS, strict=True):
            for axis, kind in zip(axis_row, KINDS, strict=True):
                for i, rule in enumerate(RULES):
                    keys = [(method, rule, "none", "0.0"), *((method, rule, kind, str(share)) for share in SHARES)]
                    points = [(100 * float(key[3]), found[key]) for key in keys if key in found]
                    look = {"color": figures.COLORS[i], "ls": figures.DASHES[i], "marker": figures.MARKERS[i]}
                    axis.plot(*zip(*points, strict=True), label=rule, **look)
                axis.set(title=f"{method}, {kind}", ylim=(0, 100))
                axis.grid(alpha=0.4)
        figure.supxlabel("bad clients, %", fontsize=8)
        figure.supylabel("test accuracy, %", fontsize=8)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, ncols=len(RULES), loc="upper center", frameon=False, columnspacing=1, handlelength=2.3
        )
        figure.tight_layout(rect=(0, 0, 1, 0.96), pad=0.5)
        figure.savefig(FIGURE, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    if "--draw" not in sys.argv[1:]:
        train()
    draw()
