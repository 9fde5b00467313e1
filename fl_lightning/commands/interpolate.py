"""``fl-lightning interpolate``: the loss on the line between two checkpoints."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fl_lightning import FederatedDataModule, LocalObjective, flatness
from fl_lightning.commands.shared.landscapes import Landscape, check_no_buffers, models_of, output_folder, progress_bar
from fl_lightning.core import Interval, PositiveInt, checked
from fl_lightning.flatness.plots import plot_interpolation
from fl_lightning.trainer import FederatedTrainer, Split

SUMMARY = "Measure the loss on the line between two checkpoints, and its barrier."


@checked
def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    a: str,
    b: str,
    /,
    labels: Sequence[str] = (),
    splits: Sequence[Split] = ("train", "test"),
    samples: PositiveInt | None = 10_000,
    points: Annotated[int, Interval("[3, 1e6]")] = 61,
    out: str | None = None,
) -> None:
    """Measures loss and accuracy on the line through two checkpoints, γ a + (1-γ) b, and the barrier between them.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        a: The checkpoint at γ = 1.
        b: The checkpoint at γ = 0.
        labels: Names of the two in the figure; by default those of their runs.
        splits: Data: train (of all clients, a stratified sample) and test.
        samples: Number of training images; null: all.
        points: Number of values of γ from -1 to 2.
        out: Folder for the files; by default ``interpolate`` in the run folder of ``a``.

    Raises:
        UserError: If a checkpoint is of another net.
    """
    check_no_buffers(model)
    loaded = trainer.load(model, data, a)
    models, folder = models_of(loaded, [b], labels), output_folder(loaded, out, "interpolate")
    (one, w_a), (zero, w_b) = models.items()
    with progress_bar(loaded.fabric) as step:
        landscape = Landscape(loaded, folder, models, splits, samples, step)
        found = flatness.interpolate(
            a=w_a, b=w_b, gammas=np.linspace(-1, 2, points), **landscape.options("line", a=one, b=zero)
        )
        loaded.fabric.print("barrier: " + ", ".join(f"{name} {found.barrier(name):.4g}" for name in found.loss))
        landscape.save(
            "interpolate", {"line": found}, interpolate=lambda: plot_interpolation({"line": found}, (zero, one))
        )
