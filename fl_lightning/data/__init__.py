"""Data sets, their partition among clients, and batches."""

from fl_lightning.data.arrays import Arrays, Digits, FromDataset
from fl_lightning.data.augment import Augment, ScaledCrop
from fl_lightning.data.huggingface import HuggingFace
from fl_lightning.data.images import CIFAR10, CIFAR100, CINIC10, ImageFolder, Landmarks, TorchvisionData
from fl_lightning.data.leaf import FEMNIST, LEAF, Shakespeare
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import (
    IID,
    PAM,
    Dirichlet,
    FLSAMDirichlet,
    FLSAMPath,
    FLSimDirichlet,
    FLSimPathological,
    FromFile,
    Given,
    Natural,
    Partition,
)
from fl_lightning.data.segmentation import IDDA, Cityscapes
from fl_lightning.data.streaming import Samples
from fl_lightning.data.text import AGNews

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CINIC10",
    "FEMNIST",
    "IDDA",
    "IID",
    "LEAF",
    "PAM",
    "AGNews",
    "Arrays",
    "Augment",
    "Cityscapes",
    "Digits",
    "Dirichlet",
    "FLSAMDirichlet",
    "FLSAMPath",
    "FLSimDirichlet",
    "FLSimPathological",
    "FederatedDataModule",
    "FromDataset",
    "FromFile",
    "Given",
    "HuggingFace",
    "ImageFolder",
    "Landmarks",
    "Natural",
    "Partition",
    "Samples",
    "ScaledCrop",
    "Shakespeare",
    "TorchvisionData",
]
