"""Loggers of a run, with the round as x-axis: CSV always, Weights & Biases if asked for."""

from fl_lightning.trainer.loggers.base import About, RunLogger
from fl_lightning.trainer.loggers.csv import CSVLogger
from fl_lightning.trainer.loggers.wandb import WandbLogger

__all__ = ["About", "CSVLogger", "RunLogger", "WandbLogger"]
