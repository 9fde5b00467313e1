"""One short LightningModule per method of the papers."""

from fl_lightning.algorithms.adabest import AdaBest
from fl_lightning.algorithms.afedpd import AFedPD, AFedPDSAM
from fl_lightning.algorithms.fedacg import FedACG
from fl_lightning.algorithms.fedadamw import FedAdamW
from fl_lightning.algorithms.fedavg import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from fl_lightning.algorithms.fedcm import FedCM, MoFedSAM
from fl_lightning.algorithms.feddecorr import FedDecorr
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.fedexp import FedExP
from fl_lightning.algorithms.fedgf import FedGF
from fl_lightning.algorithms.fedgloss import FedGloSS, NaiveFedGloSS
from fl_lightning.algorithms.fedgmt import FedGMT, FedGMTv2
from fl_lightning.algorithms.fedlc import FedLC
from fl_lightning.algorithms.fedlesam import FedLESAM, FedLESAMD, FedLESAMS
from fl_lightning.algorithms.fedmuon import FedMuon, LocalMuon
from fl_lightning.algorithms.fednova import FedNova
from fl_lightning.algorithms.fednsam import FedNSAM
from fl_lightning.algorithms.fedntd import FedNTD
from fl_lightning.algorithms.fedprox import FedProx
from fl_lightning.algorithms.fedsam import FedASAM, FedSAM
from fl_lightning.algorithms.fedsmoo import FedSMOO
from fl_lightning.algorithms.fedsol import FedSOL
from fl_lightning.algorithms.fedspeed import FedSpeed
from fl_lightning.algorithms.fedswa import FedMoSWA, FedSWA
from fl_lightning.algorithms.fedtoga import FedTOGA
from fl_lightning.algorithms.fedwmsam import FedWMSAM
from fl_lightning.algorithms.moon import MOON
from fl_lightning.algorithms.scaffold import SCAFFOLD, FedGAMMA
from fl_lightning.algorithms.stildeam import STildeAM

__all__ = [
    "MOON",
    "SCAFFOLD",
    "AFedPD",
    "AFedPDSAM",
    "AdaBest",
    "FedACG",
    "FedASAM",
    "FedAdagrad",
    "FedAdam",
    "FedAdamW",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedDecorr",
    "FedDyn",
    "FedExP",
    "FedGAMMA",
    "FedGF",
    "FedGMT",
    "FedGMTv2",
    "FedGloSS",
    "FedLC",
    "FedLESAM",
    "FedLESAMD",
    "FedLESAMS",
    "FedMoSWA",
    "FedMuon",
    "FedNSAM",
    "FedNTD",
    "FedNova",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSOL",
    "FedSWA",
    "FedSpeed",
    "FedTOGA",
    "FedWMSAM",
    "FedYogi",
    "LocalMuon",
    "MoFedSAM",
    "NaiveFedGloSS",
    "STildeAM",
]
