"""Does compression sharpen minima? The sweep sweeps/digits_compression, as rows, table and figure of its page.

``python benchmarks/compression_table.py`` trains (seven minutes on one core), writes docs/compression.csv with a row
for each run and measured round, and renews table and figure of docs/compression.md. Called again with the same
``--out`` it trains nothing anew. Curvature depends on how far a run is, so runs are compared at equal loss, too.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import yaml

import fl_lightning as fl
from fl_lightning.commands.main import main as fl_lightning
from fl_lightning.core.figures import COLORS, MARKERS, PAGE, new_figure, place_legend
from fl_lightning.results.metrics import read_metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
CSV, TEXT, FIGURE = DOCS / "compression.csv", DOCS / "compression.md", DOCS / "compression.png"
SWEEP = "digits_compression"
HEADS = ("algorithm", "upload", "seed", "round", "bits a number", "accuracy", "train_loss", "lambda_max")
LOSS = 0.1
"""Training loss at which curvatures are compared."""
Key = tuple[str, str]


def upload(folder: Path) -> Key:
    """Algorithm and compression of a run, by its config."""
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    parts = [part["init_args"] for part in model["init_args"]["parts"] or ()]
    own = {"topk": ("rate",), "randk": ("rate",), "qsgd": ("levels", "bucket"), "sign": ()}
    words = [f"{part['method']} {' / '.join(f'{part[n]:g}' for n in own[part['method']])}".strip() for part in parts]
    return model["class_path"].rpartition(".")[2], words[0] if words else "32 bits"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A row for each measured round of a run."""
    algorithm, name = upload(folder)
    data, columns = fl.Digits(), read_metrics(folder / "metrics.csv")
    data.setup()
    x, y = map(torch.cat, zip(*data.eval_batches("train"), strict=True))
    found = []
    for line in map(json.loads, (folder / "flatness.jsonl").read_text().splitlines()):
        t = line["round"]
        checkpoint = folder / "checkpoints" / f"round_{t}.ckpt"
        net = getattr(fl, algorithm).load_from_checkpoint(checkpoint, net=fl.DigitsMLP()).net
        d = sum(p.numel() for p in net.parameters())
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(net(x), y)
        bits = dict(columns["comm/total_bits"])[t] / (10 * t) - 32 * d  # of an upload; ten clients a round
        row = (algorithm, name, line["seed"], t, f"{bits / d:.3f}", f"{dict(columns['server/test/acc'])[t]:.4f}")
        found.append(dict(zip(HEADS, (*row, f"{float(loss):.5f}", f"{line['value']:.4f}"), strict=True)))
    return found


def at_loss(run: list[dict[str, Any]], loss: float) -> float:
    """lambda_max where the training loss first falls to this value, linear in both logarithms; NaN if it never does."""
    points = [(math.log(float(row["train_loss"])), math.log(float(row["lambda_max"]))) for row in run]
    for (a, x), (b, y) in pairwise(points):
        if a > math.log(loss) >= b:
            return math.exp(x + (y - x) * (a - math.log(loss)) / (a - b))
    return math.nan


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" if not math.isnan(sum(values)) else "-"


def runs_of(rows: list[dict[str, Any]]) -> dict[Key, dict[str, list[dict[str, Any]]]]:
    """The rows by algorithm and upload, then by seed."""
    runs: dict[Key, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["algorithm"], row["upload"]][row["seed"]].append(row)
    return runs


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy, training loss and lambda_max of the last round, and lambda_max at equal loss."""
    heads = ("algorithm", "upload", "bits a number", "accuracy", "training loss", "λ_max", f"λ_max at loss {LOSS:g}")
    lines = [heads, ("---", "---", *["--:"] * 5)]
    for (algorithm, name), seeds in runs_of(rows).items():
        ends = [run[-1] for run in seeds.values()]
        cells = [
            spread([float(end[key]) for end in ends], n) for key, n in list(zip(HEADS[5:], (3, 3, 2), strict=True))
        ]
        equal = spread([at_loss(run, LOSS) for run in seeds.values()], 2)
        lines.append((algorithm, name, f"{float(ends[0]['bits a number']):.2f}", *cells, equal))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(rows: list[dict[str, Any]]) -> None:
    """lambda_max against training loss, one panel for each algorithm."""
    runs = runs_of(rows)
    names = list(dict.fromkeys(name for _, name in runs))
    with new_figure(PAGE, 2.6) as figure:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, algorithm in zip(panels, dict.fromkeys(a for a, _ in runs), strict=True):
            for i, name in enumerate(names):
                for seed, run in runs[algorithm, name].items():
                    x, y = ([float(row[key]) for row in run] for key in ("train_loss", "lambda_max"))
                    label = {"label": name} if seed == run[0]["seed"] else {}
                    axes.plot(x, y, color=COLORS[i], marker=MARKERS[i], markersize=2.5, linewidth=0.6, **label)
            axes.set(title=algorithm, xlabel="training loss", xscale="log", yscale="log")
        panels[0].set_ylabel("λ_max")
        place_legend(figure)
        figure.savefig(FIGURE, dpi=200)


def fill(text: str) -> str:
    """The page with the table of the file."""
    with CSV.open(newline="") as file:
        found = table(list(csv.DictReader(file)))
    return re.sub(r"(<!-- compression -->\n).*?(<!-- /compression -->)", rf"\g<1>{found}\g<2>", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS.parent / "runs", help="folder of the sweep")
    out = parser.parse_args().out.resolve()
    fl_lightning(["sweep", f"sweeps/{SWEEP}", "--seeds", "0,1,2", "--out", str(out)])
    with (out / SWEEP / "sweep.csv").open(newline="") as file:
        rows = [row for trial in csv.DictReader(file) for row in rows_of(Path(trial["folder"]))]
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows)
    TEXT.write_text(fill(TEXT.read_text()))


if __name__ == "__main__":
    main()
