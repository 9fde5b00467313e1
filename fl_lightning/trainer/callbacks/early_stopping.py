"""An adapter that calls Lightning's ``EarlyStopping`` unchanged."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

from fl_lightning.trainer.callbacks.checkpoints import monitored
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
        self.inner.load_state_dict(dict(state))
