"""``fl-lightning flatness``."""

from fl_lightning.commands.laboratory import flatness as run

SUMMARY = "Measure the flatness of a checkpoint: Hessian, sharpness, discrepancy, drift."

__all__ = ["SUMMARY", "run"]
