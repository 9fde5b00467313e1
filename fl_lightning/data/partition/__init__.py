"""Partitions of the training samples among clients: pure functions of labels, seed and parameters."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
