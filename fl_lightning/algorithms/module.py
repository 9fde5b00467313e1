"""A network and its loss as a LightningModule: what is minimized, and how it is evaluated."""

import copy
from typing import Any

import lightning as L
from torch import Tensor, nn


class SupervisedModule(L.LightningModule):
    """A network and a loss per sample.

    Args:
        net: The network: a batch to logits.
        loss: Losses per sample ``(logits, target) -> (n,)``; by default cross-entropy.
    """

    def __init__(self, net: nn.Module, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss() if loss is None else loss
        if hasattr(self.loss, "reduction"):
            setattr(self.loss, "reduction", "none")  # noqa: B010  a string on a module, which mypy takes for a tensor

    def forward(self, x: Tensor) -> Tensor:
        """Returns the net's output."""
        return self.net(x)  # type: ignore[no-any-return]

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Returns the loss of each sample, ``(n,)``.

        Args:
            logits: The net's output, ``(n, ...)``.
            target: Classes ``(n,)``, or with Mixup their probabilities ``(n, C)``.
            teacher: The teacher's output on the same batch, if there is one.
        """
        return self.loss(logits, target)  # type: ignore[no-any-return]

    @property
    def evaluation_loss(self) -> nn.Module:
        """The loss that evaluation and flatness use: without label smoothing, so that runs with and without compare."""
        if not getattr(self.loss, "label_smoothing", 0):
            return self.loss
        plain = copy.copy(self.loss)
        vars(plain)["label_smoothing"] = 0.0
        return plain

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Returns the mean loss of a minibatch ``(x, y)`` or ``(x, y, teacher's output)``, a scalar."""
        x, y, *teacher = batch
        return self.losses(self.net(x), y, *teacher).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the mean loss of the epoch as ``train/loss``."""
        self.log("train/loss", outputs["loss"], on_step=False, on_epoch=True, prog_bar=True, batch_size=len(batch[1]))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``val/loss`` and ``val/acc``."""
        self._log_evaluation("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``test/loss`` and ``test/acc``."""
        self._log_evaluation("test", *batch)

    def _log_evaluation(self, split: str, x: Tensor, y: Tensor) -> None:
        from torchmetrics.functional.classification import multiclass_accuracy

        logits = self.net(x)
        acc = multiclass_accuracy(logits, y, num_classes=logits.shape[1], average="micro")
        self.log_dict({f"{split}/loss": self.evaluation_loss(logits, y).mean(), f"{split}/acc": acc}, batch_size=len(y))
