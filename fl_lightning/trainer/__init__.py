"""A run: trainer, rounds, evaluation, clients' state, logs and checkpoints."""

from fl_lightning.trainer.trainer import FederatedTrainer

__all__ = ["FederatedTrainer"]
