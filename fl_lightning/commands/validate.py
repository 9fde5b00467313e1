"""``fl-lightning validate``."""

from fl_lightning import FederatedDataModule, FederatedTrainer, LocalObjective

SUMMARY = "Evaluate a model on the held-out part of the training data, or on all of it if none is held out."


def run(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None = None
) -> None:
    """Evaluates the global model.

    Args:
        trainer: The trainer.
        model: The local objective.
        data: The data.
        ckpt_path: The checkpoint, or "last"; by default the net's initial weights.
    """
    trainer.validate(model, data, ckpt_path)
