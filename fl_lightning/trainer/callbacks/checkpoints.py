"""Checkpoints while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fl_lightning.core.errors import require
from fl_lightning.trainer.callbacks.base import Callback
from fl_lightning.trainer.checkpoint import LAST

if TYPE_CHECKING:
    from fl_lightning.trainer.trainer import FederatedTrainer


class Checkpoints(Callback):
    """Keeps ``checkpoints/last.ckpt`` in the run folder, and saves the last whole round when a run is interrupted.

    Args:
        every_n_rounds: Rounds between two checkpoints; the last round is always saved.
        keep_all: Also keep each one as ``checkpoints/round_<n>.ckpt``.
    """

    def __init__(self, every_n_rounds: int = 10, keep_all: bool = False) -> None:
        require(every_n_rounds >= 1, "callbacks: Checkpoints.every_n_rounds", every_n_rounds, "at least 1")
        self.every_n_rounds, self.keep_all = every_n_rounds, keep_all
        self._saved = -1

    def _save(self, trainer: FederatedTrainer) -> None:
        if trainer.round == self._saved:
            return
        trainer.save_checkpoint(trainer.run_dir / LAST)
        if self.keep_all:
            trainer.save_checkpoint(trainer.run_dir / LAST.parent / f"round_{trainer.round}.ckpt")
        self._saved = trainer.round

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self._saved = trainer.round

    def on_round_logged(self, trainer: FederatedTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.round % self.every_n_rounds == 0 or trainer.round == trainer.max_rounds:
            self._save(trainer)

    def on_exception(self, trainer: FederatedTrainer, error: BaseException) -> None:
        self._save(trainer)
        if (trainer.run_dir / LAST).exists():
            trainer.fabric.print(f"saved {trainer.run_dir / LAST}; `fit` goes on with --ckpt_path last")
