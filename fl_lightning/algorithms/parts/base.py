"""The interface of an objective's parts, and the types of what local training passes around."""

from collections.abc import Callable, Mapping

from torch import Tensor

from fl_lightning.core import Checked, ClientContext, Init, RoundContext, State, Upload, Uploads

Gradient = Callable[..., Tensor]
"""Gradient of the local objective on this step's minibatch: a point ``(..., d)`` to a gradient ``(..., d)``. A second
argument, losses per sample as `LocalObjective.losses`, replaces those of the objective."""
Direction = Tensor | tuple[Tensor, Tensor]
"""Direction of a local step: a vector ``(..., d)``, or two that are added, of which only the first is clipped."""
Step = tuple[Direction, State]
"""A direction, and the client's state after the step."""


class Part(Checked, key="model"):
    """A piece that several algorithms share: its own state, and hooks that add to the algorithm's, by default nothing.

    The hooks of all parts run after the algorithm's hook of the same moment, in the order of `LocalObjective.parts`.
    They change their own state only, unless they say otherwise.

    Attributes:
        client_state: State that a client keeps, by name with its initial value (see `fl_lightning.core.state.Init`).
        server_state: The same for the server.
        down: Names that are sent to a client.
        up: Names that a client uploads.
        references: What the server knows of them beforehand, as for `LocalObjective`.
    """

    client_state: Mapping[str, Init] = {}
    server_state: Mapping[str, Init] = {}
    down: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    references: Mapping[str, str | float] = {}

    def local_lr(self, lr: float, ctx: RoundContext) -> float:
        """Returns the clients' learning rate in this round, where it would be ``lr``."""
        return lr

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        """Returns the weights from which local training starts, where it would be ``w``, and the client's state."""
        return w, client

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """Returns what a client uploads and keeps after its last step, which ended at ``w``."""
        return upload, client

    def phase_end(self, server: State, uploads: Uploads) -> State:
        """Returns the server's state after its step of a phase."""
        return server

    def round_end(self, server: State, before: State, ctx: RoundContext) -> State:
        """Returns the server's state after a round that began with the state ``before``."""
        return server
