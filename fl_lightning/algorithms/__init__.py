"""One short LightningModule per method of the papers."""

from fl_lightning.algorithms.fedavg import FedAdam, FedAvg, FedAvgM
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.fedgloss import FedGloSS
from fl_lightning.algorithms.fedgmt import FedGMT
from fl_lightning.algorithms.fedsam import FedASAM, FedSAM
from fl_lightning.algorithms.fedsmoo import FedSMOO
from fl_lightning.algorithms.scaffold import SCAFFOLD

__all__ = [
    "SCAFFOLD",
    "FedASAM",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedGMT",
    "FedGloSS",
    "FedSAM",
    "FedSMOO",
]
