"""Local Muon; FedMuon and FedAdamW, whose clients take a further step along the last global direction."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts import AdamW, Muon
from fl_lightning.core import ClientContext, RoundContext, State, UnitInterval, Upload, Uploads, Weighting, ensure


class Aligned(LocalObjective):
    """After each step of the local optimizer ``w <- w - lr gamma G``, with G the last mean update as a gradient.

    Args:
        net: The network.
        gamma: Share of the global direction.
        **kwargs: As for `LocalObjective`; clients do not keep the optimizer's state.
    """

    server_state = {"G": "zeros"}
    down: tuple[str, ...] = ("w", "G")
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, gamma: UnitInterval = 0.5, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        ensure(
            not self.optimizer.keeps_state,
            f"model.optimizer.state = keep: clients of {type(self).__name__} start from the server's; set it to reset",
        )
        ensure(
            not self.personal,
            f"model.parts: {type(self).__name__} averages optimizers' states whole, so no client may have an own "
            "model; leave that part out",
        )
        self.gamma = gamma

    @property
    def rate(self) -> float:
        """The learning rate of the global direction, as a multiple of the optimizer's."""
        return 1.0

    def own(self, name: str) -> str:
        """Returns the name of a value of the optimizer's state in the client's."""
        return f"{type(self.optimizer).__name__}.{name}"

    def after_step(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> Tensor:
        """``w <- w - lr gamma G``."""
        return w - ctx.lr * self.rate * self.gamma * received.G

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``G <- (w^t - mean w_i) / (K lr)``; the model as FedAvg's."""
        G = (sent.w - uploads.mean("w")) / (uploads.mean("k_lr") * self.rate)
        return super().server_step(server.replace(G=G), sent, uploads, ctx)


class LocalMuon(LocalObjective):
    """FedAvg whose clients run Muon; its momentum starts from zero in every round.

    Args:
        net: The network.
        optimizer: Muon; null: with its defaults.
        **kwargs: As for `LocalObjective`.
    """

    paper = "Liu et al., 2025 (arXiv:2510.27403)"
    default_weighting: Weighting = "uniform"

    def __init__(self, net: nn.Module, optimizer: Muon | None = None, **kwargs: Any) -> None:
        super().__init__(net, optimizer=optimizer or Muon(), **kwargs)


class FedMuon(Aligned):
    """Liu et al., 2025: Muon whose momentum starts from the cohort's mean, and steps along the last global direction.

    The learning rates of Muon are multiplied by ``1 - gamma``; that of the global direction is the one of the
    parameters that are no matrices, ``lr * lr_others``, times gamma.

    Args:
        net: The network.
        gamma: Share of the global direction (alpha in the paper).
        optimizer: Muon; null: with momentum 0.98, otherwise its defaults.
        **kwargs: As for `LocalObjective`.
    """

    paper = LocalMuon.paper
    server_state = {**Aligned.server_state, "B": "zeros"}
    down = (*Aligned.down, "B")
    up = ("w", "B")
    references = {"w": "w", "B": "B"}
    optimizer: Muon

    def __init__(self, net: nn.Module, gamma: UnitInterval = 0.5, optimizer: Muon | None = None, **kwargs: Any) -> None:
        super().__init__(net, gamma, optimizer=optimizer or Muon(momentum=0.98), **kwargs)
        self.matrices = [len(shape) > 1 for shape in self.flat.shapes]
        ensure(any(self.matrices), f"model.net = {type(net).__name__}: has no matrix for Muon; take FedAdamW")
        self.server_state = {**self.server_state, "B": self.initial_mean}

    @property
    def rate(self) -> float:
        return self.optimizer.lr_others

    def initial_mean(self, w0: Tensor) -> Tensor:
        """``B = 0``; a method, as a lambda could not be pickled."""
        return torch.zeros_like(self.of_matrices(w0))

    def split(self, v: Tensor) -> Sequence[Tensor]:
        """Returns the parts of a vector ``(..., d)``, one for each parameter."""
        return torch.split(v, self.flat.numels, -1)

    def of_matrices(self, v: Tensor) -> Tensor:
        """Returns the coordinates of the matrices."""
        return torch.cat([part for part, is_2d in zip(self.split(v), self.matrices, strict=True) if is_2d], -1)

    def local_start(self, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """``B_i <- B``."""
        sizes = [n for n, is_2d in zip(self.flat.numels, self.matrices, strict=True) if is_2d]
        B, w = iter(torch.split(received.B, sizes, -1)), self.split(received.w)
        parts = [next(B) if is_2d else torch.zeros_like(part) for part, is_2d in zip(w, self.matrices, strict=True)]
        return received.w, client | {self.own("first"): torch.cat(parts, -1)}

    def step_lr(self, client: State, ctx: ClientContext) -> float | Tensor:
        """``(1 - gamma) lr``."""
        return ctx.lr * (1 - self.gamma)

    def local_end(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Upload, State]:
        """Uploads ``B_i``."""
        return {"w": w, "B": self.of_matrices(client[self.own("first")])}, client

    def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
        """``B <- mean B_i``."""
        return super().server_step(server.replace(B=uploads.mean("B")), sent, uploads, ctx)


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
