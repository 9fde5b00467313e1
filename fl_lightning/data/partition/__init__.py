"""Partitions of the training samples among clients: pure functions of labels, seed and parameters."""

from fl_lightning.data.partition.base import Indices, Partition
from fl_lightning.data.partition.dirichlet import IID, PAM, Dirichlet
from fl_lightning.data.partition.given import FromFile, Given, Natural
from fl_lightning.data.partition.official_code import FLSAMDirichlet, FLSAMPath, FLSimDirichlet, FLSimPathological

__all__ = [
    "IID",
    "PAM",
    "Dirichlet",
    "FLSAMDirichlet",
    "FLSAMPath",
    "FLSimDirichlet",
    "FLSimPathological",
    "FromFile",
    "Given",
    "Indices",
    "Natural",
    "Partition",
]
