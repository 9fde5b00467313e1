"""The figure of a run."""

from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import save_figure
from fl_lightning.results.clients import plot_clients, read_clients
from fl_lightning.results.curves import plot_curves
from fl_lightning.trainer.run import Callback, Run


class Curves(Callback):
    """Draws ``curves.png`` and ``curves.pdf`` when the run ends: accuracy, loss and flatness by round.

    If each client was evaluated, ``clients.png`` and ``clients.pdf`` show the last evaluation.
    """

    @rank_zero_only
    def on_fit_end(self, run: Run) -> None:
        drawn = {"curves": plot_curves({run.folder.name: run.folder.metrics})}
        if clients := read_clients(run.folder.path):
            drawn["clients"] = plot_clients({run.folder.name: [clients]})
        for name, figure in drawn.items():
            _, png = save_figure(figure, run.folder.path / name)
            for logger in run.run_loggers:
                logger.log_figure(name, png, run.rounds_done)
