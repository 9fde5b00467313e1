"""The callbacks of every run, and which others a trainer accepts."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch.callbacks as theirs

from fl_lightning.core import UserError, ensure
from fl_lightning.trainer.callbacks.checkpoints import Checkpoints
from fl_lightning.trainer.callbacks.curves import Curves
from fl_lightning.trainer.callbacks.early_stopping import EarlyStoppingAdapter
from fl_lightning.trainer.callbacks.progress import Ending, Progress
from fl_lightning.trainer.callbacks.results import Results
from fl_lightning.trainer.run import Callback

OURS = {
    "ModelCheckpoint": "Checkpoints (monitor, mode, save_top_k)",
    "Timer": "trainer.max_time",
    "ModelSummary": "Progress",
    "LearningRateMonitor": "the metric client/lr, which every run logs",
    "StochasticWeightAveraging": "model.averaging: SWA",
    "WeightAveraging": "model.averaging: EMA",
    "EMAWeightAveraging": "model.averaging: EMA",
    "GradientAccumulationScheduler": "data.batch_size",
    **dict.fromkeys(("ProgressBar", "TQDMProgressBar", "RichProgressBar"), "Progress"),
}
"""What replaces a callback of Lightning, by the name of that callback."""


def with_defaults(callbacks: Sequence[Any], progress: bool) -> list[Callback]:
    """Returns the given callbacks and the default ones, in the order of their calls.

    Args:
        callbacks: Callbacks of this package, or Lightning's ``EarlyStopping``.
        progress: Whether to show live progress and draw a figure at the end; otherwise the run ends with one line.

    Raises:
        UserError: If an object is another callback of Lightning or no callback at all, or if a default callback is
            given twice.
    """
    found = [_accepted(callback) for callback in callbacks]
    for once in (Checkpoints, Curves, Progress, Results):
        many = sum(isinstance(callback, once) for callback in found)
        ensure(many <= 1, f"trainer.callbacks: {once.__name__} is there {many} times; give it once")
    for default in (Results, Checkpoints, *((Curves, Progress) if progress else (Ending,))):
        if not any(isinstance(callback, default) for callback in found):
            found.append(default())
    # measurements come first; Progress shows what Results has written; Checkpoints saves when the others have run
    order = (Curves, Results, Progress, Ending, EarlyStoppingAdapter, Checkpoints)
    return sorted(found, key=lambda c: next((i + 1 for i, kind in enumerate(order) if isinstance(c, kind)), 0))


def _accepted(callback: Any) -> Callback:
    name = type(callback).__name__
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, theirs.EarlyStopping):
        return EarlyStoppingAdapter(callback, callback.state_dict())
    if isinstance(callback, theirs.Callback):
        remedy = f"use {OURS[name]}" if name in OURS else "write a subclass of fl_lightning.Callback"
        raise UserError(f"trainer.callbacks: {name} is a callback of lightning.Trainer; {remedy}")
    if isinstance(callback, type):
        own = callback.__name__
        raise UserError(f"trainer.callbacks: {own} is a class; give an object, as {own}(...)")
    raise UserError(f"trainer.callbacks: {name} is not a callback; write a subclass of fl_lightning.Callback")
