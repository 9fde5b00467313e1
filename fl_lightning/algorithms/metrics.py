"""The metrics that are evaluated beside the loss: that of the data, and further ones of torchmetrics."""

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.core import UserError, class_at, ensure, folded, require

Given = str | Metric
Metrics = list[Given] | dict[str, Given]
"""Metrics by name: their class in torchmetrics, a path of a class, or an object."""


def named(metrics: Metrics | None) -> dict[str, Given]:
    """Returns metrics by name; one that has no name gets that of its class.

    Raises:
        UserError: If a name occurs twice or cannot be part of a metric's name, or a class does not exist.
    """
    if not isinstance(metrics, Mapping):
        entries = list(metrics or ())
        names = [entry.rpartition(".")[2] if isinstance(entry, str) else type(entry).__name__ for entry in entries]
        twice = next((name for name in names if names.count(name) > 1), None)
        ensure(twice is None, f"model.metrics: {twice} is there twice; give a mapping, with a name for each")
        metrics = dict(zip(names, entries, strict=True))
    for name, metric in metrics.items():
        plain = re.fullmatch(r"\w[\w@-]*", name) and name != "loss"
        require(bool(plain), "model.metrics", name, "not a name for a metric; use letters, digits, _, - and @")
        if isinstance(metric, str):
            _class_of(metric)
    return dict(metrics)


class Scores(nn.Module):
    """Metrics of a number of batches.

    Args:
        of_data: Name and metric of the data, which gets the net's outputs as they are.
        further: Other metrics, by :func:`named`, which get probabilities where outputs are logits.
        task: The `Task` of the data, which knows what constructors of torchmetrics ask; None: unknown.
        outputs: Number of outputs that count; None: all.

    Attributes:
        metrics: All of them by name, the data's first.

    Raises:
        UserError: If one has the name of the data's, or cannot be made from its class alone.
    """

    def __init__(
        self, of_data: tuple[str, Metric], further: Mapping[str, Given], task: Any = None, outputs: int | None = None
    ) -> None:
        super().__init__()
        name, metric = of_data
        ensure(name not in further, f"model.metrics: {name} is the data's own metric; choose another name")
        self._own, self._task, self._outputs = metric, task, outputs
        arguments = {} if task is None else task.arguments(outputs)
        self._further = {key: _new(key, entry, arguments) for key, entry in further.items()}
        self.metrics: Mapping[str, Any] = nn.ModuleDict({name: metric, **self._further})  # type: ignore[assignment]

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            outputs: The net's, ``(n, ...)``.
            target: Their targets.

        Raises:
            UserError: If a metric does not take them.
        """
        outputs = outputs[:, : self._outputs]
        self._own.update(outputs, target)
        if self._further and self._task is not None:
            outputs, target = self._task.scored(outputs, target)
        for name, metric in self._further.items():
            with _fitting(name):
                metric.update(outputs, target)

    def reset(self) -> None:
        """Drops all samples."""
        for metric in self.metrics.values():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """Returns the value of each; every process must call.

        Raises:
            UserError: If a value is not one number.
        """
        with warnings.catch_warnings():  # a process may have no samples of its own
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            return {name: _number(name, metric) for name, metric in self.metrics.items()}

    def directions(self) -> dict[str, Literal["max", "min"]]:
        """Returns whether large (max) or small (min) values of each metric are good; large, if it does not say."""
        return {name: "min" if metric.higher_is_better is False else "max" for name, metric in self.metrics.items()}


def _number(name: str, metric: Metric) -> float:
    try:  # a RuntimeError comes from the processes' communication, or from the machine
        value = metric.compute()
    except (ValueError, IndexError, TypeError) as error:
        raise _misfit(name, error) from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise _misfit(name, f"but {type(value).__name__} {tuple(getattr(value, 'shape', ()))}".replace(" ()", ""))
    return float(value)


def _new(name: str, metric: Given, arguments: Mapping[str, Any]) -> Metric:
    if isinstance(metric, Metric):
        new: Metric = metric.clone()
        new.reset()
        return new
    kind = _class_of(metric)
    with _fitting(name):
        return kind(**{k: value for k, value in arguments.items() if k in inspect.signature(kind).parameters})


def _class_of(path: str) -> type[Metric]:
    packages = ["torchmetrics", "torchmetrics.classification", "torchmetrics.regression"]
    kind: type[Metric] | None = class_at(path, packages, Metric)
    if kind is None:
        raise UserError(
            f"model.metrics = {path}: no class of torchmetrics {torchmetrics.__version__}, nor the path of one; "
            "see lightning.ai/docs/torchmetrics for its metrics"
        )
    return kind


@contextmanager
def _fitting(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _misfit(name, error) from None


def _misfit(name: str, reason: object) -> UserError:
    return UserError(
        f"model.metrics = {name}: not one number of these outputs and targets ({folded(reason):.120}); "
        "choose another metric, or give it as class_path and init_args"
    )
