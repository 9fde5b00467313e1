"""A local step as a torch optimizer, for ``lightning.Trainer``."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.hooks import Hooks
from fl_lightning.algorithms.module import Losses
from fl_lightning.algorithms.parts import LocalOptimizer
from fl_lightning.core import ClientContext, FlatSpec, State, UserError, ensure, unchanged


class CentralizedOptimizer(torch.optim.Optimizer):
    """The local step of an objective without federated state, for automatic optimization.

    ``step(closure)`` evaluates the closure once for each gradient of the local step: once for SGD, twice for SAM.

    Args:
        net: The net.
        flat: Layout of its weights.
        optimizer: The local optimizer.
        hooks: The algorithm, of which the hooks of a step run.
        context: Returns the context of a step for a learning rate.
        accumulated: Returns the number of batches whose gradients a step accumulates.
    """

    def __init__(
        self,
        net: nn.Module,
        flat: FlatSpec,
        optimizer: LocalOptimizer,
        hooks: Hooks,
        context: Callable[[float], ClientContext],
        accumulated: Callable[[], int],
    ) -> None:
        super().__init__(flat.parameters(net), {"lr": optimizer.lr})
        self.net, self.flat, self.optimizer, self.hooks = net, flat, optimizer, hooks
        self.context, self.accumulated = context, accumulated

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one local step.

        Args:
            closure: Zeroes the gradients (unless they are accumulated), evaluates the loss and runs backward.

        Returns:
            The closure's first value.

        Raises:
            UserError: If there is no closure, or if gradients are accumulated but the step needs one elsewhere than at
                the weights: those of earlier batches were taken at the weights.
        """
        if closure is None:
            raise UserError(
                f"{type(self).__name__}.step needs a closure, as Lightning's automatic optimization passes it"
            )
        net, flat, hooks = self.net, self.flat, self.hooks
        params: list[nn.Parameter] = self.param_groups[0]["params"]
        w, batches = flat.vector(net), self.accumulated()
        values: list[Any] = []

        def grad(v: Tensor, losses: Losses | None = None) -> Tensor:
            ensure(
                losses is None,
                "grad(v, losses): lightning.Trainer takes the gradient of training_step only; train with "
                "fl_lightning.FederatedTrainer",
            )
            ensure(
                batches == 1 or v is w,
                f"accumulate_grad_batches = {batches}: the local step takes a gradient at an ascent point, of one "
                "batch; set it to 1 and take a larger data.batch_size",
            )
            flat.load(net, v)
            with torch.enable_grad(), unchanged(net) if values else nullcontext():  # statistics: first pass only
                values.append(closure())
            return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])

        kept = {**hooks.scratch_state, **self.optimizer.named_state}
        state, ctx, received = self.state[params[0]], self.context(self.param_groups[0]["lr"]), State({"w": w})
        client = State(state.get("client") or State.initial(kept, w, w)) | {"start": w}
        lr = hooks.step_lr(client, ctx)
        direction, client = hooks.local_step(w, grad, client, received, ctx)
        w, client = self.optimizer.take(w, direction, client, lr, ctx)
        state["client"] = dict(client.only(kept))
        flat.load(net, hooks.after_step(w, client, received, ctx))
        return values[0]
