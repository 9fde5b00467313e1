"""Server updates: from a pseudo-gradient to the next global model.

The pseudo-gradient ``delta``, ``(d,)``, points uphill: the model that was sent minus the average of the local models.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import Fraction, Init, Positive, RoundContext, State


class ServerUpdate(Part, key="model.server_update"):
    """Plain averaging: ``w - lr * delta``; with lr 1 the average of the local models (FedAvg).

    Args:
        lr: Server learning rate eta_g.
    """

    def __init__(self, lr: Positive = 1.0) -> None:
        self.lr = lr

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        """Returns the server's state after the step."""
        return server.replace(w=server.w - self.lr * delta)


class ServerMomentum(ServerUpdate):
    """``v = beta v + delta; w - lr v`` (FedAvgM; Hsu et al., 2019).

    Args:
        beta: Momentum.
        lr: Server learning rate.
    """

    server_state: Mapping[str, Init] = {"server_v": "zeros"}

    def __init__(self, beta: Fraction = 0.9, lr: Positive = 1.0) -> None:
        super().__init__(lr)
        self.beta = beta

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        v = self.beta * server.server_v + delta
        return server.replace(w=server.w - self.lr * v, server_v=v)


class ServerAdam(ServerUpdate):
    """``w - lr m / (sqrt(v) + tau)`` (FedAdam; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment m.
        beta2: Decay of the second moment v.
        tau: Added to the root.
        v0: Initial value of v: 0 (as run by FL-Simulator and by Google) or tau^2 (as in the paper's box).
        bias_correction: Correct both moments, as Google's experiments did.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 0.01,
        v0: Literal["0", "tau2"] = "0",
        bias_correction: bool = False,
    ) -> None:
        super().__init__(lr)
        self.beta1, self.beta2, self.tau, self.v0, self.bias_correction = beta1, beta2, tau, v0, bias_correction
        first = partial(torch.full_like, fill_value=0.0 if v0 == "0" else tau**2)
        self.server_state = {"server_m": "zeros", "server_v": first, **({"server_n": 0.0} if bias_correction else {})}

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Returns the next v; FedYogi and FedAdagrad have their own."""
        return self.beta2 * v + (1 - self.beta2) * delta * delta

    def __call__(self, server: State, delta: Tensor, ctx: RoundContext) -> State:
        m = self.beta1 * server.server_m + (1 - self.beta1) * delta
        v = self.second_moment(server.server_v, delta)
        lr = self.lr
        if self.bias_correction:
            n = int(server.server_n) + 1  # updates, not rounds: in some of them nobody may have answered
            lr = lr * (1 - self.beta2**n) ** 0.5 / (1 - self.beta1**n)
            server = server.replace(server_n=server.server_n + 1)
        return server.replace(w=server.w - lr * m / (v.sqrt() + self.tau), server_m=m, server_v=v)


class ServerYogi(ServerAdam):
    """ServerAdam with ``v - (1 - beta2) delta^2 sign(v - delta^2)`` (FedYogi; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: As for `ServerAdam`.
        beta1: As for `ServerAdam`.
        beta2: As for `ServerAdam`.
        tau: As for `ServerAdam`.
        v0: As for `ServerAdam`.
        bias_correction: As for `ServerAdam`.
    """

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        square = delta * delta
        return v - (1 - self.beta2) * square * torch.sign(v - square)


class ServerAdagrad(ServerAdam):
    """ServerAdam with ``v + delta^2`` (FedAdagrad; Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: As for `ServerAdam`.
        beta1: As for `ServerAdam`; their runs have none.
        tau: As for `ServerAdam`.
        v0: As for `ServerAdam`.
    """

    def __init__(
        self, lr: Positive = 0.1, beta1: Fraction = 0.0, tau: Positive = 0.01, v0: Literal["0", "tau2"] = "0"
    ) -> None:
        super().__init__(lr, beta1, 0.0, tau, v0)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta * delta
