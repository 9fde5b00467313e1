"""Processes, signals, precision, memory and the console of a run."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
