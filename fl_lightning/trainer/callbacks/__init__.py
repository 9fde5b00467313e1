"""Listeners of a run: progress, checkpoints, flatness, trajectories, the figure, the statistics."""

from fl_lightning.trainer.callbacks.base import Callback
from fl_lightning.trainer.callbacks.checkpoints import Checkpoints
from fl_lightning.trainer.callbacks.curves import Curves
from fl_lightning.trainer.callbacks.flatness import FlatnessMonitor
from fl_lightning.trainer.callbacks.progress import Progress
from fl_lightning.trainer.callbacks.results import Results
from fl_lightning.trainer.callbacks.trajectory import Trajectory

__all__ = ["Callback", "Checkpoints", "Curves", "FlatnessMonitor", "Progress", "Results", "Trajectory"]
