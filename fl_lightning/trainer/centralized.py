"""The papers' centralized references: the same objective on all clients' data under a plain ``lightning.Trainer``."""

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ensure, global_generator, seeded, unchanged
from fl_lightning.trainer.privacy import GaussianPrivacy
from fl_lightning.trainer.quiet import quiet
from fl_lightning.trainer.run import Run, Snapshot
from fl_lightning.trainer.settings import Settings


class Epochs(L.Callback):
    """Makes an epoch of ``lightning.Trainer`` a round: averaging, evaluation, callbacks and logs are the same.

    Args:
        run: The run.
    """

    keeps_averages = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self.snapshot: Snapshot | None = None
        self._started = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Starts a round without a cohort."""
        self.snapshot = self.run.snapshot()
        self._started = time.perf_counter()
        self.run.call("on_round_start", ctx=self.run.round_context(self.run.rounds_done), cohort=[])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Makes the epoch's weights those of the server."""
        run, seconds, before = self.run, time.perf_counter() - self._started, self.run.server
        buffers, after = pl_module.net_buffers, before.replace(w=pl_module.flat.vector(pl_module.net))
        if buffers is not None and "buffers" in after:
            after = after.replace(buffers=buffers.vector(pl_module.net))
        state = _state(trainer, run)
        run.training_state = lambda: state
        run.apply(pl_module.finish_round(after, before, run.round_context(run.rounds_done)), {}, 0)
        with unchanged(pl_module.net):
            run.close_round(
                {
                    "client/train/loss": float(trainer.callback_metrics["train/loss"]),
                    "client/lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
                    "time/round_s": seconds,
                }
            )
        self.snapshot = None  # the epoch is done
        run.net.move_to(after.w.clone())  # measurements have moved the net, which is trained in place
        trainer.should_stop = trainer.should_stop or (run.finished and run.rounds_done < run.max_rounds)


def _state(trainer: L.Trainer, run: Run) -> dict[str, Any]:
    """What Lightning needs to continue after this epoch: its own checkpoint, and the net's random generator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lightning.ckpt")
        trainer.save_checkpoint(path)
        return {
            "lightning": torch.load(path, map_location="cpu", weights_only=True),
            "generator": global_generator(run.fabric.device).get_state(),
        }


def check_centralized(settings: Settings, model: LocalObjective) -> None:
    """Checks that a model can be trained centrally, before anything is written.

    Raises:
        UserError: If the model keeps federated state, clients are to fail, their uploads are to be aggregated by a rule
            or under differential privacy, or there is more than one process.
    """
    model.check_centralized(averaged=True)
    ensure(not settings.faults.kinds, "trainer.faults: centralized training has no clients that fail; set it to null")
    key = "privacy" if isinstance(settings.aggregation, GaussianPrivacy) else "aggregation"
    ensure(
        not settings.aggregation.by_rows,
        f"trainer.{key}: centralized training has no uploads of clients; set it to null",
    )
    ensure(
        settings.fabric.world_size <= 1,
        f"trainer.devices = {settings.fabric.world_size}: centralized training takes 1",
    )


@quiet()
def train_centrally(run: Run) -> None:
    """Trains for ``max_rounds`` epochs on the union of the clients' data, from the run's state on.

    Args:
        run: The run, in its session. An interruption leaves it after its last whole epoch.
    """
    device, epochs, model = run.fabric.device, Epochs(run), run.objective
    trainer = L.Trainer(
        max_epochs=run.max_rounds,
        accelerator="cpu" if device.type == "cpu" else device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=run.settings.precision,
        callbacks=[epochs],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    run.net.move_to(run.server.w.clone())  # trained in place
    batches = run.data.train_dataloader(run.seed, first_epoch=1)
    state = run.restored.get("training") or {}
    with tempfile.TemporaryDirectory() as folder, seeded(device, run.seed, "centralized net"):
        path = None
        if state:
            torch.save(state["lightning"], path := str(Path(folder, "lightning.ckpt")))
            global_generator(device).set_state(state["generator"])
        try:
            trainer.fit(model, train_dataloaders=batches, ckpt_path=path)
        except BaseException:
            if epochs.snapshot is not None:
                run.restore(epochs.snapshot)
            raise
    model.to(device)  # lightning.Trainer leaves it on the CPU
    run.net.move_to(run.server.w.clone())
