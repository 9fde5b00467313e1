"""The figure of a run."""

from fl_lightning.results.curves import plot_curves
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.run import Callback, Run


class Curves(Callback):
    """Draws ``curves.png`` and ``curves.pdf`` of the run when it ends: accuracy, loss and flatness by round."""

    def on_fit_end(self, run: Run) -> None:
        if run.fabric.is_global_zero:
            from fl_lightning.core.figures import save_figure

            figure = plot_curves({run.folder.name: run.folder.metrics})
            save_figure(figure, run.folder.path / "curves")
            for logger in run.loggers:
                if isinstance(logger, RunLogger):
                    logger.log_figure("curves", run.folder.path / "curves.png", run.rounds_done)
