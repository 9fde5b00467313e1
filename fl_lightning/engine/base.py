"""What every engine takes and gives: a client's job, and what its local training gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import buffers
from fl_lightning.core.flat import FlatNet
from fl_lightning.core.state import ClientContext, State, Upload
from fl_lightning.data.minibatches import Minibatches

COLUMNS = ("lr", "K", "k_lr", "n_k", "n_mean")
"""What differs between the contexts of a cohort's clients."""
Autocast = Callable[[], AbstractContextManager[object]]
"""Context for forward passes: ``fabric.autocast``."""


@dataclass(frozen=True)
class Job:
    """One client's local training in one phase.

    Attributes:
        client: Its id.
        state: Its state.
        received: What the server sent.
        ctx: Where the round stands.
        minibatches: Its data, one minibatch a step.
        seed: For what the net draws itself, such as dropout.
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
    """What one client's local training gave.

    Attributes:
        client: Its id.
        received: What the server sent.
        w: Local weights after the last step, ``(d,)``.
        upload: What it uploads, by name.
        state: The state that it keeps.
        loss: Mean over the steps of the local objective where a step first asks for a gradient, a scalar tensor: at the
            unperturbed weights, but for LESAM and S~AM at the ascent point.
        ctx: The context it trained in.
        finite: Whether all that it sends and keeps is finite.
        buffers: The net's buffers after the last step, ``(b,)``, if it has any.
    """

    client: int
    received: State
    w: Tensor
    upload: Upload
    state: State
    loss: Tensor
    ctx: ClientContext
    finite: bool
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
        autocast: Context for forward passes.

    Attributes:
        net: The flat view of the objective's net. Its weights are scratch: wherever the last pass left them.
    """

    name = "sequential"

    def __init__(self, objective: LocalObjective, autocast: Autocast) -> None:
        self.objective, self.autocast = objective, autocast
        self.net = FlatNet(objective.net)

    def train(self, jobs: Sequence[Job]) -> Iterator[LocalResult]:
        """Local training of each client, in the order of ``jobs``."""
        raise NotImplementedError

    @contextmanager
    def _with(self, settings: Mapping[str, float | Tensor]) -> Iterator[None]:
        """Trains with other settings: floats, or ``(clients, 1)``."""
        objective = self.objective
        try:
            if settings:
                self.objective = changed(objective, settings)
            yield
        finally:
            self.objective = objective

    @torch.no_grad()
    def logits(self, w: Tensor, x: Tensor, by_batch: bool = False) -> Tensor:
        """The net's output at weights ``w`` in eval mode; the mode is restored.

        Args:
            w: Weights, ``(d,)``.
            x: Samples.
            by_batch: Normalise by the batch's statistics where the net keeps running ones.
        """
        net = self.objective.net
        training = net.training
        self.net.move_to(w)
        net.eval()
        with self.autocast(), buffers.by_batch(net) if by_batch else nullcontext():
            out: Tensor = net(x)
        net.train(training)
        return out
