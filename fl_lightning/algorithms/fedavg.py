"""FedAvg, and methods that change only the server's step."""

from typing import Any

from torch import nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import ServerAdagrad, ServerAdam, ServerMomentum, ServerYogi
from fl_lightning.core import Fraction, Positive


class FedAvg(LocalObjective):
    """Federated averaging: local SGD, then the average of the models."""

    paper = "McMahan et al., AISTATS 2017"


class FedAvgM(LocalObjective):
    """FedAvg with momentum on the server.

    Args:
        net: The network.
        beta: Server momentum.
        server_lr: Server learning rate.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Hsu et al., 2019"

    def __init__(self, net: nn.Module, beta: Fraction = 0.9, server_lr: Positive = 1.0, **kwargs: Any) -> None:
        super().__init__(net, server_update=ServerMomentum(beta, server_lr), **kwargs)


class FedAdam(LocalObjective):
    """FedAvg with ServerAdam on the server; its further options are those of ``server_update: ServerAdam``.

    Args:
        net: The network.
        server_lr: Server learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Added to the root of the second moment.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Reddi et al., ICLR 2021"
    update = ServerAdam

    def __init__(
        self,
        net: nn.Module,
        server_lr: Positive = 0.1,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, server_update=self.update(server_lr, beta1, beta2, tau), **kwargs)


class FedYogi(FedAdam):
    """FedAvg with ServerYogi on the server; options as for `FedAdam`."""

    update = ServerYogi


class FedAdagrad(LocalObjective):
    """FedAvg with ServerAdagrad on the server; its further options are those of ``server_update: ServerAdagrad``.

    Args:
        net: The network.
        server_lr: Server learning rate.
        beta1: Decay of the first moment.
        tau: Added to the root of the sum of squares.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Reddi et al., ICLR 2021"

    def __init__(
        self, net: nn.Module, server_lr: Positive = 0.1, beta1: Fraction = 0.0, tau: Positive = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(net, server_update=ServerAdagrad(server_lr, beta1, tau), **kwargs)
