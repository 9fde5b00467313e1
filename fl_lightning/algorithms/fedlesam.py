"""FedLESAM, alone, with FedDyn's duals (-D) and with SCAFFOLD's variates (-S)."""

from typing import Any, Literal

from torch import nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts.ascent import LESAM
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.core import NonNegative


class FedLESAM(LocalObjective):
    """FedAvg whose clients take the gradient at an ascent point against their last global update: one pass per step.

    Args:
        net: The network.
        rho: Radius of the ascent.
        ref: Since the client last took part (the paper), or since the previous round (the official code).
        **kwargs: As for `LocalObjective`.
    """

    paper = "Fan et al., ICML 2024"

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        ref: Literal["own_last_active", "previous_round"] = "own_last_active",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=LESAM(rho, ref), **kwargs)


class FedLESAMD(FedLESAM, FedDyn):
    """FedLESAM-D: FedDyn with FedLESAM's ascent.

    Args:
        net: The network.
        rho: As for `FedLESAM`.
        ref: As for `FedLESAM`.
        **kwargs: As for `FedDyn`.
    """


class FedLESAMS(FedLESAM, SCAFFOLD):
    """FedLESAM-S: SCAFFOLD with FedLESAM's ascent.

    Args:
        net: The network.
        rho: As for `FedLESAM`.
        ref: As for `FedLESAM`.
        **kwargs: As for `SCAFFOLD`.
    """
