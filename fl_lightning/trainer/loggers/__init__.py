"""Loggers of a run, with the round as x-axis: CSV always, others if asked for."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
