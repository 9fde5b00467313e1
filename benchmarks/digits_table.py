"""Every algorithm with its defaults on the problem of configs/quickstart.yaml, three seeds or one; nothing is tuned.

``python benchmarks/digits_table.py`` trains (about ten minutes on one core), writes docs/algorithms/digits.csv, and
renews the tables of the pages there. Names of runs after it train these alone and keep the other rows. A run that
diverges is recorded with the round that it broke off in.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning import (
    ASAM,
    EMA,
    SAM,
    SGD,
    SWA,
    Digits,
    DigitsMLP,
    Dirichlet,
    Discrepancy,
    FederatedTrainer,
    FlatnessMonitor,
    LambdaMax,
    ServerAdam,
    UserError,
    algorithms,
)
from fl_lightning.core.rng import generator
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.callbacks import Callback

PAGES = Path(__file__).resolve().parents[1] / "docs" / "algorithms"
CSV = PAGES / "digits.csv"
ROUNDS, EVERY, LAST, SEEDS = 200, 10, 5, (0, 1, 2)
COLUMNS = (
    "algorithm", "seed", "diverged_in_round", "acc_final", "acc_mean_last5", "lambda_max", "lambda_max_residual",
    "discrepancy", "norm_w", "round_s", "bits",
)  # fmt: skip

Options = Callable[[], dict[str, Any]]


def some(name: str, option: str, value: Any) -> tuple[str, tuple[str, Options]]:
    return f"{name} ({option}: {value})".replace("True", "true").replace("False", "false"), (
        name, lambda: {option: value}
    )  # fmt: skip


ALGORITHMS: dict[str, tuple[str, Options]] = {
    **{name: (name, dict) for name in sorted(algorithms.__all__, key=str.lower)},
    **{name: (name, lambda: {"optimizer": None}) for name in ("FedAdamW", "FedMuon", "LocalMuon")},  # their own
    "FedDyn + SAM": ("FedDyn", lambda: {"ascent": SAM(0.1)}),
    "FedGloSS + SAM": ("FedGloSS", lambda: {"ascent": SAM(0.1)}),  # the quickstart itself
}
CHOICES: dict[str, tuple[str, Options]] = {
    "FedAdam (v0: tau2)": ("FedAvg", lambda: {"server_update": ServerAdam(v0="tau2")}),
    "FedAdam (bias_correction: true)": ("FedAvg", lambda: {"server_update": ServerAdam(bias_correction=True)}),
    **dict([
        some("FedCM", "step", "gf_repo"),
        some("FedDecorr", "scale", "code"),
        some("FedDyn", "prox", "unsquared"),
        some("FedGAMMA", "c_scale", "mean"),
        some("FedGF", "c", 0.0),
        some("FedGF", "c", 1.0),
        some("FedGMT", "kl_tau2", False),
        some("FedGMTv2", "v2_init", "first_seen"),
        some("FedLC", "denominator", "others"),
        some("FedLESAM", "ref", "previous_round"),
        some("FedLESAMS", "cv_scale", 0.1),
        some("FedNSAM", "along", "momentum"),
        some("FedSMOO", "s_agg", "mu_only"),
        some("FedSMOO", "use_dual", False),
        some("FedSpeed", "dual_agg", "active"),
        some("FedSpeed", "alpha", 0.9),
        some("MOON", "unseen", "initial"),
    ]),
    "FedGloSS + SAM (sigma_scale: code)": ("FedGloSS", lambda: {"ascent": SAM(0.1), "sigma_scale": "code"}),
    "FedGloSS + SAM (sigma_ref: clean)": ("FedGloSS", lambda: {"ascent": SAM(0.1), "sigma_ref": "clean"}),
}  # fmt: skip
COMPOSITIONS: dict[str, tuple[str, Options]] = {
    "FedAvg + SWA": ("FedAvg", lambda: {"averaging": SWA()}),
    "FedAvg + EMA": ("FedAvg", lambda: {"averaging": EMA()}),
    "FedASAM + SWA": ("FedASAM", lambda: {"averaging": SWA()}),
    "FedAvg + relaxed_init 0.1": ("FedAvg", lambda: {"relaxed_init": 0.1}),
    **{f"{name} + ASAM": (name, lambda: {"ascent": ASAM()}) for name in ("FedProx", "FedAvgM", "SCAFFOLD", "AdaBest")},
}
RUNS = {**ALGORITHMS, **CHOICES, **COMPOSITIONS}
"""The runs, by their name in the tables: the class, and the settings that differ from its defaults."""
GROUPS = {"compositions": COMPOSITIONS}


def train(label: str, seed: int) -> dict[str, Any]:
    """One run, as a row of the file."""
    name, options = RUNS[label]
    torch.manual_seed(generator(seed, "initial weights").initial_seed())  # as the command line does
    net = DigitsMLP()
    model = getattr(algorithms, name)(**{"net": net, "optimizer": SGD(lr=0.1, weight_decay=4e-4), **options()})
    data = Digits(num_clients=50, batch_size=16, partition=Dirichlet(alpha=0.05))
    callbacks: list[Callback] = [FlatnessMonitor(ROUNDS, [LambdaMax(tol=1e-3), Discrepancy()])]
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=10, local_epochs=1, eval_every=EVERY, threads=1, seed=seed,
            accelerator="cpu", callbacks=callbacks, default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        row: dict[str, Any] = {"algorithm": label, "seed": seed}
        try:
            run = trainer.fit(model, data)
        except UserError as error:
            if "diverged" not in str(error):
                raise
            return {**row, "diverged_in_round": trainer.run.rounds_done + 1}
        columns = read_metrics(run.folder.metrics)
    accuracy = [value for _, value in columns["server/test/acc"]]
    last = run.metrics
    return {
        **row,
        "acc_final": f"{accuracy[-1]:.4f}",
        "acc_mean_last5": f"{statistics.mean(accuracy[-LAST:]):.4f}",
        "lambda_max": f"{last['flatness/lambda_max']:.4g}",
        "lambda_max_residual": f"{last['flatness/lambda_max_residual']:.1e}",
        "discrepancy": f"{last['flatness/discrepancy']:.3g}",
        "norm_w": f"{float(run.global_model.norm()):.4g}",
        "round_s": f"{statistics.median(value for _, value in columns['time/round_s']):.4f}",
        "bits": int(last["comm/total_bits"]),
    }


def read() -> dict[str, list[dict[str, str]]]:
    """The rows of the file, by algorithm."""
    rows: dict[str, list[dict[str, str]]] = {}
    with CSV.open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["algorithm"], []).append(row)
    return rows


def spread(rows: Sequence[dict[str, str]], column: str, digits: str, scale: float = 1) -> str:
    """Mean and standard deviation (n - 1) over the seeds, times the scale; of one seed its value."""
    values = [scale * float(row[column]) for row in rows]
    return f"{statistics.mean(values):{digits}}" + (f" ± {deviation(values):{digits}}" if len(values) > 1 else "")


def deviation(values: Sequence[float]) -> float:
    """Standard deviation (n - 1); 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(labels: Sequence[str]) -> str:
    """These runs as Markdown."""
    lines = ["| run | accuracy, % | λ_max | Δ_F | ‖w‖ |", "|---|--:|--:|--:|--:|"]
    found = read()
    for label in labels:
        if not (rows := found.get(label)):
            lines.append(f"| {label} | not measured yet | | | |")
            continue
        if broken := [f"seed {row['seed']}: {row['diverged_in_round']}" for row in rows if row["diverged_in_round"]]:
            lines.append(f"| {label} | diverged in round ({', '.join(broken)}) | | | |")
            continue
        norm = statistics.mean(float(row["norm_w"]) for row in rows)
        cells = (
            spread(rows, "acc_mean_last5", ".1f", 100), spread(rows, "lambda_max", ".2f"),
            spread(rows, "discrepancy", ".3f"), f"{norm:.1f}" if norm < 1e6 else f"{norm:.0e}",
        )  # fmt: skip
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fill(text: str) -> str:
    """A page with the tables of the file: between ``digits: names`` and ``/digits``, both HTML comments."""

    def new(match: re.Match[str]) -> str:
        labels = list(GROUPS[match[2]]) if match[2] in GROUPS else match[2].split(", ")
        return match[1] + table(labels) + match[3]

    return re.sub(r"(<!-- digits: (.*?) -->\n).*?(<!-- /digits -->)", new, text, flags=re.DOTALL)


def main() -> None:
    labels = sys.argv[1:] or list(RUNS)
    rows: dict[str, list[dict[str, Any]]] = {**read()} if CSV.exists() else {}
    for label in labels:
        rows[label] = [train(label, seed) for seed in SEEDS]
        for row in rows[label]:
            print(*row.values(), flush=True)
        with CSV.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for name in RUNS if name in rows for row in rows[name])
    for page in PAGES.glob("*.md"):
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
