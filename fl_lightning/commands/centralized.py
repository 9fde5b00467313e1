"""``fl-lightning centralized``."""

from fl_lightning import FederatedDataModule, FederatedTrainer, LocalObjective

SUMMARY = "Train on all clients' data at once: the papers' centralized references."


def run(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None = None
) -> None:
    """Trains on the union of the clients' data under ``lightning.Trainer``; ``max_rounds`` counts epochs.

    Args:
        trainer: The trainer.
        model: A local objective without federated state.
        data: The data.
        ckpt_path: A checkpoint to continue in its own run folder; "last" or "best" for the newest run of this name; or
            "auto" for the newest one with these settings, and for a new run if there is none.
    """
    trainer.centralized(model, data, ckpt_path)
