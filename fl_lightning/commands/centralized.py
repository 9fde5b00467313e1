"""``fl-lightning centralized``."""

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer.trainer import FederatedTrainer

SUMMARY = "Train on all clients' data at once: the papers' centralized references."


def run(trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule) -> None:
    """Trains on the union of the clients' data under ``lightning.Trainer``; ``max_rounds`` counts epochs.

    Args:
        trainer: The trainer.
        model: A local objective without federated state.
        data: The data.
    """
    trainer.centralized(model, data)
