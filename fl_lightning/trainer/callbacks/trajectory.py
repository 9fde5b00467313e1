"""Weights after every round, to hold a run against outside numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fl_lightning.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from fl_lightning.core.state import State
    from fl_lightning.engine import LocalResult
    from fl_lightning.trainer.trainer import FederatedTrainer


class Trajectory(Callback):
    """Keeps every round's vectors in memory: for small problems and tests.

    Attributes:
        server: The server's slots, first value and then after each round; ``server[t].w`` is the global model ``(d,)``.
        evaluated: The model that evaluation uses (of SWA the average), likewise.
        local: After each round, the local results by client, in cohort order; ``local[t][k].w`` is ``(d,)``.
        client: After each round, all clients' slots by id, as they are kept.
    """

    def __init__(self) -> None:
        self.server: list[State] = []
        self.evaluated: list[Tensor] = []
        self.local: list[dict[int, LocalResult]] = []
        self.client: list[dict[int, State]] = []
        self._now: dict[int, LocalResult] = {}

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        for kept in (self.server, self.evaluated, self.local, self.client):
            kept.clear()
        self._append(trainer)

    def _append(self, trainer: FederatedTrainer) -> None:
        self.server.append(trainer.server)
        self.evaluated.append(trainer.global_model)

    def on_local_end(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        self._now[result.client] = result

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        self._append(trainer)
        self.local.append(self._now)
        self.client.append(trainer.clients.rows())
        self._now = {}
