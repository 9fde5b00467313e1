"""``fl-lightning test``."""

from fl_lightning import FederatedDataModule, FederatedTrainer, LocalObjective

SUMMARY = "Evaluate a model on the test set."


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
    trainer.test(model, data, ckpt_path)
