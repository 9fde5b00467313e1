"""``fl-lightning interpolate``."""

from collections.abc import Sequence

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.commands import laboratory
from fl_lightning.commands.laboratory import Where
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer.trainer import FederatedTrainer

SUMMARY = "Measure the loss on the line between two checkpoints, and its barrier."


def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    a: str,
    b: str,
    /,
    splits: Sequence[Where] = ("train", "test"),
    samples: int | None = 10_000,
    points: int = 61,
    out: str | None = None,
) -> None:
    """Loss and accuracy on the line through two checkpoints, γ a + (1-γ) b, and the barrier between them.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        a: The checkpoint at γ = 1.
        b: The checkpoint at γ = 0.
        splits: Data: train (of all clients, a stratified sample) and test.
        samples: Training images; null: all.
        points: Values of γ from -1 to 2.
        out: Folder for the files; by default ``interpolate`` in the run folder of ``a``.
    """
    laboratory.interpolate(trainer, model, data, a, b, splits, samples, points, out)
