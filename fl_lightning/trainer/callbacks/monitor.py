"""The metric that a callback monitors."""

from __future__ import annotations

from collections.abc import Mapping

from fl_lightning.core.errors import UserError
from fl_lightning.trainer.run import Run


def monitored(run: Run, callback: str, name: str, metrics: Mapping[str, float]) -> float | None:
    """This round's value of a metric; None if it was not measured.

    Args:
        run: The run.
        callback: The callback, for the message.
        name: The metric.
        metrics: All metrics of the round.

    Raises:
        UserError: If everything has been measured once, and the metric was not among it.
    """
    every = [run.settings.eval_every, *(getattr(c, "every_n_rounds", 1) for c in run.callbacks)]
    if name not in run.metrics and run.rounds_done >= min(max(every), run.max_rounds):
        known = ", ".join(sorted(run.metrics))
        raise UserError(f"trainer.callbacks: {callback}.monitor = {name}: no such metric; choose from {known}")
    return metrics.get(name)
