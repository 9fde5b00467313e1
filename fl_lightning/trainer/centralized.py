"""The papers' centralized references: the same objective on all clients' data under a plain ``lightning.Trainer``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning as L

from fl_lightning.core.buffers import unchanged
from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import seeded
from fl_lightning.core.state import RoundContext

if TYPE_CHECKING:
    from fl_lightning.algorithms.base import LocalObjective
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.trainer.trainer import FederatedTrainer


class Epochs(L.Callback):
    """Lets an epoch of ``lightning.Trainer`` count as a round: averaging, evaluation, callbacks and logs are the same.

    Args:
        federated: Whose callbacks and loggers listen.
    """

    keeps_averages = True

    def __init__(self, federated: FederatedTrainer) -> None:
        self.federated = federated
        self._started = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """An epoch begins: so does a round, of nobody."""
        self._started = time.perf_counter()
        self.federated.tell("on_round_start", ctx=self._context(), cohort=[])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """An epoch has ended: its weights are the server's."""
        run, seconds, before, ctx = (
            self.federated,
            time.perf_counter() - self._started,
            self.federated.server,
            self._context(),
        )
        w, buffers = pl_module.flat.vector(pl_module.net), pl_module.net_buffers
        after = before.replace(w=w)
        if buffers is not None and "buffers" in after:
            after = after.replace(buffers=buffers.vector(pl_module.net))
        run.server = pl_module.finish_round(after, before, ctx)
        run.round += 1
        with unchanged(pl_module.net):
            run.close_round(
                {
                    "client/train/loss": float(trainer.callback_metrics["train/loss"]),
                    "client/lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
                    "time/round_s": seconds,
                }
            )
        run.engine.net.move_to(w.clone())  # what was measured has used the net; it is trained in place

    def _context(self) -> RoundContext:
        run = self.federated
        return RoundContext(run.round, run.max_rounds, 1, run.objective.flat)


def check(federated: FederatedTrainer, model: LocalObjective) -> None:
    """Refuse what cannot be trained centrally, before anything is written.

    Raises:
        UserError: If the model keeps federated state, or more than one device is asked for.
    """
    model.check_centralized(averaged=True)
    if federated.fabric.world_size > 1:
        raise UserError(f"trainer.devices = {federated.fabric.world_size}: centralized training takes 1")


def train(federated: FederatedTrainer, model: LocalObjective, data: FederatedDataModule) -> None:
    """Train for ``max_rounds`` epochs on the union of the clients' data; the federated trainer is set up for them."""
    device = federated.fabric.device
    trainer = L.Trainer(
        max_epochs=federated.max_rounds,
        accelerator="cpu" if device.type == "cpu" else device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=federated.precision,
        callbacks=[Epochs(federated)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    federated.engine.net.move_to(federated.server.w.clone())  # trained in place
    with seeded(device, federated.seed, "centralized net"):  # for what the net draws itself
        trainer.fit(model, train_dataloaders=data.train_dataloader(federated.seed, first_epoch=1))
    model.to(device)  # lightning.Trainer leaves it on the CPU
