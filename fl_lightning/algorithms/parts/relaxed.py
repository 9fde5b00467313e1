"""Relaxed initialisation (FedInit, NeurIPS 2023): local training starts away from the client's last local model."""

from collections.abc import Mapping

from torch import Tensor

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, Init, State, Upload


class RelaxedInit(Part, key="model.relaxed_init"):
    """``w_0 = w^t + b (w^t - its last local model)``.

    Args:
        b: The factor b.
        adds_updates: Whether the server adds the clients' updates to ``w^t``: a client then uploads ``w^t + w_i - w_0``
            in place of ``w_i``.
    """

    client_state: Mapping[str, Init] = {"w_last": "w0"}

    def __init__(self, b: float, adds_updates: bool) -> None:
        self.b, self.adds_updates = b, adds_updates

    def local_start(self, w: Tensor, client: State, received: State, ctx: ClientContext) -> tuple[Tensor, State]:
        return w + self.b * (w - client.w_last), client

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        if self.adds_updates and "w" in upload:
            upload = {**upload, "w": upload["w"] - client.start + received.w}
        return upload, client.replace(w_last=w)
