"""FedSAM, FedASAM and FedLESAM: FedAvg whose clients take the gradient at an ascent point; FedLESAM-D and -S."""

from typing import Any, Literal

from torch import nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts.ascent import ASAM, LESAM, SAM
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.core import NonNegative


class FedSAM(LocalObjective):
    """FedAvg with SAM on the clients.

    Args:
        net: The network.
        rho: Radius of the ascent.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Caldarola et al., ECCV 2022; Qu et al., ICML 2022"

    def __init__(self, net: nn.Module, rho: NonNegative = 0.05, **kwargs: Any) -> None:
        super().__init__(net, ascent=SAM(rho), **kwargs)


class FedASAM(LocalObjective):
    """FedAvg with adaptive SAM on the clients.

    Args:
        net: The network.
        rho: Radius of the ascent.
        eta: Added to the absolute weights that scale it.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Caldarola et al., ECCV 2022"

    def __init__(self, net: nn.Module, rho: NonNegative = 0.5, eta: NonNegative = 0.2, **kwargs: Any) -> None:
        super().__init__(net, ascent=ASAM(rho, eta), **kwargs)


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
