"""A-FedPD, which moves the duals of absent clients too, and A-FedPDSAM."""

from typing import Any, Literal

from torch import nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.fedspeed import FedSpeed
from fl_lightning.core import NonNegative


class AFedPD(FedDyn):
    """FedDyn in which the dual of an absent client moves like the cohort's mean.

    Args:
        net: The network.
        absent: As for `FedDyn`; kept is FedDyn.
        **kwargs: As for `FedDyn`.
    """

    paper = "Sun et al., NeurIPS 2024"

    def __init__(self, net: nn.Module, absent: Literal["kept", "virtual"] = "virtual", **kwargs: Any) -> None:
        super().__init__(net, absent=absent, **kwargs)


class AFedPDSAM(FedSpeed):
    """FedSpeed with A-FedPD's duals: the clients of A-FedPD run SAM.

    Args:
        net: The network.
        absent: As for `AFedPD`; kept is FedSpeed.
        eps: As for `FedSpeed`.
        **kwargs: As for `FedSpeed`.
    """

    paper = AFedPD.paper

    def __init__(
        self,
        net: nn.Module,
        absent: Literal["kept", "virtual"] = "virtual",
        eps: NonNegative = 1e-7,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, absent=absent, eps=eps, **kwargs)
