"""What a callback can listen to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.core.state import RoundContext
    from fl_lightning.engine import LocalResult
    from fl_lightning.trainer.trainer import FederatedTrainer


class Callback:
    """Base of the callbacks: override what you need.

    They are called in the order given. A hook must leave the run as it is: results do not depend on who listens. Every
    process calls every hook, but `on_local_end` only where that client was trained.
    """

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """The state is set up, or restored: ``trainer.round`` rounds are done."""

    def on_round_start(self, trainer: FederatedTrainer, ctx: RoundContext, cohort: list[int]) -> None:
        """A cohort has been drawn."""

    def on_local_end(self, trainer: FederatedTrainer, result: LocalResult) -> None:
        """One client has trained."""

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        """The server has its new state, and was evaluated if it was time to; add metrics by ``trainer.log``."""

    def on_round_logged(self, trainer: FederatedTrainer, metrics: Mapping[str, float]) -> None:
        """All metrics of the round have gone to the loggers."""

    def on_exception(self, trainer: FederatedTrainer, error: BaseException) -> None:
        """The run breaks off; ``trainer`` still holds the state after its last whole round."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """All rounds are done."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`."""
