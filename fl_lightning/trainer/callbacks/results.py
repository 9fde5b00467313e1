"""The statistics of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from fl_lightning.core.errors import require
from fl_lightning.results.summary import LAST, summarise
from fl_lightning.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from fl_lightning.trainer.trainer import FederatedTrainer

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

    def __init__(self, last: int | None = None, target: float | None = None) -> None:
        require(last is None or last >= 1, "trainer.callbacks: Results.last", last, "at least 1 round")
        self.last, self.target = last, target

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if trainer.fabric.is_global_zero:
            metric = f"server/test/{trainer.data.metric()[0]}"
            last = self.last or (trainer.eval_last if trainer.eval_last > 1 else LAST)
            found = asdict(summarise(trainer.run_dir, last, self.target, metric))
            (trainer.run_dir / FILE).write_text(json.dumps(found, indent=2) + "\n")
