"""Flatness of a loss around given weights: functions of a network, a loss and data, and of matrices of curvature."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
