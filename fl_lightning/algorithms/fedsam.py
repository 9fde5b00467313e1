"""FedSAM and FedASAM: FedAvg whose clients take the gradient at an ascent point."""

from typing import Any

from torch import nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.ascent import ASAM, SAM
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
