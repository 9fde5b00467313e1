"""The local step of an objective without state as a torch optimizer, for a plain ``lightning.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_lightning.core import ClientContext, State, UserError, unchanged

if TYPE_CHECKING:
    from fl_lightning.algorithms.base import LocalObjective


class CentralizedOptimizer(torch.optim.Optimizer):
    """A stateless objective's local step as a torch optimizer, so that it trains under a plain ``lightning.Trainer``.

    ``step(closure)`` evaluates the closure once for each gradient that the local step asks for: once for SGD, twice for
    SAM and ASAM.
    """

    def __init__(self, params: Iterable[nn.Parameter], objective: LocalObjective) -> None:
        super().__init__(params, {"lr": objective.optimizer.lr})
        self.objective = objective

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One local step.

        Args:
            closure: Zeroes the gradients, evaluates the loss and runs backward.

        Returns:
            The closure's value where the step first asks for a gradient.
        """
        if closure is None:
            raise UserError(
                f"{type(self).__name__}.step needs a closure, as Lightning's automatic optimization gives it"
            )
        objective, flat, group = self.objective, self.objective.flat, self.param_groups[0]
        params: list[nn.Parameter] = group["params"]
        w = flat.vector(objective.net)
        losses: list[Any] = []

        def grad(v: Tensor) -> Tensor:
            flat.load(objective.net, v)
            later = bool(losses) and objective.net_buffers is not None  # the first pass alone moves running statistics
            with torch.enable_grad(), unchanged(objective.net) if later else nullcontext():
                losses.append(closure())
            return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])

        state = self.state[params[0]]
        client = State(state.get("client") or State.initial(objective.scratch_state, w, w))
        t, rounds = objective.trainer.current_epoch, objective.trainer.max_epochs or 1
        ctx = ClientContext(t=t, rounds=rounds, m=1, flat=flat, lr=group["lr"], K=1, k_lr=group["lr"])
        direction, client = objective.local_step(w, grad, client | {"start": w}, State({"w": w}), ctx)
        state["client"] = dict(client.only(objective.scratch_state))
        w, state["buffer"] = objective.optimizer.step(w, direction, state.get("buffer"), group["lr"])
        flat.load(objective.net, w)
        return losses[0]
