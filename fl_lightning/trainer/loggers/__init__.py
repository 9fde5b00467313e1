"""Loggers of a run, with the round as x-axis: CSV always, others if asked for."""

from fl_lightning.trainer.loggers.base import About, RunLogger
from fl_lightning.trainer.loggers.csv import CSVLogger
from fl_lightning.trainer.loggers.mlflow import MLFlowLogger
from fl_lightning.trainer.loggers.tensorboard import TensorBoardLogger
from fl_lightning.trainer.loggers.trackio import TrackioLogger
from fl_lightning.trainer.loggers.wandb import WandbLogger

__all__ = ["About", "CSVLogger", "MLFlowLogger", "RunLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger"]
