"""The interface of the engines: jobs in, local results out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Autocast, ClientContext, FlatNet, State, Upload
from fl_lightning.data.minibatches import Minibatches

COLUMNS = ("lr", "K", "k_lr", "n_k", "n_mean")
"""Attributes in which the contexts of a cohort's clients differ."""


@dataclass(frozen=True)
class Job:
    """One client's local training in one phase.

    Attributes:
        client: Its id.
        state: Its state.
        received: The state that the server sent.
        ctx: Its context.
        minibatches: Its data, one minibatch per step.
        seed: Seed for what the net itself draws, such as dropout.
        settings: Settings that replace those of the engine's objective, by name; those of a part as ``ascent.rho``.
    """

    client: int
    state: State
    received: State
    ctx: ClientContext
    minibatches: Minibatches
    seed: int
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's local training.

    Attributes:
        client: Its id.
        received: The state that the server sent.
        w: Local weights after the last step, ``(d,)``.
        upload: Its upload, by name.
        state: The state that it keeps.
        loss: Mean over the steps of the local objective at the first point where a step evaluates its gradient, a
            scalar tensor: the unperturbed weights, or the ascent point where the ascent takes no gradient of it.
        ctx: Its context.
        finite: Whether all that it uploads and keeps is finite, a scalar tensor.
        buffers: The net's buffers after the last step, ``(b,)``, if it has any.
    """

    client: int
    received: State
    w: Tensor
    upload: Upload
    state: State
    loss: Tensor
    ctx: ClientContext
    finite: Tensor
    buffers: Tensor | None = None


def changed(objective: LocalObjective, settings: Mapping[str, float | Tensor]) -> LocalObjective:
    """Returns an objective that shares everything with another one but some settings, by name as in `Job`."""
    objective = copy(objective)
    parts: dict[str, Any] = {"": objective}
    for name, value in settings.items():
        part, _, attribute = name.rpartition(".")
        if part not in parts:
            parts[part] = copy(getattr(objective, part))
            setattr(objective, part, parts[part])
        setattr(parts[part], attribute, value)
    return objective


class Engine:
    """Runs local training. All engines run the same hooks and give the same numbers, up to rounding.

    Args:
        objective: The local objective, on its device and in its precision.
        net: The flat view of the objective's net; training leaves it at other weights.
        autocast: Context for forward passes.
    """

    name = "sequential"

    def __init__(self, objective: LocalObjective, net: FlatNet, autocast: Autocast) -> None:
        self.objective, self.net, self.autocast = objective, net, autocast

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        """Trains each client; yields the results one by one, in the order of ``jobs``."""
        raise NotImplementedError

    def context(self, job: Job) -> ClientContext:
        """The context that the hooks see: with the client's class counts if the objective uses them."""
        if not self.objective.uses_class_counts:
            return job.ctx
        counts = job.minibatches.source.class_counts(job.client)
        return replace(job.ctx, class_counts=counts.to(job.received.w))

    def train_mode(self) -> None:
        """Puts a net in eval mode into train mode; in a net in train mode, submodules in eval mode stay there."""
        if not self.objective.net.training:
            self.objective.net.train()

    @contextmanager
    def using(self, settings: Mapping[str, float | Tensor]) -> Iterator[None]:
        """Trains with other settings: floats, or ``(clients, 1)``."""
        objective = self.objective
        try:
            if settings:
                self.objective = changed(objective, settings)
            yield
        finally:
            self.objective = objective
