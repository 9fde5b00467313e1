"""Kinds of targets: classes, several labels per sample, or numbers."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

from fl_lightning.core import UserError, accumulator_dtype, ensure
from fl_lightning.data.validation import finite, numeric

TaskName = Literal["classification", "regression", "multilabel"]


class Task(ABC):
    """Defines how targets of one kind are stored, scored and matched to the network's outputs.

    Attributes:
        by_class: Whether each sample has a class, by which samples can be divided and drawn.
        unit: What a net's outputs stand for; completes error messages.
        remedy: Losses that suit the targets; completes error messages.
    """

    by_class: ClassVar[bool] = False
    unit: ClassVar[str]
    remedy: ClassVar[str]

    @abstractmethod
    def targets(self, name: str, array: Any) -> Tensor:
        """Returns checked targets, as they are stored.

        Args:
            name: Their name in errors.
            array: An array or tensor, one row per sample.

        Raises:
            UserError: If they are not targets of this kind.
        """

    @abstractmethod
    def metric(self, outputs: int) -> tuple[str, Metric]:
        """Returns name and a new instance of the default metric, for this number of outputs."""

    def arguments(self, outputs: int) -> dict[str, Any]:
        """Returns the arguments that describe the targets to constructors of torchmetrics; none by default."""
        return {}

    def outputs(self, y: Tensor) -> int:
        """Returns the number of outputs that a net needs for targets ``(N, k)``: k."""
        return int(y.shape[1])

    @abstractmethod
    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns predictions and targets as torchmetrics takes them, with probabilities in place of logits."""

    def fit(self, outputs: Tensor, target: Tensor, number: int) -> bool:
        """Returns whether outputs have the shape that targets need."""
        return outputs.shape == target.shape

    @abstractmethod
    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Returns the groups by which a partition is counted, for this number of outputs.

        Returns:
            Kind and names of the groups, and the groups of each sample, ``(N, k)``; -1 stands for none.
        """


class Classification(Task):
    """One class of each sample, ``(N,)`` int64; for segmentation, of each pixel."""

    by_class = True
    unit = "classes"
    remedy = "for classes"

    def targets(self, name: str, array: Any) -> Tensor:
        """See :class:`Task`; raises a UserError if they are not one-dimensional, or not integers >= 0."""
        y = numeric(name, array)
        ensure(
            not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool,
            f"{name}: labels are {y.dtype}; convert them to integers 0, 1, ..., or set data.task, to regression or "
            "multilabel",
        )
        ensure(y.ndim == 1, f"{name}: shape {tuple(y.shape)} is not (N,); give one label per sample")
        y = y.long()
        if len(y) and y.min() < 0:
            raise UserError(
                f"{name}: label {int(y.min())} at row {int(y.argmin())} is negative; number the classes from 0"
            )
        return y

    def metric(self, outputs: int) -> tuple[str, Metric]:
        """Returns the accuracy."""
        return "acc", MulticlassAccuracy(outputs, average="micro", validate_args=False)

    def arguments(self, outputs: int) -> dict[str, Any]:
        """See :class:`Task`."""
        return {"task": "multiclass", "num_classes": outputs}

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Task`."""
        return outputs.softmax(1), target

    def outputs(self, y: Tensor) -> int:
        """Returns one more than the largest label."""
        return int(y.max()) + 1

    def fit(self, outputs: Tensor, target: Tensor, number: int) -> bool:
        """See :class:`Task`."""
        return outputs.ndim == target.ndim + 1 and len(outputs) == len(target) and outputs.shape[1] >= number

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Returns the classes."""
        return "class", [*map(str, range(outputs))], y[:, None]


class Regression(Task):
    """One number of each sample, or several: ``(N, k)``, floating."""

    unit = "values of a target"
    remedy = "for numbers, such as torch.nn.MSELoss"

    def targets(self, name: str, array: Any) -> Tensor:
        """See :class:`Task`."""
        y = numeric(name, array)
        ensure(
            not y.is_complex() and y.dtype != torch.bool and y.ndim in (1, 2),
            f"{name}: {y.dtype} {tuple(y.shape)} are not numbers (N,) or (N, k); data.task = regression needs them",
        )
        y = y if y.is_floating_point() else y.float()
        return finite(name, y.reshape(len(y), -1) if len(y) else y.reshape(0, 1))

    def metric(self, outputs: int) -> tuple[str, Metric]:
        """Returns the mean absolute error over all values, which a single sample also has."""
        return "mae", MeanAbsoluteError()

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both in float64: metrics such as R² subtract sums of squares from each other."""
        dtype = accumulator_dtype(outputs.device)
        return outputs.to(dtype), target.to(dtype)

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Returns tenths of all samples by their first value; fewer if many values are equal."""
        value = y[:, 0].double().cpu().numpy()
        edges = np.unique(np.quantile(value, np.linspace(0, 1, 11)))
        digits = next(n for n in range(3, 18) if len({f"{edge:.{n}g}" for edge in edges}) == len(edges))
        names = [f"{low:.{digits}g} to {high:.{digits}g}" for low, high in pairwise(edges)] or [f"{edges[0]:.3g}"]
        return (
            "target" if outputs == 1 else "first target",
            names,
            torch.from_numpy(np.digitize(value, edges[1:-1]))[:, None],
        )


class MultiLabel(Task):
    """Which of ``C`` labels each sample has: ``(N, C)``, floating, 0 or 1."""

    unit = "labels"
    remedy = "for several labels, such as torch.nn.BCEWithLogitsLoss"

    def targets(self, name: str, array: Any) -> Tensor:
        """See :class:`Task`."""
        y = numeric(name, array)
        ensure(
            y.ndim == 2 and bool(((y == 0) | (y == 1)).all()),
            f"{name}: {y.dtype} {tuple(y.shape)} are not zeros and ones (N, labels); data.task = multilabel needs them",
        )
        return y.float()

    def metric(self, outputs: int) -> tuple[str, Metric]:
        """Returns F1 over all pairs of sample and label; a positive logit predicts a label."""
        return "f1", LabelF1(outputs, average="micro", validate_args=False)

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Task`."""
        return outputs.sigmoid(), target.long()

    def arguments(self, outputs: int) -> dict[str, Any]:
        """See :class:`Task`."""
        return {"task": "multilabel", "num_labels": outputs}

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Returns the labels; a sample counts for each of its labels."""
        return "label", [*map(str, range(outputs))], torch.where(y > 0, torch.arange(outputs, device=y.device), -1)


class LabelF1(MultilabelF1Score):
    """F1 of logits; torchmetrics' own takes logits for probabilities if all of a batch lie between 0 and 1."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds a batch of logits and labels, ``(n, C)``."""
        super().update((preds > 0).long(), target.long())


TASKS: dict[TaskName, Task] = {
    "classification": Classification(),
    "regression": Regression(),
    "multilabel": MultiLabel(),
}
