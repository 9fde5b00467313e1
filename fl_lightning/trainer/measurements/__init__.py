"""Measures of flatness, which `FlatnessMonitor` and ``fl-lightning flatness`` take by name.

The functions are in `fl_lightning.flatness`; these classes choose the model and the data. Every number is a
`Measurement`, which carries its protocol.
"""

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.trainer.measurements.base import (
    Measure,
    Measurement,
    MeasurementContext,
    check_statistics,
    dry_round,
)
from fl_lightning.trainer.measurements.client_curvature import ClientLambdaMax
from fl_lightning.trainer.measurements.clients import ClientEvaluation
from fl_lightning.trainer.measurements.curvature import (
    HessianTrace,
    LambdaMax,
    SpectralDensity,
    Spectrum,
    check_measures,
)
from fl_lightning.trainer.measurements.sharpness import LPF, AdaptiveSharpness, CohortLoss, Discrepancy, Sharpness
from fl_lightning.trainer.measurements.updates import DeltaEpsilon, PseudoGradient, Updates

__all__ = [
    "LPF",
    "AdaptiveSharpness",
    "ClientEvaluation",
    "ClientLambdaMax",
    "CohortLoss",
    "DeltaEpsilon",
    "Discrepancy",
    "HessianTrace",
    "LambdaMax",
    "Measure",
    "Measurement",
    "MeasurementContext",
    "PseudoGradient",
    "Sharpness",
    "SpectralDensity",
    "Spectrum",
    "Updates",
    "check_measures",
    "check_statistics",
    "default_measures",
    "dry_round",
]


def default_measures(objective: LocalObjective | None = None) -> list[Measure]:
    """Returns the measures that are used if none are given: those that an objective without a global model has, too."""
    measures: list[Measure] = [LambdaMax(), Discrepancy()]
    return [m for m in measures if objective is None or objective.has_global_model or not m.of_global_model]
