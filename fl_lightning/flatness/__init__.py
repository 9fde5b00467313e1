"""Flatness of a loss around given weights: plain functions of a network, a loss and data."""

from fl_lightning.flatness.discrepancy import flatness_discrepancy, measure_discrepancy, sharpness
from fl_lightning.flatness.functional import Batches, Loss, Reduce, gradient, hvp, mean_loss
from fl_lightning.flatness.hessian import Eigenpair, lambda_max

__all__ = [
    "Batches",
    "Eigenpair",
    "Loss",
    "Reduce",
    "flatness_discrepancy",
    "gradient",
    "hvp",
    "lambda_max",
    "mean_loss",
    "measure_discrepancy",
    "sharpness",
]
