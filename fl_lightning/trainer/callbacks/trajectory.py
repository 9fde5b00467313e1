"""Weights after every round, to compare a run with outside numbers."""

from torch import Tensor

from fl_lightning.core import State
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.run import Callback, Run


class Trajectory(Callback):
    """Keeps every round's vectors in memory: for small problems and tests.

    Attributes:
        server: The server's state, at first and after each round; ``server[t].w`` is the global model, ``(d,)``.
        evaluated: The model that is evaluated (with SWA the average), at first and after each round, ``(d,)`` each.
        local: After each round, the local results by client, in cohort order; ``local[t][k].w`` is ``(d,)``.
        client: After each round, all clients' stored states by id.
    """

    def __init__(self) -> None:
        self.server: list[State] = []
        self.evaluated: list[Tensor] = []
        self.local: list[dict[int, LocalResult]] = []
        self.client: list[dict[int, State]] = []
        self._now: dict[int, LocalResult] = {}
        self._first = 0

    def on_fit_start(self, run: Run) -> None:
        for kept in (self.server, self.evaluated, self.local, self.client):
            kept.clear()
        self._now, self._first = {}, run.rounds_done
        self._append(run)

    def _append(self, run: Run) -> None:
        self.server.append(run.server)
        self.evaluated.append(run.global_model)

    def on_exception(self, run: Run, error: BaseException) -> None:
        rounds = run.rounds_done - self._first
        del self.server[rounds + 1 :], self.evaluated[rounds + 1 :], self.local[rounds:], self.client[rounds:]

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        self._now[result.client] = result

    def on_round_end(self, run: Run) -> None:
        self._append(run)
        self.local.append(self._now)
        self.client.append(run.clients.rows())
        self._now = {}
