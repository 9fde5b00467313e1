"""What the targets are: classes, several labels of a sample, or numbers."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

from fl_lightning.core import accumulator_dtype, ensure
from fl_lightning.data.stream import finite, labels, numeric

TaskName = Literal["classification", "regression", "multilabel"]


class Task(ABC):
    """What depends on the kind of the targets: their form, their metric, and which outputs fit them.

    Attributes:
        by_class: Whether each sample has a class, by which samples can be divided and drawn.
        unit: What the outputs of a net stand for, for messages.
        remedy: Losses for such targets, for messages.
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
        """Returns name and a new instance of the metric by default, for this number of outputs."""

    @abstractmethod
    def arguments(self, outputs: int) -> dict[str, Any]:
        """Returns what constructors of torchmetrics want to know of the targets, by argument."""

    def outputs(self, y: Tensor) -> int:
        """Returns the number of outputs that a net needs for targets ``(N, k)``: k."""
        return int(y.shape[1])

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns predictions and targets as torchmetrics takes them, with probabilities in place of logits."""
        return outputs, target

    def fit(self, outputs: Tensor, target: Tensor, number: int) -> bool:
        """Returns whether outputs have the shape that targets need."""
        return outputs.shape == target.shape

    def strata(self, y: Tensor) -> Tensor:
        """Returns the class of each sample, ``(N,)``; zeros where samples have none."""
        return y.new_zeros(len(y), dtype=torch.int64)

    @abstractmethod
    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Returns what a partition is counted by, for this number of outputs.

        Returns:
            What the groups are, their names, and the groups of each sample, ``(N, k)``; -1 is none.
        """


class Classification(Task):
    """One class of each sample, ``(N,)`` int64; for segmentation, of each pixel."""

    by_class = True
    unit = "classes"
    remedy = "for classes"

    def targets(self, name: str, array: Any) -> Tensor:
        """See :class:`Task`."""
        return labels(name, array)

    def metric(self, outputs: int) -> tuple[str, Metric]:
        """Accuracy."""
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

    def strata(self, y: Tensor) -> Tensor:
        """See :class:`Task`."""
        return y

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """The classes."""
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
        """Mean absolute error, over all values: it is defined for a single sample, too."""
        return "mae", MeanAbsoluteError()

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """In float64: R² and its like subtract sums of squares from each other."""
        dtype = accumulator_dtype(outputs.device)
        return outputs.to(dtype), target.to(dtype)

    def arguments(self, outputs: int) -> dict[str, Any]:
        """See :class:`Task`."""
        return {}

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """Tenths of all samples by their first value; fewer where many are equal."""
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
        """F1 over all pairs of sample and label; a label is predicted if its logit is positive."""
        return "f1", LabelF1(outputs, average="micro", validate_args=False)

    def scored(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Task`."""
        return outputs.sigmoid(), target.long()

    def arguments(self, outputs: int) -> dict[str, Any]:
        """See :class:`Task`."""
        return {"task": "multilabel", "num_labels": outputs}

    def groups(self, y: Tensor, outputs: int) -> tuple[str, list[str], Tensor]:
        """The labels; a sample counts for each that it has."""
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
