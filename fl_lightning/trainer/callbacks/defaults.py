"""The callbacks of every run, and which others a trainer accepts."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.callbacks as theirs
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn

from fl_lightning.core import UserError, callback_of_lightning, ensure
from fl_lightning.trainer.callbacks.checkpoints import Checkpoints, monitored
from fl_lightning.trainer.callbacks.progress import Ending, Progress
from fl_lightning.trainer.callbacks.results import Curves, Results
from fl_lightning.trainer.run import Callback, Run


class EarlyStoppingAdapter(Callback):
    """Calls Lightning's ``EarlyStopping`` in each round in which its metric is measured; rank 0 decides for all.

    Args:
        inner: The callback; ``monitor`` is a metric of ours, such as ``server/test/loss``, and ``patience`` counts
            measurements.
        state: The state with which the callback begins a run.
    """

    def __init__(self, inner: EarlyStopping, state: Mapping[str, Any]) -> None:
        self.inner = inner
        self.load_state_dict(state)

    def on_fit_start(self, run: Run) -> None:
        inner = self.inner
        waited = inner.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED and inner.wait_count >= inner.patience
        if waited and inner.stopped_epoch == run.rounds_done:
            run.should_stop = True
            run.fabric.print(
                f"stopped early in round {run.rounds_done}: to go on, give EarlyStopping more patience, or leave it out"
            )

    def on_round_end(self, run: Run) -> None:
        metrics = run.round_metrics
        if monitored(run, "EarlyStopping", self.inner.monitor, metrics) is None:
            return
        trainer: Any = SimpleNamespace(
            state=SimpleNamespace(fn=TrainerFn.FITTING),
            sanity_checking=False,
            fast_dev_run=False,
            callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
            strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
            should_stop=run.should_stop,
            current_epoch=run.rounds_done,
            val_check_interval=None,
            world_size=run.fabric.world_size,
            global_rank=run.fabric.global_rank,
        )
        self.inner.setup(trainer, run.objective, "fit")
        self.inner.on_train_epoch_end(trainer, run.objective)
        self.inner.on_validation_end(trainer, run.objective)
        run.should_stop = trainer.should_stop
        if run.should_stop and self.inner.stopping_reason_message:
            run.fabric.print(f"stopped early: {self.inner.stopping_reason_message.partition(' Signaling')[0]}")

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({**state, "patience": self.inner.patience})  # that of now


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
    needed = (Results, Checkpoints, *((Curves, Progress) if progress else (Ending,)))
    found += [default() for default in needed if not any(isinstance(callback, default) for callback in found)]
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
        raise UserError(callback_of_lightning(name))
    if isinstance(callback, type):
        raise UserError(
            f"trainer.callbacks: {callback.__name__} is a class; give an object, as {callback.__name__}(...)"
        )
    raise UserError(f"trainer.callbacks: {name} is not a callback; write a subclass of fl_lightning.Callback")
