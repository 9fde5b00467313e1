"""The statistics of a run."""

import json
from dataclasses import asdict

from fl_lightning.core import Count, write_atomically
from fl_lightning.results.summary import summarise
from fl_lightning.trainer.run import Callback, Run

FILE = "summary.json"


class Results(Callback):
    """Writes ``summary.json`` when a run ends: an `fl_lightning.results.summary.Summary` of what the data evaluate.

    Args:
        last: Rounds at the end whose evaluations are averaged; the papers take 100 or 50. null: ``trainer.eval_last``
            if that is set, else 100.
        target: A value of the metric to be reached, such as an accuracy of 0.8; null: none.

    Raises:
        UserError: If ``last`` is below 1.
    """

    def __init__(self, last: Count | None = None, target: float | None = None) -> None:
        self.last, self.target = last, target

    def on_fit_end(self, run: Run) -> None:
        metric = f"server/test/{run.data.metric()[0]}"
        if run.fabric.is_global_zero and metric in run.metrics:  # a run may stop before its first evaluation
            last = self.last or run.settings.last_rounds
            found = asdict(summarise(run.folder.path, last, self.target, metric))
            write_atomically(run.folder.path / FILE, json.dumps(found, indent=2) + "\n")
