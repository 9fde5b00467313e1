"""What a net keeps beside its parameters, such as the running statistics of BatchNorm, under a policy of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import UserError
from fl_lightning.core.state import Init, State, Uploads

Policy = Literal["average", "local", "reset"]
POLICIES: tuple[Policy, ...] = ("average", "local", "reset")


class Buffers:
    """The buffers of a net: those of floating point as one vector ``(b,)``, in ``named_buffers()`` order.

    The vector is an ordinary slot ``buffers``. Other buffers, such as the number of batches seen, are never averaged:
    every client starts with their first values.

    - ``average``: the server's are sent, and replaced by the mean of the clients' (with the weights of the models; no
      server optimizer steps them), as in the code of FedSAM and FedASAM.
    - ``local``: every client keeps its own, which at first contact are the initial ones; the server has none (SiloBN,
      Andreux et al. 2020: scales and shifts are parameters, and shared).
    - ``reset``: every client starts from the initial ones in every round; nothing is sent or kept.

    Args:
        net: The net; its buffers are the initial ones.
        policy: One of these.

    Attributes:
        first: The initial ones, ``(b,)``.
        wire: Names that are sent, and uploaded.
    """

    def __init__(self, net: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self.wire = ("buffers",) if policy == "average" else ()
        self.take(net)

    def take(self, net: nn.Module) -> None:
        """Make the initial ones those that ``net`` has now."""
        named = {name: b.detach().clone() for name, b in net.named_buffers()}
        self._shapes = {name: b.shape for name, b in named.items() if b.is_floating_point()}
        self._others = {name: b for name, b in named.items() if name not in self._shapes}
        self.first = self.vector(net)

    def vector(self, net: nn.Module) -> Tensor:
        """A copy of the net's floating buffers, ``(b,)``."""
        parts = [net.get_buffer(name).detach().reshape(-1) for name in self._shapes]
        return torch.cat(parts) if parts else torch.zeros(0)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """All buffers by name: the floating ones of ``vector``, ``(b,)``, the others' first values."""
        parts = torch.split(vector, [shape.numel() for shape in self._shapes.values()])
        floating = {name: v.view(shape) for (name, shape), v in zip(self._shapes.items(), parts, strict=True)}
        return {**floating, **self._others}

    def load(self, net: nn.Module, vector: Tensor) -> None:
        """Write ``vector``, ``(b,)``, into the net's floating buffers, and first values into the others."""
        for name, value in self.named(vector).items():
            net.get_buffer(name).copy_(value)

    def client_inits(self) -> dict[str, Init]:
        """First values of the client's slots."""
        return {"buffers": self._initial} if self.policy == "local" else {}

    def server_inits(self) -> dict[str, Init]:
        """First values of the server's slots."""
        return {"buffers": self._initial} if self.policy == "average" else {}

    def _initial(self, w0: Tensor) -> Tensor:
        return self.first.to(w0, copy=True)

    def start(self, client: State, sent: State) -> Tensor:
        """What local training starts with, ``(b,)``."""
        match self.policy:
            case "average":
                return sent.buffers
            case "local":
                return client.buffers
            case _:
                return self.first

    def end(self, after: Tensor, upload: dict[str, Tensor], client: State) -> tuple[dict[str, Tensor], State]:
        """What a client uploads and keeps, with what local training has made of its buffers, ``(b,)``."""
        match self.policy:
            case "average":
                return {**upload, "buffers": after}, client
            case "local":
                return upload, client.replace(buffers=after)
            case _:
                return upload, client

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's step."""
        return server.replace(buffers=uploads.weighted("buffers")) if self.policy == "average" else server


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """The net's buffers are afterwards what they were."""
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    try:
        yield
    finally:
        for name, value in kept.items():
            net.get_buffer(name).copy_(value)


@contextmanager
def variance_needed(told: str) -> Iterator[None]:
    """What BatchNorm says where there is one value for each channel, as a line for people.

    Raises:
        UserError: ``told``, in place of torch's error.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(told) from None


@contextmanager
def by_batch(net: nn.Module) -> Iterator[None]:
    """Normalise by the statistics of each batch and leave the running ones alone; modes are the caller's to restore."""
    with unchanged(net):
        for module in net.modules():
            if getattr(module, "track_running_stats", False):
                module.training = True
        yield
