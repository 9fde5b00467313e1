"""Callbacks of a run: progress, checkpoints, early stopping, flatness, trajectories, the figure, the statistics."""

from fl_lightning.trainer.callbacks.checkpoints import Checkpoints
from fl_lightning.trainer.callbacks.curves import Curves
from fl_lightning.trainer.callbacks.defaults import with_defaults
from fl_lightning.trainer.callbacks.flatness_monitor import FlatnessMonitor
from fl_lightning.trainer.callbacks.progress import Progress
from fl_lightning.trainer.callbacks.results import Results
from fl_lightning.trainer.callbacks.trajectory import Trajectory
from fl_lightning.trainer.run import Callback

__all__ = [
    "Callback",
    "Checkpoints",
    "Curves",
    "FlatnessMonitor",
    "Progress",
    "Results",
    "Trajectory",
    "with_defaults",
]
