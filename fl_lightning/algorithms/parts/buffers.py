"""A net's buffers, such as the running statistics of BatchNorm, under a policy of the run."""

from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, State, Upload, Uploads, moving_buffers

Policy = Literal["average", "local", "reset"]


class Buffers(Part, key="model.buffers"):
    """The buffers that training updates; the floating-point ones are one vector ``(b,)``, in ``named_buffers()`` order.

    Buffers of frozen modules in eval mode are constants (see `fl_lightning.core.weights`).

    During local training the entry ``buffers`` of a client's state is this vector: at first the values that training
    starts with, at the end the values that the engine finds in the net after the last step. Other buffers, such as the
    number of batches seen, are never averaged: every client starts with their initial values.

    - ``average``: the server sends its buffers, and replaces them by the mean of the clients' buffers (weighted as the
      models; no server optimizer steps them), as in the code of FedSAM and FedASAM.
    - ``local``: every client keeps its own buffers, at first contact the initial ones; the server has none (SiloBN,
      Andreux et al. 2020: scales and shifts are parameters, and shared).
    - ``reset``: every client starts from the initial buffers in every round; nothing is sent or kept.

    Args:
        net: The net; its buffers are the initial ones.
        policy: One of these policies.

    Attributes:
        first: The initial buffers, ``(b,)``.
    """

    def __init__(self, net: nn.Module, policy: Policy) -> None:
        self.policy = policy
        match policy:
            case "average":
                self.server_state = {"buffers": self._initial}
                self.down = self.up = ("buffers",)
                self.references = {"buffers": "buffers"}
                self.scratch_state = {"buffers": self._initial}
            case "local":
                self.client_state = {"buffers": self._initial}
            case "reset":
                self.scratch_state = {"buffers": self._initial}
        self.take(net)

    def take(self, net: nn.Module) -> None:
        """Makes the current buffers of ``net`` the initial ones."""
        buffers = {name: net.get_buffer(name).detach().clone() for name in moving_buffers(net)}
        self._shapes = {name: b.shape for name, b in buffers.items() if b.is_floating_point()}
        self._others = {name: b for name, b in buffers.items() if name not in self._shapes}
        self.first = self.vector(net)
        least = {name: 0.0 if name.endswith("running_var") else -torch.inf for name in self._shapes}
        self._least = torch.cat([torch.full((s.numel(),), least[n]) for n, s in self._shapes.items()] or [self.first])

    def vector(self, net: nn.Module) -> Tensor:
        """Returns a copy of the net's floating-point buffers, ``(b,)``."""
        parts = [net.get_buffer(name).detach().reshape(-1) for name in self._shapes]
        return torch.cat(parts) if parts else torch.zeros(0)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns all buffers by name: the floating-point ones from ``vector``, ``(b,)``, the others as initially."""
        parts = torch.split(vector, [shape.numel() for shape in self._shapes.values()])
        floating = {name: v.view(shape) for (name, shape), v in zip(self._shapes.items(), parts, strict=True)}
        return {**floating, **self._others}

    def load(self, net: nn.Module, vector: Tensor) -> None:
        """Writes ``vector``, ``(b,)``, into the net's floating-point buffers, and initial values into the others."""
        for name, value in self.named(vector).items():
            net.get_buffer(name).copy_(value)

    def _initial(self, w0: Tensor) -> Tensor:
        return self.first.to(w0, copy=True)

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Sets ``client.buffers`` to the buffers that local training starts with."""
        return w, client.replace(buffers=received.buffers) if self.down else client

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """Uploads ``client.buffers`` if the server averages them."""
        return upload | {name: client[name] for name in self.up}, client

    def phase_end(self, server: State, uploads: Uploads) -> State:
        """Replaces the server's buffers by the mean; a variance that noise (`GaussianPrivacy`) made negative is 0."""
        means = {name: uploads.weighted(name) for name in self.up}
        return server | {name: mean.maximum(self._least.to(mean)) for name, mean in means.items()}
