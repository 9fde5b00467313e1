"""Flatness of a loss around given weights: plain functions of a network, a loss and data."""

from fl_lightning.flatness.functional import (
    Batches,
    Estimate,
    Loss,
    Progress,
    Reduce,
    gradient,
    hvp,
    mean_loss,
    mean_losses,
)
from fl_lightning.flatness.hessian import Eigenpair, Interrupted, Spectrum, lambda_max, spectrum
from fl_lightning.flatness.landscape import (
    along,
    evaluate,
    filter_normalized,
    interpolate,
    perturbation_curves,
    random_direction,
    random_plane,
    surface,
)
from fl_lightning.flatness.planes import Plane, Projection, project
from fl_lightning.flatness.probes import Density, spectral_density, trace
from fl_lightning.flatness.sharpness import flatness_discrepancy, lpf, measure_discrepancy, sharpness
from fl_lightning.flatness.updates import cosine, delta_epsilon, distances, divergence
from fl_lightning.flatness.values import Interpolation, Perturbation, Surface, Values

__all__ = [
    "Batches",
    "Density",
    "Eigenpair",
    "Estimate",
    "Interpolation",
    "Interrupted",
    "Loss",
    "Perturbation",
    "Plane",
    "Progress",
    "Projection",
    "Reduce",
    "Spectrum",
    "Surface",
    "Values",
    "along",
    "cosine",
    "delta_epsilon",
    "distances",
    "divergence",
    "evaluate",
    "filter_normalized",
    "flatness_discrepancy",
    "gradient",
    "hvp",
    "interpolate",
    "lambda_max",
    "lpf",
    "mean_loss",
    "mean_losses",
    "measure_discrepancy",
    "perturbation_curves",
    "project",
    "random_direction",
    "random_plane",
    "sharpness",
    "spectral_density",
    "spectrum",
    "surface",
    "trace",
]
