"""Every algorithm with its defaults on the problem of configs/quickstart.yaml, three seeds or one; nothing is tuned.

``python benchmarks/digits_table.py`` trains (about ten minutes on one core), writes docs/algorithms/digits.csv and
digits.png, and renews the tables of the pages there. Names of runs after it train these alone and keep the other rows;
``--draw`` trains nothing. A run that diverges is recorded with the round that it broke off in.
"""

from __future__ import annotations

import csv
import math
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
from fl_lightning.algorithms.catalogue import entries
from fl_lightning.core.rng import generator
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.callbacks import Callback

PAGES = Path(__file__).resolve().parents[1] / "docs" / "algorithms"
CSV, FIGURE = PAGES / "digits.csv", PAGES / "digits.png"
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


def draw() -> None:
    """Accuracy (of 0.5 at least) against lambda_max: means with standard deviations, one point per run."""
    from matplotlib.figure import Figure

    kinds = {
        (False, False): ("o", "white", "no client state, one gradient a step"),
        (False, True): ("^", "white", "no client state, two gradients a step"),
        (True, False): ("o", "0.35", "client state, one gradient a step"),
        (True, True): ("^", "0.35", "client state, two gradients a step"),
    }
    models = {e.name: e for e in entries()}
    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="final Hessian $\\lambda_{max}$", ylabel="test accuracy")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:.1g}" if f"{x:.0e}"[0] in "2346" else "")
    points: dict[tuple[float, float], list[str]] = {}
    found = read()
    for label in filter(found.get, ALGORITHMS):
        name, _ = ALGORITHMS[label]
        if any(row["diverged_in_round"] or float(row["acc_mean_last5"]) < 0.5 for row in found[label]):
            continue
        x, y = ([float(row[c]) for row in found[label]] for c in ("lambda_max", "acc_mean_last5"))
        at = (statistics.mean(x), statistics.mean(y))
        marker, face, _ = kinds[models[name].cells[1] != "-", "SAM" in label.split() or models[name].passes[1] > 1]
        axes.errorbar(
            *at, xerr=deviation(x), yerr=deviation(y), fmt=marker, color="0.2", markerfacecolor=face,
            ecolor="0.8", elinewidth=0.8, markersize=7 if face == "white" else 4.5, zorder=3 + (face != "white"),
        )  # fmt: skip
        same = [p for p in points if abs(p[0] / at[0] - 1) < 0.01 and abs(p[1] - at[1]) < 1e-3]
        points.setdefault(same[0] if same else at, []).append(label)
    for marker, face, text in kinds.values():
        axes.plot([], [], marker, color="0.2", markerfacecolor=face, label=text)
    axes.legend(loc="lower left", fontsize="small")
    axes.grid(alpha=0.2)
    annotate(axes, {at: ", ".join(labels) for at, labels in points.items()})
    figure.savefig(FIGURE, metadata={"Software": None})


def annotate(axes: Any, texts: dict[tuple[float, float], str]) -> None:
    """Writes each text near its point, at the first of some places where it covers nothing."""
    from matplotlib.patheffects import withStroke

    figure = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    pixels = {at: axes.transData.transform(at) for at in texts}
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in pixels.values()]
    legend, frame = axes.get_legend().get_window_extent(), axes.get_window_extent()
    taken.append(legend.extents)
    angles = [0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202]
    for at, text in sorted(texts.items()):
        x, y = pixels[at]
        label = axes.text(*at, text, fontsize=7.5, zorder=6, path_effects=[withStroke(linewidth=2, foreground="white")])
        box = label.get_window_extent()
        best: tuple[float, float, float] | None = None
        for radius in range(8, 140, 6):
            for angle in angles:
                dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
                left = x + radius * dx - box.width * (1 - dx) / 2
                low = y + radius * dy - box.height * (1 - dy) / 2
                new = (left - 1, low - 1, left + box.width + 1, low + box.height + 1)
                inside = frame.x0 < new[0] and new[2] < frame.x1 and frame.y0 < new[1] and new[3] < frame.y1
                if best is None and inside and not any(overlap(new, old) for old in taken):
                    best = (left, low, radius)
                    taken.append(new)
        assert best is not None, text
        label.set_position(axes.transData.inverted().transform(best[:2]))
        if best[2] > 8:
            end = (min(max(x, best[0]), best[0] + box.width), min(max(y, best[1]), best[1] + box.height))
            xs, ys = zip(at, axes.transData.inverted().transform(end), strict=True)
            axes.plot(xs, ys, "-", color="0.6", linewidth=0.6, zorder=1)


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def main() -> None:
    if sys.argv[1:] != ["--draw"]:
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
    draw()
    for page in PAGES.glob("*.md"):
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
