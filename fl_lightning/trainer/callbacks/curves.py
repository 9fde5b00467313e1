"""The figure of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_lightning.results.curves import plot_curves
from fl_lightning.trainer.callbacks.base import Callback
from fl_lightning.trainer.loggers import RunLogger

if TYPE_CHECKING:
    from fl_lightning.trainer.trainer import FederatedTrainer


class Curves(Callback):
    """Draws ``curves.png`` and ``curves.pdf`` of the run when it ends: accuracy, loss and flatness by round."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if trainer.fabric.is_global_zero:
            from fl_lightning.core.figures import save_figure

            figure = plot_curves({trainer.run_dir.parent.name: trainer.run_dir / "metrics.csv"})
            save_figure(figure, trainer.run_dir / "curves")
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.log_image("curves", trainer.run_dir / "curves.png", trainer.round)
