"""FedGMT: distillation from a teacher that averages the trajectory of the global model."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts.base import Direction
from fl_lightning.core import (
    ClientContext,
    NonNegative,
    Positive,
    RoundContext,
    State,
    UnitInterval,
    Uploads,
    kl_to_teacher,
)


class FedGMT(FedDyn):
    """Li et al., ICML 2025, Algorithm 1: duals without the quadratic term, and KL to the teacher ``e``.

    Args:
        net: The network.
        gamma: Weight of the KL term.
        tau: Its temperature.
        ema_alpha: Decay of the teacher per round.
        kl_tau2: Multiply the KL term by tau^2, as the official code does.
        beta: Penalty of the duals.
        **kwargs: As for `LocalObjective`, and ``absent`` and ``use_dual`` of `FedDyn`: without duals only the KL term
            is left (Table 3).
    """

    paper = "Li et al., ICML 2025"
    needs_classes = True
    server_state = {**FedDyn.server_state, "e": "w0"}
    down: tuple[str, ...] = ("w", "e")

    def __init__(
        self,
        net: nn.Module,
        gamma: NonNegative = 1.0,
        tau: Positive = 3.0,
        ema_alpha: UnitInterval = 0.95,
        kl_tau2: bool = True,
        beta: Positive = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, beta, "squared", **kwargs)
        self.gamma, self.tau, self.ema_alpha, self.kl_tau2 = gamma, tau, ema_alpha, kl_tau2

    def teacher(self, client: State, received: State) -> Tensor:
        """Returns the averaged trajectory, e^t."""
        return received.e

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Eq. 9: cross-entropy + gamma KL(e || w)."""
        kl = kl_to_teacher(logits, teacher[0], self.tau, self.kl_tau2)
        return super().losses(logits, target) + self.gamma * kl

    def corrected(self, g: Tensor, w: Tensor, client: State) -> Direction:
        """Line 11: ``g - u_m``."""
        return g - client.lam if self.use_dual else g

    def ema(self, e: Tensor, w: Tensor) -> Tensor:
        """``alpha e + (1 - alpha) w``."""
        return self.ema_alpha * e + (1 - self.ema_alpha) * w

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """Lines 15 to 18: the teacher follows the new model, its shift by the dual included."""
        server = super().server_step(server, sent, uploads, ctx)
        return server.replace(e=self.ema(server.e, server.w))


class FedGMTv2(FedGMT):
    """FedGMT whose clients average the models that they receive: only the model is sent.

    Args:
        net: The network.
        ema_alpha: Decay of a client's teacher at each contact.
        v2_init: A client's first teacher: the initial model (the paper; known from the seed, so not counted as
            communication), or the first model received.
        **kwargs: As for `FedGMT`.
    """

    server_state = FedDyn.server_state
    down: tuple[str, ...] = ("w",)

    def __init__(
        self,
        net: nn.Module,
        ema_alpha: UnitInterval = 0.5,
        v2_init: Literal["w0", "first_seen"] = "w0",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ema_alpha=ema_alpha, **kwargs)
        self.client_state = {**self.client_state, "e": "w0" if v2_init == "w0" else "w"}

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``e_m <- alpha e_m + (1 - alpha) w^t``, once a round."""
        return super().local_start(client.replace(e=self.ema(client.e, received.w)), received, ctx)

    def teacher(self, client: State, received: State) -> Tensor:
        """Returns the client's own average, e_m."""
        return client.e

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """FedDyn's: line 18 is skipped."""
        return FedDyn.server_step(self, server, sent, uploads, ctx)
