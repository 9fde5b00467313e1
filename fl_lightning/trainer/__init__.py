"""A run: trainer, rounds, evaluation, clients' state, logs and checkpoints."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
