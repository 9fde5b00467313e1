"""Accuracy and lambda_max against hours of the devices: asynchronous servers beside rounds with a deadline.

``python benchmarks/clock_figure.py`` trains (a quarter of an hour on one core), writes docs/clock.csv with a row for
each run and evaluation, draws docs/clock.png and renews the table of docs/clock.md. Called again with the same
``--out`` it trains nothing anew.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from pages import between

from fl_lightning.commands.main import main as fl_lightning
from fl_lightning.core.figures import COLORS, PAGE, new_figure, place_legend
from fl_lightning.results.metrics import markdown, read_metrics

ROOT = Path(__file__).resolve().parents[1]
CSV, FIGURE, TEXT = ROOT / "docs/clock.csv", ROOT / "docs/clock.png", ROOT / "docs/clock.md"
MARKS = ("<!-- hours -->\n", "<!-- end -->\n")
SEEDS: dict[str, tuple[int, ...]] = {"slow devices": (0, 1, 2), "slow network": (0,)}
TARGET, LAST = 0.9, 0.9
METHODS = {
    "FedSAM, asynchronous": ("asynchronous", "FedSAM"),
    "FedAvg, asynchronous": ("asynchronous", "FedAvg"),
    "FedSAM, deadline": ("deadline", "FedSAM"),
    "FedAvg, deadline": ("deadline", "FedAvg"),
    "FedGMT, deadline": ("deadline", "FedGMT"),
}
PROFILES: dict[str, dict[str, float]] = {
    "slow devices": {},
    "slow network": {"sec_per_sample": 0.0005, "down_mbps": 0.2, "up_mbps": 0.05, "bandwidth_sigma": 1.0},
}
HEADS = ("profile", "method", "seed", "step", "hours", "accuracy", "lambda_max", "staleness", "late")


def config(name: str, algorithm: str, profile: str) -> dict[str, Any]:
    """A config of the package with another algorithm and other devices."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    model = found["model"]
    model["class_path"], model["init_args"]["rho"] = algorithm, 0.1
    if algorithm != "FedSAM":
        del model["init_args"]["rho"]
    found["trainer"]["clock"]["init_args"] |= PROFILES[profile]
    return found


def rows(folder: Path, profile: str, method: str, seed: int) -> list[list[object]]:
    """A row for each evaluation of a run."""
    columns = {name: dict(values) for name, values in read_metrics(folder / "metrics.csv").items()}
    found = list[list[object]]()
    for step, accuracy in columns["server/test/acc"].items():
        flatness, stale, late = (
            columns.get(name, {}).get(step) for name in ("flatness/lambda_max", "client/staleness", "client/late")
        )
        hours = columns["clock/time_s"][step] / 3600
        shown = "" if flatness is None else f"{flatness:.4f}"
        found.append([profile, method, seed, step, f"{hours:.5f}", f"{accuracy:.4f}", shown, stale, late])
    return found


def train(out: Path) -> None:
    found = list[list[object]]()
    for profile in PROFILES:
        for method, (name, algorithm) in METHODS.items():
            for seed in SEEDS[profile]:
                root = out / profile.replace(" ", "_") / f"{name}_{algorithm}_{seed}"
                if not list(root.glob("*/*/curves.png")) + list(root.glob("*/*/checkpoints/last.ckpt")):
                    root.mkdir(parents=True, exist_ok=True)
                    (root / "config.yaml").write_text(yaml.safe_dump(config(name, algorithm, profile)))
                    args = [f"--trainer.seed={seed}", "--trainer.engine=graphed", f"--trainer.default_root_dir={root}"]
                    fl_lightning(["fit", f"--config={root / 'config.yaml'}", *args])
                found += rows(next(root.glob("*/version_0")), profile, method, seed)
    with CSV.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADS, *found])


def curve(table: list[dict[str, str]], method: str, column: str, grid: Any) -> Any:
    """Values of the seeds at given hours, (seeds, hours), linear between evaluations."""
    curves = []
    for seed in map(str, SEEDS["slow devices"]):
        points = [
            (float(r["hours"]), float(r[column]))
            for r in table
            if (r["method"], r["seed"]) == (method, seed) and r[column]
        ]
        curves.append(np.interp(grid, *zip(*points, strict=True)))
    return np.array(curves)


def draw(table: list[dict[str, str]]) -> None:
    table = [row for row in table if row["profile"] == "slow devices"]
    grid = np.linspace(0.03, 1, 60)
    with new_figure(PAGE, 0.42 * PAGE) as figure:
        axes = figure.subplots(1, 2)
        for i, method in enumerate(METHODS):
            line = {"color": COLORS[i], "linestyle": "-" if "async" in method else "--"}
            for ax, column in zip(axes, ("accuracy", "lambda_max"), strict=True):
                of = curve(table, method, column, grid)
                ax.plot(grid, of.mean(0), label=method, **line)
                ax.fill_between(grid, of.min(0), of.max(0), color=COLORS[i], alpha=0.15, linewidth=0)
        axes[0].set(xlabel="hours of the devices", ylabel="test accuracy", ylim=(0.5, 1))
        axes[1].set(xlabel="hours of the devices", ylabel=r"Hessian $\lambda_{max}$", yscale="log")
        place_legend(figure)
        figure.savefig(FIGURE, dpi=150)


def cell(values: list[float], digits: int) -> str:
    """Mean over the seeds, with the lowest and the highest."""
    if np.isnan(values).any() or len(values) == 1:
        return "-" if np.isnan(values).any() else f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def by_method(table: list[dict[str, str]]) -> str:
    """A row for each profile and method; the last 0.1 hours count."""
    heads = ("devices", "method", "steps", "hours to 0.9", "accuracy", "lambda_max", "staleness", "late of 10")
    lines = [heads]
    for profile in PROFILES:
        for method in METHODS:
            runs = [
                [r for r in table if (r["profile"], r["method"], r["seed"]) == (profile, method, f"{seed}")]
                for seed in SEEDS[profile]
            ]
            ends = [[row for row in run if float(row["hours"]) >= LAST] for run in runs]
            reached = [[float(r["hours"]) for r in run if float(r["accuracy"]) >= TARGET] for run in runs]
            late, stale = (
                mean(mean(float(r[name] or 0) for r in run) for run in runs) for name in ("late", "staleness")
            )
            waits = "deadline" in method
            lines.append((
                profile, method, f"{mean(int(run[-1]['step']) for run in runs):.0f}",
                cell([of[0] if of else np.nan for of in reached], 2),
                cell([mean(float(r["accuracy"]) for r in end) for end in ends], 3),
                cell([mean(float(r["lambda_max"]) for r in end if r["lambda_max"]) for end in ends], 2),
                "" if waits else f"{stale:.1f}", f"{late:.1f}" if waits else "",
            ))  # fmt: skip
    return markdown(lines)


def rows_of_file() -> list[dict[str, str]]:
    """The rows of docs/clock.csv."""
    with CSV.open(newline="") as file:
        return list(csv.DictReader(file))


def fill(text: str) -> str:
    """The page with the table of the file."""
    return between(text, MARKS, by_method(rows_of_file()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "clock", help="folder of the runs")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.draw:
        train(args.out)
    draw(rows_of_file())
    TEXT.write_text(fill(TEXT.read_text()))


if __name__ == "__main__":
    main()
