"""Figures and tables of the documentation that no command of the package draws alone.

``python -m benchmarks.pages NAME [WHICH ...]`` with a name of `PAGES` trains what does not lie in runs/pages/ yet, by
the command line, and draws; ``make renew`` then fills the tables of the pages from the CSV files.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

import fl_lightning as fl
from fl_lightning.commands.main import main as fl_lightning
from fl_lightning.core.figures import COLORS, DASHES, MARKERS, PAGE, new_figure, place_legend
from fl_lightning.core.flat import FlatSpec
from fl_lightning.flatness import random_plane, surface
from fl_lightning.flatness.plots import Scale, draw_contour
from fl_lightning.results import load_yaml, write_table
from fl_lightning.results.metrics import markdown, read_metrics
from tests.catalogue import entries

ROOT = Path(__file__).resolve().parents[1]
DOCS, RUNS = ROOT / "docs", ROOT / "runs" / "pages"
Row = dict[str, Any]


def stored(path: Path) -> list[Row]:
    """Returns the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def trained(name: str, args: str, *options: str) -> Path:
    """Returns the folder of a run with these arguments of ``fit``, which is trained if it is not there."""
    name = re.sub(r"[^\w.-]+", "_", name)
    if not (RUNS / name).exists():
        fl_lightning(["fit", *args.split(), *options, f"--trainer.default_root_dir={RUNS}", f"--trainer.name={name}"])
    return RUNS / name / "version_0"


def swept(name: str, seeds: str) -> list[Row]:
    """Returns the trials of a sweep of the package; what lies in its folder is not trained again."""
    fl_lightning(["sweep", f"sweeps/{name}", "--seeds", seeds, "--out", str(RUNS)])
    return stored(RUNS / name / "sweep.csv")


def small(png: bytes | Path, scale: float = 1.0, colours: int = 64) -> Any:
    """Returns a picture at a part of its size, with a small palette."""
    from PIL import Image

    image = Image.open(png if isinstance(png, Path) else BytesIO(png)).convert("RGB")
    size = (round(image.width * scale), round(image.height * scale))
    image = image.resize(size, Image.Resampling.LANCZOS) if scale != 1 else image
    return image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def runs(rows: Sequence[Row], *values: str) -> list[list[Row]]:
    """Returns the rows that have all these values in their columns, by seed."""
    by_seed: dict[str, list[Row]] = {}
    for row in rows:
        if {*values} <= {*row.values()}:
            by_seed.setdefault(row["seed"], []).append(row)
    return [*by_seed.values()]


def spread(values: Sequence[float], digits: int, range_: bool = False) -> str:
    """Returns mean and standard deviation over the seeds, or the lowest and the highest; ``-`` if one has no value."""
    if math.isnan(sum(values)):
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    suffix = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if range_ else f" ± {stdev(values):.{digits}f}"
    return f"{mean(values):.{digits}f}{suffix}"


# docs/algorithms: accuracy by round, and the loss around the final models

DEFAULTS = "--config quickstart --model FedAvg --model.ascent null --model"
"""The problem of the quickstart without its rho and beta, which FedAvg lacks: every class has its defaults."""
PLAIN = "--trainer.eval_every 4 --trainer.loggers null --trainer.callbacks [Checkpoints] --trainer.accelerator cpu"
SAM = "--model.ascent SAM --model.ascent.rho 0.1"
SHOWN = {
    "afedpd": ["FedDyn", "AFedPD", "AFedPDSAM"],
    "averaging": ["FedAvg + SWA", "FedAvg + EMA"],
    "compositions": ["FedAvgM + ASAM", "SCAFFOLD + ASAM", "FedDyn + SAM"],
    "fedavg": ["FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"],
    "feddecorr": ["FedDecorr", "FedDecorr (scale: code)"],
    "feddyn": ["FedDyn", "FedDyn + SAM"],
    "fedgf": ["FedSAM", "FedGF"],
    "fedgloss": ["FedGloSS", "FedGloSS + SAM", "NaiveFedGloSS"],
    "fedinit": ["FedAvg + relaxed_init 0.1"],
    "fedmuon": ["LocalMuon", "FedMuon"],
    "fednsam": ["FedNSAM", "FedNSAM (along: momentum)"],
    "fedsam": ["FedSAM", "FedASAM"],
    "fedsmoo": ["FedDyn", "FedSMOO"],
    "fedspeed": ["FedDyn", "FedSpeed"],
    "fedswa": ["FedSWA", "FedMoSWA"],
    "fedtoga": ["FedSpeed", "FedTOGA"],
    "scaffold": ["SCAFFOLD", "FedGAMMA"],
}
"""Pages that show other runs beside FedAvg than those of their algorithms."""
WITH = {
    "SWA": "--model.averaging SWA", "EMA": "--model.averaging EMA", "SAM": SAM, "ASAM": "--model.ascent ASAM",
    "relaxed_init 0.1": "--model.relaxed_init 0.1", "scale: code": "--model.scale code",
    "along: momentum": "--model.along momentum",
}  # fmt: skip
"""The settings of a run whose name has more than its class."""
OWN = ("FedAdamW", "FedMuon", "LocalMuon")
"""Algorithms with an optimizer of their own."""


def default_run(label: str) -> tuple[list[tuple[int, float]], torch.Tensor]:
    """Returns accuracy by round and the final weights of a run with the class's defaults, such as ``FedDyn + SAM``."""
    name, *parts = re.split(r" \+ | \(|\)$", label)
    settings = [WITH.get(part, "") for part in parts] + ["--model.optimizer null"] * (name in OWN)
    folder = trained(label, " ".join([DEFAULTS, name, *settings, PLAIN]))
    model = getattr(fl, name).load_from_checkpoint(folder / "checkpoints/last.ckpt", net=fl.DigitsMLP())
    w = torch.cat([p.detach().reshape(-1) for p in model.net.parameters()])
    return read_metrics(folder / "metrics.csv")["server/test/acc"], w


def algorithms(*pages: str) -> None:
    """Draws the figures of the pages of these names, or of all."""
    by_page: dict[str, list[str]] = {}
    for entry in entries():
        by_page.setdefault(entry.page.removesuffix(".md"), []).append(entry.name)
    for page in pages or by_page | SHOWN:
        labels = ["FedAvg", *(by_page | SHOWN)[page]]
        draw_algorithms(labels, {label: default_run(label) for label in labels}, DOCS / f"algorithms/{page}-figure.png")


def draw_algorithms(labels: list[str], runs: dict[str, Any], path: Path) -> None:
    """Draws curves of all runs, and the training loss of the first four over the same two random directions."""
    data, net = fl.Digits(num_clients=50, batch_size=16, partition=fl.Dirichlet(0.05)), fl.DigitsMLP()
    data.setup("fit")
    loss, steps = torch.nn.CrossEntropyLoss(reduction="none"), torch.linspace(-1, 1, 25)
    landscapes = {
        label: surface(
            net, loss, {"train": lambda: data.eval_batches("train")}, w, random_plane(FlatSpec(net), w, 0), steps
        )
        for label, (_, w) in list(runs.items())[:4]
    }
    with new_figure(PAGE, 1.9) as figure:
        panels = figure.subplots(1, 1 + len(landscapes), width_ratios=[1.6] + [1] * len(landscapes))
        for label, color, dash in zip(labels, ("0.5", *COLORS), (DASHES[1], DASHES[0], *DASHES[2:]), strict=False):
            panels[0].plot(*zip(*runs[label][0], strict=True), color=color, linestyle=dash, label=label)
        panels[0].set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
        panels[0].grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        scale = Scale.of([landscape.loss["train"] for landscape in landscapes.values()])
        for (label, landscape), panel in zip(landscapes.items(), panels[1:], strict=True):
            filled = draw_contour(panel, landscape, scale.clip(landscape.loss["train"]), scale)
            panel.set_title(label)
            panel.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1] if panel is panels[1] else [], box_aspect=1)
        scale.bar(figure, filled, list(panels[1:]), "training loss")
        file = BytesIO()
        figure.savefig(file, dpi=150)
    small(file.getvalue(), colours=256).save(path, optimize=True)


# docs/clock.md: servers without rounds, and rounds with a deadline

CLOCK = {
    "FedSAM, asynchronous": "--config asynchronous",
    "FedAvg, asynchronous": "--config asynchronous --model FedAvg",
    "FedSAM, deadline": "--config deadline --model FedSAM --model.rho 0.1",
    "FedAvg, deadline": "--config deadline --model FedAvg",
    "FedGMT, deadline": "--config deadline",
}
DEVICES = {
    "slow devices": ((0, 1, 2), ""),
    "slow network": ((0,), " ".join(f"--trainer.clock.{setting}" for setting in (
        "sec_per_sample 0.0005", "down_mbps 0.2", "up_mbps 0.05", "bandwidth_sigma 1.0"
    ))),
}  # fmt: skip
"""Seeds, and settings of the clock."""
HOURS = {"hours": "clock/time_s", "accuracy": "server/test/acc", "lambda_max": "flatness/lambda_max"}
LATENESS = {"staleness": "client/staleness", "late": "client/late"}


def clock() -> None:
    """Writes docs/clock.csv, a row an evaluation, and docs/clock.png."""
    rows: list[Row] = []
    for (devices, (seeds, settings)), (method, args) in [(d, m) for d in DEVICES.items() for m in CLOCK.items()]:
        for seed in seeds:
            arguments = f"{args} {settings} --trainer.seed {seed} --trainer.engine graphed"
            metrics = read_metrics(trained(f"{devices}, {method}, {seed}", arguments) / "metrics.csv")
            columns = {head: dict(metrics.get(name, [])) for head, name in (HOURS | LATENESS).items()}
            for step in columns["accuracy"]:
                row = {head: values.get(step, "") for head, values in columns.items()}
                row["hours"] = f"{row['hours'] / 3600:.5f}"
                row |= {head: f"{row[head]:.4f}" for head in ("accuracy", "lambda_max") if row[head] != ""}
                rows.append({"profile": devices, "method": method, "seed": seed, "step": step, **row})
    write_table(DOCS / "clock.csv", rows[0], (row.values() for row in rows))
    draw_clock()


def draw_clock() -> None:
    grid, rows = np.linspace(0.03, 1, 60), [r for r in stored(DOCS / "clock.csv") if r["profile"] == "slow devices"]
    with new_figure(PAGE, 0.42 * PAGE) as figure:
        axes = figure.subplots(1, 2)
        for (axis, column), (i, method) in product(
            zip(axes, ("accuracy", "lambda_max"), strict=True), enumerate(CLOCK)
        ):
            curves = [
                [(float(row["hours"]), float(row[column])) for row in run if row[column]] for run in runs(rows, method)
            ]
            values = np.array([np.interp(grid, *zip(*curve, strict=True)) for curve in curves])
            axis.plot(grid, values.mean(0), label=method, color=COLORS[i], linestyle="-" if "async" in method else "--")
            axis.fill_between(grid, values.min(0), values.max(0), color=COLORS[i], alpha=0.15, linewidth=0)
        axes[0].set(xlabel="hours of the devices", ylabel="test accuracy", ylim=(0.5, 1))
        axes[1].set(xlabel="hours of the devices", ylabel=r"Hessian $\lambda_{max}$", yscale="log")
        place_legend(figure)
        figure.savefig(DOCS / "clock.png", dpi=150)


def clock_table() -> str:
    """Returns a row for each kind of devices and method; the last tenth of the hour counts."""
    rows = stored(DOCS / "clock.csv")
    lines = [["devices", "method", "steps", "hours to 0.9", "accuracy", "lambda_max", "staleness", "late of 10"]]
    for devices, method in product(DEVICES, CLOCK):
        seeds = runs(rows, devices, method)
        reached = [[float(r["hours"]) for r in run if float(r["accuracy"]) >= 0.9] for run in seeds]
        ends = [[row for row in run if float(row["hours"]) >= 0.9] for run in seeds]
        accuracy, sharpness = (
            [mean(float(row[column]) for row in end if row[column]) for end in ends] for column in [*HOURS][1:]
        )
        stale, late = (f"{mean(mean(float(r[name] or 0) for r in run) for run in seeds):.1f}" for name in LATENESS)
        lines.append([
            devices, method, f"{mean(int(run[-1]['step']) for run in seeds):.0f}",
            spread([(hours or [math.nan])[0] for hours in reached], 2, range_=True),
            spread(accuracy, 3, range_=True), spread(sharpness, 2, range_=True),
            *(("", late) if "deadline" in method else (stale, "")),
        ])  # fmt: skip
    return markdown(lines)


# docs/compression.md: does compression sharpen minima?

COMPRESSION = ("algorithm", "upload", "seed", "round", "bits a number", "accuracy", "train_loss", "lambda_max")
UPLOADS = {"topk": ("rate",), "randk": ("rate",), "qsgd": ("levels", "bucket"), "sign": ()}
"""The settings that a method of compression has."""


def compression() -> None:
    """Writes docs/compression.csv, a row a measured round of sweeps/digits_compression, and docs/compression.png."""
    rows = [row for trial in swept("digits_compression", "0,1,2") for row in compressed(Path(trial["folder"]))]
    write_table(DOCS / "compression.csv", COMPRESSION, rows)
    draw_compression()


def compressed(folder: Path) -> list[list[Any]]:
    """Returns a row for each measured round of a run."""
    model = load_yaml((folder / "config.yaml").read_text())["model"]
    algorithm, upload = model["class_path"].rpartition(".")[2], "32 bits"
    for part in model["init_args"]["parts"] or ():
        args = part["init_args"]
        upload = f"{args['method']} {' / '.join(f'{args[name]:g}' for name in UPLOADS[args['method']])}".strip()
    columns = {name: dict(values) for name, values in read_metrics(folder / "metrics.csv").items()}
    data = fl.Digits()
    data.setup()
    x, y = map(torch.cat, zip(*data.eval_batches("train"), strict=True))
    rows = []
    for line in map(json.loads, (folder / "flatness.jsonl").read_text().splitlines()):
        t, checkpoint = line["round"], folder / f"checkpoints/round_{line['round']}.ckpt"
        net = getattr(fl, algorithm).load_from_checkpoint(checkpoint, net=fl.DigitsMLP()).net
        d = sum(p.numel() for p in net.parameters())
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(net(x), y))
        bits = columns["comm/total_bits"][t] / (10 * t * d) - 32  # of an upload; ten clients a round
        accuracy = columns["server/test/acc"][t]
        rows.append(
            [
                algorithm,
                upload,
                line["seed"],
                t,
                f"{bits:.3f}",
                f"{accuracy:.4f}",
                f"{loss:.5f}",
                f"{line['value']:.4f}",
            ]
        )
    return rows


def draw_compression() -> None:
    """Draws lambda_max against training loss, one panel for each algorithm."""
    rows = stored(DOCS / "compression.csv")
    with new_figure(PAGE, 2.6) as figure:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, algorithm in zip(panels, dict.fromkeys(row["algorithm"] for row in rows), strict=True):
            for i, upload in enumerate(dict.fromkeys(row["upload"] for row in rows)):
                for run in runs(rows, algorithm, upload):
                    x, y = ([float(row[key]) for row in run] for key in ("train_loss", "lambda_max"))
                    label = {"label": upload} if run[0]["seed"] == "0" else {}
                    axes.plot(x, y, color=COLORS[i], marker=MARKERS[i], markersize=2.5, linewidth=0.6, **label)
            axes.set(title=algorithm, xlabel="training loss", xscale="log", yscale="log")
        panels[0].set_ylabel("λ_max")
        place_legend(figure)
        figure.savefig(DOCS / "compression.png", dpi=200)


def compression_table(loss: float = 0.1) -> str:
    """Returns accuracy and lambda_max of the last round, and lambda_max where the loss first falls to ``loss``."""
    rows = stored(DOCS / "compression.csv")
    heads = ["algorithm", "upload", "bits a number", "accuracy", "λ_max", f"λ_max at loss {loss:g}"]
    lines = [heads]
    for algorithm, upload in dict.fromkeys((row["algorithm"], row["upload"]) for row in rows):
        seeds = runs(rows, algorithm, upload)
        ends = [spread([float(run[-1][name]) for run in seeds], n) for name, n in (("accuracy", 3), ("lambda_max", 2))]
        bits = f"{float(seeds[0][-1]['bits a number']):.2f}"
        lines.append([algorithm, upload, bits, *ends, spread([at_loss(run, loss) for run in seeds], 2)])
    return markdown(lines)


def at_loss(run: list[Row], loss: float) -> float:
    """Returns lambda_max where the training loss first falls to this value, linear in both logarithms; NaN if never."""
    points = [(math.log(float(row["train_loss"])), math.log(float(row["lambda_max"]))) for row in run]
    for (a, x), (b, y) in pairwise(points):
        if a > math.log(loss) >= b:
            return math.exp(x + (y - x) * (a - math.log(loss)) / (a - b))
    return math.nan


# docs/faults.md: aggregation rules under bad clients

ROBUST = ("method", "rule", "kind", "share", "accuracy")
CLASS, SHARE, KIND = (
    re.compile(pattern) for pattern in (r"(?:class_path': ')?(\w+)'?", r"'share': ([\d.]+)", r"'kind': '(\w+)'")
)


def robustness() -> None:
    """Writes docs/robustness.csv, a row a setting of sweeps/digits_robustness, and docs/robustness.png."""
    scores: dict[tuple[str, ...], list[float]] = {}
    for trial in swept("digits_robustness", "0,1,2"):
        rule = CLASS.search(trial["trainer.aggregation"] or "mean")[1] + " 0.4" * (
            "'share'" in trial["trainer.aggregation"]
        )
        kind, share = (pattern.search(trial["trainer.faults"]) for pattern in (KIND, SHARE))
        key = (CLASS.search(trial["model"])[1], rule, kind[1] if kind else "none", share[1] if share else "0.0")
        scores.setdefault(key, []).append(float(trial["server/test/acc_headline"] or 0.1))  # one that diverged guesses
    write_table(DOCS / "robustness.csv", ROBUST, ([*key, round(mean(values), 4)] for key, values in scores.items()))
    draw_robustness()


def draw_robustness() -> None:
    """Draws accuracy by the share of bad clients: a row of panels for each method, a column for each kind."""
    rows = stored(DOCS / "robustness.csv")
    methods, rules, kinds = (list(dict.fromkeys(row[key] for row in rows)) for key in ROBUST[:3])
    kinds.remove("none")
    with new_figure(PAGE, 5.0) as figure:
        panels = figure.subplots(len(methods), len(kinds), sharex=True, sharey=True, squeeze=False)
        cells = zip(panels.flat, product(methods, kinds), strict=True)
        for (axis, (method, kind)), (i, rule) in product(cells, enumerate(rules)):
            matches = [
                row for row in rows if (row["method"], row["rule"]) == (method, rule) and row["kind"] in ("none", kind)
            ]
            points = sorted((100 * float(row["share"]), 100 * float(row["accuracy"])) for row in matches)
            axis.plot(*zip(*points, strict=True), label=rule, color=COLORS[i], ls=DASHES[i], marker=MARKERS[i])
            axis.set(title=f"{method}, {kind}", ylim=(0, 100))
            axis.grid(alpha=0.4)
        for axis in panels[-1]:
            axis.set_xlabel("bad clients, %")
        figure.supylabel("test accuracy, %", fontsize=8)
        place_legend(figure)
        figure.savefig(DOCS / "robustness.png", dpi=150)


# docs/theory.md: what examples/theory.py writes


def theory_table() -> str:
    """Returns a row for each quantity of a theorem; of several values of a parameter the one with the largest error."""
    rows = stored(DOCS / "theory/theory.csv")
    worst = dict[tuple[str, str, str], Row]()
    for row in rows:
        quantity = row["theorem"], row["clients"], re.sub(r", [Kηρ] = .*", "", row["quantity"])
        worst[quantity] = max(row, worst.get(quantity, row), key=lambda candidate: float(candidate["error"]))
    return markdown([[*rows[0]], *(row.values() for row in worst.values())])


# docs/gallery.md and notebooks: what their own commands and cells draw

DRAWN = {
    "curves": "comparison/curves.png", "division": "division/heatmap.png", "clients": "served/clients.png",
    "surface": "surface/surface.png", "plane": "plane/plane.png", "perturbation": "perturbation/perturbation.png",
    "interpolate": "line/interpolate.png", "trajectory": "trajectory/trajectory.png",
}  # fmt: skip
"""What a command of the gallery writes, by the name of the picture."""


def gallery() -> None:
    """Runs the commands of docs/gallery.md, and keeps what they draw at the size of a page."""
    commands = "".join(re.findall(r"```sh\n(.*?)```", (DOCS / "gallery.md").read_text(), re.DOTALL))
    run = f'set -e\nfl-lightning() {{ PYTHONPATH={ROOT} {sys.executable} -m fl_lightning "$@"; }}\n'
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "configs").symlink_to(ROOT / "configs")
        env = {**os.environ, "WANDB_MODE": "offline"}
        subprocess.run(["bash", "-c", run + commands], cwd=folder, env=env, check=True)
        for name, file in DRAWN.items():
            small(Path(folder) / file, 0.54).save(DOCS / f"gallery/{name}.png", optimize=True)


def notebooks(*names: str) -> None:
    """Runs the notebooks of these names, or all, and stores them with small pictures."""
    import nbformat
    from nbclient import NotebookClient

    folder = ROOT / "notebooks"
    for path in [folder / f"{name}.ipynb" for name in names] or sorted(folder.glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        metadata = dict(book.metadata)
        NotebookClient(book, timeout=600, record_timing=False, resources={"metadata": {"path": folder}}).execute()
        for data in (out.get("data", {}) for cell in book.cells for out in cell.get("outputs", [])):
            if "image/png" in data:
                file = BytesIO()
                small(base64.b64decode(data["image/png"]), colours=128).save(file, "PNG", optimize=True)
                data["image/png"] = base64.b64encode(file.getvalue()).decode()
        book.metadata = nbformat.from_dict(metadata)
        nbformat.write(book, path)


PAGES: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (algorithms, clock, compression, robustness, gallery, notebooks)
}

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in PAGES:
        sys.exit(f"pages: give one of {', '.join(PAGES)}")
    PAGES[sys.argv[1]](*sys.argv[2:])
