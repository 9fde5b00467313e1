"""A network and its loss as a LightningModule: what is minimized, evaluated and logged; the features of its net."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from inspect import BoundArguments
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.algorithms.metrics import Metrics, Scores, named
from fl_lightning.core import Checked, constants, digest, ensure, mend_group_norms, require


@contextmanager
def with_features(net: nn.Module) -> Iterator[None]:
    """Makes a net return ``(output, features)``, with the features ``(n, f)`` of the same forward pass.

    The features are the input of the last-defined `nn.Linear`, without the adapters of LoRA.

    Raises:
        UserError: If the net has no linear layer, or, in the forward pass, if it does not call the last-defined one.
    """
    linear = [module for name, module in net.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name]
    ensure(
        bool(linear),
        f"model.net = {type(net).__name__} has no linear layer, whose input would be the features; choose a net "
        "that ends in one",
    )
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(1))

    def both(module: nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        ensure(
            bool(seen),
            f"model.net = {type(net).__name__}: does not call the linear layer that it defines last, so it has no "
            "features; define its classifier last",
        )
        features = seen[-1]
        seen.clear()
        return output, features

    with linear[-1].register_forward_pre_hook(see), net.register_forward_hook(both):  # removed on exit
        yield


ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss, nn.PoissonNLLLoss,
)  # fmt: skip
"""Losses that have one value for each value of a target; hooks make it one mean per sample, ``(n,)``."""


def _check_shapes(loss: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    outputs, targets = inputs
    if outputs.shape != targets.shape:  # torch broadcasts them to each other
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}")


def _mean_of_sample(loss: nn.Module, inputs: Any, values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


Losses = Callable[..., Tensor]
"""Losses per sample: arguments and result of `SupervisedModule.losses`."""


class SupervisedModule(Checked, L.LightningModule, key="model"):
    """A network and a loss per sample.

    Under ``lightning.Trainer`` it logs ``train/loss``, ``val/loss`` and ``test/loss``, and as ``val/<name>`` and
    ``test/<name>`` the metric of the data module (``metric() -> (name, metric)``); without one, accuracy as ``acc``;
    and the other ``metrics``.

    ``hparams`` are those arguments of the constructor that are numbers, strings or None. The net, and parts other than
    the default ones, are arguments of ``load_from_checkpoint(path, net=net)``.

    Args:
        net: The network: a batch to logits.
        loss: Losses per sample ``(logits, target) -> (n,)``; by default cross-entropy. A loss with a ``reduction`` is
            copied, and the copy reduces nothing: the loss of a minibatch is the mean over its samples. An elementwise
            loss (MSELoss, BCEWithLogitsLoss) becomes the mean over each sample's values.
        metrics: Metrics of torchmetrics that are evaluated in addition to that of the data: class names, paths of
            classes, or objects, as a list or by name. A class is made for the data: with their task and number of
            classes or labels.

    Attributes:
        uses_features: Whether `losses` takes pairs ``(output, features)`` in place of the outputs of net and teachers.
        parts: Parts, of which `Part.further` adds losses; see `LocalObjective`.
    """

    uses_features: ClassVar[bool] = False
    parts: Sequence[Any] = ()

    def __init__(self, net: nn.Module, loss: nn.Module | None = None, metrics: Metrics | None = None) -> None:
        super().__init__()
        mend_group_norms(net)
        self.net = net
        self.loss = nn.CrossEntropyLoss(reduction="none") if loss is None else loss
        smoothing = getattr(self.loss, "label_smoothing", 0.0)
        require(0 <= smoothing < 1, "model.loss.label_smoothing", smoothing, "give a number from 0 to below 1")
        reduction = getattr(self.loss, "reduction", "none")
        is_mean = "a minibatch's loss is the mean of its samples' losses; give mean or none"
        require(reduction in ("none", "mean"), "model.loss.reduction", reduction, is_mean)
        if isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss):
            hint = "torch would divide by the sum of the weights, not by the number of samples; use a loss of your own"
            require(self.loss.weight is None, "model.loss.weight", "classes have weights", hint)
            require(self.loss.ignore_index < 0, "model.loss.ignore_index", self.loss.ignore_index, hint)
        elementwise = isinstance(self.loss, ELEMENTWISE)
        if reduction != "none" or elementwise:
            self.loss = copy.deepcopy(self.loss)
            vars(self.loss)["reduction"] = "none"
        if elementwise and not getattr(self.loss, "per_sample", False):  # another module's loss has the hooks already
            self.loss.register_forward_pre_hook(_check_shapes)
            self.loss.register_forward_hook(_mean_of_sample)
            vars(self.loss)["per_sample"] = True
        self.metrics = named(metrics)
        self._scores: Any = nn.ModuleDict()
        self._new_batch = False

    def constructed(self, arguments: BoundArguments) -> None:
        """Keeps the plain arguments of the outermost constructor as ``hparams``."""
        settings = {**arguments.arguments, **arguments.kwargs}
        settings = {name: v.item() if isinstance(v, np.generic) else v for name, v in settings.items()}
        kinds = bool | int | float | str | None
        plain = {name: v for name, v in settings.items() if isinstance(v, kinds) and not isinstance(v, Enum)}
        self.hparams.update({name: v for name, v in plain.items() if name not in ("loss", "init_weights")})

    def forward(self, x: Tensor) -> Tensor:
        """Returns the net's output."""
        return self.net(x)  # type: ignore[no-any-return]

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        """Returns the loss of each sample, ``(n,)``.

        Args:
            logits: The net's output, ``(n, ...)``.
            target: Classes ``(n,)``, or with Mixup their probabilities ``(n, C)``; other targets ``(n, k)``.
            teacher: The outputs of the teachers on the same batch, if there are any, and `loss_constants`.
        """
        return self.loss(logits, target)  # type: ignore[no-any-return]

    def batch_loss(
        self, output: Any, target: Tensor, *teacher: Any, weight: Tensor | None = None, losses: Losses | None = None
    ) -> Tensor:
        """Returns the loss of a minibatch, a scalar: by default the mean of the losses per sample.

        Args:
            output: As for `losses`.
            target: As for `losses`.
            teacher: As for `losses`.
            weight: Weight of each sample in the mean, ``(n,)``, 0 for padding; None: equal weights.
            losses: Other losses per sample.
        """
        values = (losses or self.losses)(output, target, *teacher)
        return values.mean() if weight is None else torch.sum(values * weight)

    def minibatch_loss(
        self,
        forward: Callable[[], Any],
        target: Tensor,
        *teacher: Any,
        weight: Tensor | None = None,
        losses: Losses | None = None,
    ) -> Tensor:
        """Returns what the gradient is taken of: `batch_loss` of a forward pass on a minibatch, and losses of parts.

        Args:
            forward: The pass, without arguments, to the output.
            target: As for `losses`.
            teacher: As for `losses`.
            weight: As for `batch_loss`.
            losses: As for `batch_loss`; parts add nothing to them.
        """
        further = [] if losses is not None else [part.further(self.net) for part in self.parts]
        with self.observed(), ExitStack() as stack:
            functions = [stack.enter_context(context) for context in further if context is not None]
            output = forward()
        values = [function(len(target)) for function in functions]
        loss = self.batch_loss(output, target, *teacher, weight=weight, losses=losses)
        return loss + sum(v.mean() if weight is None else torch.sum(v * weight) for v in values) if values else loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the net's own frozen parameters to the checkpoint of a run, which holds only their hash.

        Raises:
            UserError: If they are not those that the run had.
        """
        if checkpoint.get("frozen"):
            frozen = constants(self.net)
            ensure(
                digest(frozen) == checkpoint["frozen"],
                "load_from_checkpoint: net has other frozen parameters than the checkpoint's run; make it with the "
                "run's, or take load_net(run_folder)",
            )
            checkpoint["state_dict"] |= {f"net.{name}": value for name, value in frozen.items()}

    def observed(self) -> AbstractContextManager[None]:
        """Returns a context in which the net also returns features if `losses` needs them."""
        return with_features(self.net) if self.uses_features else nullcontext()

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
        loss = self.minibatch_loss(lambda: self.net(x), y, *teacher)
        if self._new_batch:  # SAM's second pass of a batch is at other weights
            self._new_batch = False
            self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y), sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Makes the next `training_step` log: ``lightning.Trainer`` calls this, the engines do not."""
        self._new_batch = True

    def setup(self, stage: str) -> None:
        """Removes the metrics of an earlier fit or test, which may have had other data."""
        self._scores.clear()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``val/loss`` and the metric."""
        self._evaluate("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs ``test/loss`` and the metric."""
        self._evaluate("test", *batch)

    def scores(self, data: Any, classes: int | None = None) -> Scores:
        """Returns the metric of the data and those of ``metrics``, without samples.

        Args:
            data: The data module.
            classes: Number of classes, of data that have no metric.

        Raises:
            UserError: If one of ``metrics`` does not suit the data.
        """
        if hasattr(data, "metric"):
            metric = data.metric()
        else:
            ignored = getattr(self.loss, "ignore_index", None)
            metric = "acc", MulticlassAccuracy(classes, average="micro", ignore_index=ignored, validate_args=False)
        return Scores(metric, self.metrics, getattr(data, "task", None), getattr(data, "num_classes", None))

    def _evaluate(self, split: str, x: Tensor, y: Tensor) -> None:
        logits = self.net(x)
        loss = self.evaluation_loss(logits, y).mean()
        if split not in self._scores:
            data = getattr(self.trainer, "datamodule", None)
            self._scores[split] = self.scores(data, logits.shape[1]).to(self.device)
        scores = self._scores[split]
        scores.update(logits, y)
        self.log(f"{split}/loss", loss, batch_size=len(y), sync_dist=True)
        for name, metric in scores.metrics.items():
            self.log(f"{split}/{name}", metric, metric_attribute=f"_scores.{split}.metrics.{name}", batch_size=len(y))
