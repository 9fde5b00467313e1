"""``fl-lightning landscape``."""

from fl_lightning.commands.laboratory import landscape as run

SUMMARY = "Draw the loss around checkpoints: surfaces, planes, perturbations, local trajectories."

__all__ = ["SUMMARY", "run"]
