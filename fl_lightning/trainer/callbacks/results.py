"""The statistics of a run."""

from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import json_text, save_figure, write_atomically
from fl_lightning.results import SUMMARY, plot_clients, plot_curves, read_clients, summarise, tested
from fl_lightning.trainer.run import Callback, Run


class Results(Callback):
    """Writes ``summary.json`` when a run ends: an `fl_lightning.results.summary.Summary` of the data's metric.

    Its mean is the headline. It is taken over the last ``trainer.eval_last`` rounds if that is set and at most half of
    the run, otherwise over the last tenth of the rounds, at most 100. A value that is not finite becomes null.

    Args:
        target: Value that the metric should reach, such as an accuracy of 0.8; null: none.
    """

    def __init__(self, target: float | None = None) -> None:
        self.target = target

    def on_fit_end(self, run: Run) -> None:
        name, metrics = run.data.metric()[0], tested(run.metrics)
        metric = next((metric for metric in metrics if metric.endswith(f"/{name}")), None)
        if run.fabric.is_global_zero and metric:  # a run may stop before its first evaluation
            found = summarise(run.folder.path, None, self.target, metric, eval_last=run.settings.eval_last)
            write_atomically(run.folder.path / SUMMARY, json_text(found, indent=2))


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
            for logger in run.own_loggers:
                logger.log_figure(name, png, run.rounds_done)
