"""FedAdamW."""

from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.fedmuon import Aligned
from fl_lightning.algorithms.parts import AdamW, Muon
from fl_lightning.core import ClientContext, RoundContext, State, UnitInterval, Upload, Uploads, ensure


def no_steps(w0: Tensor) -> Tensor:
    """Returns the counts of both moments at first, ``(2,)``; a function, as a lambda could not be pickled."""
    return w0.new_zeros(2)


class FedAdamW(Aligned):
    """Liu et al., 2025: AdamW whose second moment starts from the cohort's mean, with steps along the last global one.

    The second moment is averaged element by element, as in the official code; the paper sends means of blocks.

    Args:
        net: The network.
        gamma: Share of the global direction.
        count: The steps that correct the bias of the first moment, which starts from zero in every round: those of this
            round (own), or all (running, the official code). Those of the second moment are all.
        optimizer: AdamW; null: with its defaults.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., AAAI 2026"
    server_state = {**Aligned.server_state, "v": "zeros", "n": 0.0}
    down = (*Aligned.down, "v", "n")
    up = ("w", "v")
    references = {"w": "w", "v": "v"}

    def __init__(
        self,
        net: nn.Module,
        gamma: UnitInterval = 0.5,
        count: Literal["own", "running"] = "own",
        optimizer: AdamW | None = None,
        **kwargs: Any,
    ) -> None:
        optimizer = copy(optimizer) if optimizer else AdamW()
        ensure(not isinstance(optimizer, Muon), "model.optimizer = Muon: FedAdamW averages AdamW's moments; take AdamW")
        optimizer.state = {**optimizer.state, "count": no_steps}
        super().__init__(net, gamma, optimizer=optimizer, **kwargs)
        self.count = count

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``v_i <- v``; the counts of the steps that both moments have seen."""
        counts = torch.cat([received.n if self.count == "running" else 0 * received.n, received.n], -1)
        return received.w, client | {self.own("second"): received.v, self.own("count"): counts}

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Uploads ``v_i``."""
        return {"w": w, "v": client[self.own("second")]}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``v <- mean v_i``, which noise may make negative; ``n <- n + K``."""
        v, n = uploads.mean("v").clamp(min=0), server.n + uploads.mean("k_lr") / self.lr(ctx)
        return super().server_step(server.replace(v=v, n=n), sent, uploads, ctx)
