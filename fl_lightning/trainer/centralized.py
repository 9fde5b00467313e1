"""The papers' centralized references: the same objective on all clients' data under a plain ``lightning.Trainer``."""

import time
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ensure, global_generator, seeded, unchanged
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.loop import close
from fl_lightning.trainer.received import check_finite
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import Interruption, quiet, unbroken_output
from fl_lightning.trainer.session import session, transaction
from fl_lightning.trainer.settings import Settings


class InMemory(CheckpointIO):
    """Keeps the last checkpoint of ``lightning.Trainer`` in memory, in place of a file.

    Attributes:
        content: The checkpoint.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.content = deepcopy(checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return deepcopy(self.content)

    def remove_checkpoint(self, path: Any) -> None:
        """Does nothing: the next checkpoint replaces this one."""


class Epochs(L.Callback):
    """Makes an epoch of ``lightning.Trainer`` a round: averaging, evaluation, callbacks and logs are the same.

    Args:
        run: The run.
        memory: Takes the checkpoint of ``lightning.Trainer`` after each epoch.
    """

    keeps_averages = True

    def __init__(self, run: Run, memory: InMemory) -> None:
        self.run, self.memory, self.epoch = run, memory, ExitStack()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Starts a round without a cohort."""
        self.epoch.enter_context(transaction(self.run))
        self._started = time.perf_counter()
        self.run.call("on_round_start", self.run.round_context(self.run.rounds_done), [])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Makes the epoch's weights those of the server."""
        run, seconds, before = self.run, time.perf_counter() - self._started, self.run.server
        buffers, trained = pl_module.net_buffers, before.replace(w=pl_module.flat.vector(pl_module.net))
        if buffers is not None and "buffers" in trained:
            trained = trained.replace(buffers=buffers.vector(pl_module.net))
        after = pl_module.finish_round(trained, before, run.round_context(run.rounds_done))
        check_finite(run, after, run.rounds_done)
        trainer.save_checkpoint("in memory")
        training = {"lightning": self.memory.content, "generator": global_generator(run.fabric.device).get_state()}
        run.apply(run.state.after_round(after, training=training), {})
        metrics = {
            "client/train/loss": float(trainer.callback_metrics["train/loss"]),
            "client/lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "time/round_s": seconds,
        }
        with unchanged(pl_module.net):
            close(run, metrics)
        self.epoch.close()  # the round is done
        run.net.move_to(trained.w.clone())  # measurements have moved the net, which is trained in place
        trainer.should_stop = trainer.should_stop or (run.finished and run.rounds_done < run.max_rounds)


def check_centralized(settings: Settings, model: LocalObjective) -> None:
    """Checks that a model can be trained centrally, before anything is written.

    Raises:
        UserError: If the model keeps federated state, clients are to fail, their uploads are to be aggregated by a rule
            or under differential privacy, rounds that diverge are to be left out, or there is more than one process.
    """
    model.check_centralized(averaged=True)
    key = "privacy" if isinstance(settings.aggregation, GaussianPrivacy) else "aggregation"
    divergence, devices = settings.on_divergence, settings.fabric.world_size
    for name, fits, lacks in (
        ("clock", settings.clock is None, "devices of clients; set it to null"),
        ("faults", not settings.faults.kinds, "clients that fail; set it to null"),
        (key, not settings.aggregation.by_rows, "uploads of clients; set it to null"),
        (f"on_divergence = {divergence}", divergence == "stop", "round to leave out; set it to stop"),
        (f"devices = {devices}", devices <= 1, "further processes; set it to 1"),
    ):
        ensure(fits, f"trainer.{name}: centralized training has no {lacks}")


def train_centrally(run: Run) -> None:
    """Trains a run to its end: for ``max_rounds`` epochs on the union of the clients' data.

    An error or an interruption leaves it after its last whole epoch.
    """
    with Interruption(), unbroken_output(), session(run):
        if not run.finished:
            _train(run)


@quiet()
def _train(run: Run) -> None:
    device, model, training = run.fabric.device, run.objective, run.state.training
    memory = InMemory(training.get("lightning", {}))
    epochs = Epochs(run, memory)
    trainer = L.Trainer(
        max_epochs=run.max_rounds,
        accelerator="cpu" if device.type == "cpu" else device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=run.settings.precision,
        callbacks=[epochs],
        plugins=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    run.net.move_to(run.server.w.clone())  # trained in place
    batches = run.data.train_dataloader(run.seed, first_epoch=1)
    with seeded(device, run.seed, "centralized net"):
        if training:
            global_generator(device).set_state(training["generator"])
        with epochs.epoch:  # an error breaks the epoch off
            trainer.fit(model, train_dataloaders=batches, ckpt_path="in memory" if training else None)
    model.to(device)  # lightning.Trainer leaves it on the CPU
    run.net.move_to(run.server.w.clone())
