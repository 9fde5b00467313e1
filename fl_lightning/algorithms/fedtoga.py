"""FedTOGA."""

from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.parts.base import Gradient, Step
from fl_lightning.core import ClientContext, NonNegative, RoundContext, State, Uploads, to_radius


class FedTOGA(FedDyn):
    """FedDyn whose clients ascend and step along the last global update, too.

    Args:
        net: The network.
        rho: Radius of the ascent.
        b1: Weight of the global update in a step.
        kappa: Its weight in the ascent.
        last_g: What the ascent adds: of the step before the gradient at the ascent point (perturbed), or the whole
            direction but for ``w / beta`` (corrected: the ports with torch 2); the present gradient once more (present:
            the ports with older versions); or nothing (none).
        **kwargs: As for `FedDyn`.
    """

    paper = "Li et al., 2024 (arXiv:2408.14144)"
    server_state = {**FedDyn.server_state, "delta": "zeros"}
    scratch_state = {"r": "zeros"}
    down: tuple[str, ...] = ("w", "delta")

    def __init__(
        self,
        net: nn.Module,
        rho: NonNegative = 0.1,
        b1: NonNegative = 0.9,
        kappa: NonNegative = 1.0,
        last_g: Literal["perturbed", "corrected", "present", "none"] = "perturbed",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, ascent=None, **kwargs)
        self.rho, self.b1, self.kappa, self.last_g = rho, b1, kappa, last_g

    def local_step(self, w: Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        """``u = g(w + rho a / ||a||)`` with ``a = g(w) + kappa delta + r``; the step is ``u + b1 delta``, corrected."""
        g = grad(w)
        a = g + self.kappa * received.delta + (g if self.last_g == "present" else client.r)
        u = grad(w + to_radius(a, self.rho, 1e-7))
        step = u + self.b1 * received.delta
        if self.last_g == "perturbed":
            client = client.replace(r=u)
        elif self.last_g == "corrected":
            linear = step - client.lam - client.start / self.beta if self.use_dual else step
            client = client.replace(r=self.optimizer.clipped(linear))
        return self.corrected(step, w, client), client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``delta <- (mean start_i - mean w_i) / K``; FedDyn's step."""
        steps = uploads.mean("k_lr") / self.lr(ctx)
        delta = (self.mean_start(sent, uploads) - uploads.mean("w")) / steps
        return super().server_step(server.replace(delta=delta), sent, uploads, ctx)
