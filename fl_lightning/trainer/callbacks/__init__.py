"""Callbacks of a run: progress, checkpoints, early stopping, flatness, trajectories, the figure, the statistics."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
