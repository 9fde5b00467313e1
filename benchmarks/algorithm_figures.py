"""A figure for each page of docs/algorithms: accuracy by round, and the loss around the final models.

``python benchmarks/algorithm_figures.py`` takes some minutes on one core. The problem is that of
configs/quickstart.yaml, as in digits_table.py: every algorithm with its defaults, one seed, nothing tuned. Names of
pages after it draw these alone.
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from typing import Any

import torch
from digits_table import PAGES, RUNS

from fl_lightning import SGD, Digits, DigitsMLP, Dirichlet, FederatedTrainer, algorithms
from fl_lightning.core.figures import COLORS, DASHES, PAGE, style
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.rng import generator
from fl_lightning.engine.catalogue import entries
from fl_lightning.flatness import random_plane, surface
from fl_lightning.flatness.plots import Scale, draw_contour
from fl_lightning.results.metrics import read_metrics

ROUNDS, EVERY, POINTS = 200, 4, 25
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
"""Pages that show other runs of digits_table.py beside FedAvg than those of their algorithms."""


def shown() -> dict[str, list[str]]:
    """By page, the runs that are drawn beside FedAvg; surfaces of the first three."""
    own: dict[str, list[str]] = {}
    for entry in entries():
        own.setdefault(entry.page.removesuffix(".md"), []).append(entry.name)
    return own | SHOWN


def train(label: str, data: Digits) -> tuple[list[tuple[int, float]], torch.Tensor]:
    """Test accuracy by round, and the final weights that evaluation uses."""
    name, options = RUNS[label]
    torch.manual_seed(generator(0, "initial weights").initial_seed())
    settings = {"optimizer": SGD(lr=0.1, weight_decay=4e-4), **options()}
    model = getattr(algorithms, name)(net=DigitsMLP(), **settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=ROUNDS, clients_per_round=10, eval_every=EVERY, threads=1, seed=0, accelerator="cpu",
            engine="batched", default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        run = trainer.fit(model, data)
        return read_metrics(run.folder.metrics)["server/test/acc"], run.global_model.clone()


def landscape(w: torch.Tensor, data: Digits) -> Any:
    """Training loss over two random directions, the same for all models."""
    net, loss = DigitsMLP(), torch.nn.CrossEntropyLoss(reduction="none")
    sets = {"train": lambda: data.eval_batches("train")}
    return surface(net, loss, sets, w, random_plane(FlatSpec(net), w, seed=0), torch.linspace(-1, 1, POINTS))


def draw(page: str, curves: dict[str, Any], surfaces: dict[str, Any]) -> None:
    """Writes the figure of a page as a PNG with a small palette."""
    from matplotlib.figure import Figure
    from PIL import Image

    labels = ["FedAvg", *shown()[page]]
    drawn = labels[:4]
    with style():
        figure = Figure(figsize=(PAGE, 1.9), layout="constrained")
        panels = figure.subplots(1, 1 + len(drawn), width_ratios=[1.6] + [1] * len(drawn))
        for label, color, dash in zip(labels, ("0.5", *COLORS), (DASHES[1], DASHES[0], *DASHES[2:]), strict=False):
            panels[0].plot(*zip(*curves[label], strict=True), color=color, linestyle=dash, label=label)
        panels[0].set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        panels[0].grid(alpha=0.3)
        scale = Scale.of([surfaces[label].loss["train"] for label in drawn])
        for label, panel in zip(drawn, panels[1:], strict=True):
            filled = draw_contour(panel, surfaces[label], scale.clip(surfaces[label].loss["train"]), scale)
            panel.set_title(label)
            panel.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1] if panel is panels[1] else [], box_aspect=1)
        scale.bar(figure, filled, list(panels[1:]), "training loss")
        file = BytesIO()
        figure.savefig(file, dpi=150)
    picture = Image.open(file).convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(PAGES / f"{page}-figure.png", optimize=True)


def main() -> None:
    torch.set_num_threads(1)
    runs = shown()
    pages = sys.argv[1:] or list(runs)
    data = Digits(num_clients=50, batch_size=16, partition=Dirichlet(alpha=0.05))
    curves, surfaces = {}, {}
    for label in dict.fromkeys(["FedAvg", *(label for page in pages for label in runs[page])]):
        curves[label], w = train(label, data)
        surfaces[label] = landscape(w, data)
        print(label, f"{curves[label][-1][1]:.3f}", flush=True)
    for page in pages:
        draw(page, curves, surfaces)


if __name__ == "__main__":
    main()
