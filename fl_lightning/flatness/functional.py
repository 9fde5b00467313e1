"""The data loss F(w), its gradient, and its value at many points, as functions of the flat weights.

F is the sample-weighted mean of ``loss(model(x), y)`` over all samples, whatever the batch sizes, in eval mode and in
the model's own dtype (an active autocast is switched off). The model is never written to: weights, gradients, modes
and the global random state keep their values.

Several processes may share the samples: each calls the same function with its own batches (or none) and the same
``reduce``, and all get the value over all samples.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core import (
    FlatSpec,
    Inputs,
    accumulator_dtype,
    call_at,
    ensure,
    eval_mode,
    map_tensors,
    matching,
    places,
    plain_recurrence,
    while_at,
)

T = TypeVar("T")

Batch = tuple[Inputs, Tensor]
"""Samples and targets."""

Batches = Callable[[], Iterable[Batch]] | Iterable[Batch]
"""The data: a list of batches, or a function that returns them, called once per pass.

Every pass must give the same samples (no augmentation, no drop_last).
"""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Per-sample losses: ``loss(logits, target)`` of shape ``(n,)``, e.g. ``nn.CrossEntropyLoss(reduction="none")``."""

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over the processes that share the samples; may change its argument in place."""

Progress = Callable[[int, int], None]
"""Called with the number done so far and the maximum: of products with a vector, or of points of a landscape."""


@dataclass(frozen=True)
class Estimate:
    """A mean of random draws.

    Attributes:
        value: The mean.
        error: Its standard error; NaN if there is a single draw.
        samples: Number of draws; of a trace or a moment, number of products with the matrix.
    """

    value: float
    error: float
    samples: int


def check_running(model: nn.Module) -> None:
    """Checks that a network gives a sample the same output in every batch.

    Raises:
        UserError: If it has BatchNorm without running statistics.
    """
    ensure(
        not any(isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules()),
        f"model: {type(model).__name__} has BatchNorm without running statistics, so that the loss depends on how the "
        "data are divided into batches; set track_running_stats",
    )


class LossAt:
    """The data loss F at fixed flat weights, as a function of all weights or of those of some parameters.

    Args:
        model: The network; its buffers and frozen parameters are used as they are.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights, ``(d,)``; by default a copy of the model's own, taken now.
        parameters: Names of the parameters that F is a function of, with ``*``, ``?`` and ``[...]`` as in a shell
            (`fnmatch`): ``["head.*", "*.bias"]`` takes every parameter that matches one of them. The others stay
            constant. None: all.
        reduce: Sums over the processes; every process must call. None: this process has all samples.

    Attributes:
        w: The weights that F is a function of, ``(d,)``, in the order of ``named_parameters()``: a leaf that shares no
            memory with the model.
        names: The parameters that they belong to.

    Raises:
        UserError: If a pattern matches no trainable parameter, ``at`` has another size, ``batches`` can be read only
            once, or the network normalizes each batch by its own statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        at: Tensor | None = None,
        *,
        parameters: Sequence[str] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        self.model, self.loss, self.batches, self.reduce = model, loss, passes(batches), reduce
        self._places = places(model)
        spec = FlatSpec(model)
        own_weights = spec.vector(model)
        ensure(
            at is None or at.shape == (spec.d,),
            f"at: {() if at is None else tuple(at.shape)} does not fit {type(model).__name__}, which has ({spec.d},)",
        )
        check_running(model)
        self.names = spec.names if parameters is None else matching(spec.names, parameters)
        with torch.inference_mode(False):  # an inference tensor cannot require gradients
            w = (own_weights if at is None else at.to(own_weights)).detach().clone()
            parts = spec.split(w)
            self._shapes = [parts[name].shape for name in self.names]
            self._constant = {name: part for name, part in parts.items() if name not in self.names}
            self.w = torch.cat([parts[name].reshape(-1) for name in self.names]).requires_grad_()

    def scores(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses of a batch, ``(n,)``, and the network's outputs.

        Raises:
            UserError: If ``loss`` does not return one value per sample.
        """
        x, y = map_tensors(lambda v: v.to(self.w.device), x), y.to(self.w.device)
        outputs = call_at(self.model, self._weights(), x, self._places)
        losses = self.loss(outputs, y)
        ensure(
            losses.shape == (len(y),),
            f"loss: gives {tuple(losses.shape)}, not one value per sample; use reduction='none'",
        )
        return losses, outputs

    def _weights(self) -> dict[str, Tensor]:
        parts = torch.split(self.w, [shape.numel() for shape in self._shapes])
        return self._constant | {n: p.view(s) for n, p, s in zip(self.names, parts, self._shapes, strict=True)}

    def within(self, do: Callable[[], T]) -> T:
        """Returns what a function returns that is called while the network has these weights.

        Backward passes are made in it: those of a checkpoint of activations call parts of the network again.
        """
        return while_at(self.model, self._weights(), self._places, do)

    def padding(self) -> Tensor:
        """Returns which weights are the embedding of a padding, to which torch gives no gradient, ``(d,)``."""
        marks = {
            name: torch.zeros(shape, dtype=torch.bool) for name, shape in zip(self.names, self._shapes, strict=True)
        }
        owners = Counter(id(p) for module in self.model.modules() for p in module.parameters(recurse=False))
        for prefix, module in self.model.named_modules():
            name = f"{prefix}.weight".lstrip(".")
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and name in marks:
                marks[name][module.padding_idx] = owners[id(module.weight)] == 1  # else the gradient of the other's use
        return torch.cat([mark.reshape(-1) for mark in marks.values()]).to(self.w.device)

    def slope(self) -> tuple[Tensor, int]:
        """Returns the gradient of the sum of this process's losses, ``(d,)``, and the number of its samples."""
        total, n = torch.zeros_like(self.w), 0
        for x, y in self.batches():
            losses, _ = self.scores(x, y)
            if losses.requires_grad:  # it has none where it does not depend on the weights
                losses.sum().backward()  # type: ignore[no-untyped-call] # a checkpoint may refuse torch.autograd.grad
            if self.w.grad is not None:
                total, self.w.grad = total + self.w.grad, None
            n += len(losses)
        return total, n

    def total(self, mine: Tensor) -> Tensor:
        """Returns the sum of a tensor over the processes."""
        return mine if self.reduce is None else self.reduce(mine)

    def samples(self, mine: int) -> int:
        """Returns the number of samples of all processes.

        Raises:
            UserError: If there is none.
        """
        return _some(int(self.total(torch.tensor(mine, device=self.w.device))))


def mean_loss(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> float:
    """Returns F(w) = 1/n Σ loss(model(x_i), y_i).

    Args:
        model: The network; its buffers and frozen parameters are used as they are.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights w, ``(d,)``; by default the model's own.
        reduce: Sums over the processes; every process must call. None: this process has all samples.

    Returns:
        The mean loss, summed in float64 (float32 on MPS).

    Raises:
        UserError: If there is no sample, or if ``loss`` does not return one value per sample.
    """
    at = FlatSpec(model).vector(model) if at is None else at
    return mean_losses(model, loss, batches, at[None], reduce=reduce)[0].item()


def mean_losses(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor,
    *,
    reduce: Reduce | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns F(w) and the accuracy at many points, from one pass over the data.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data, as in :func:`mean_loss`.
        at: Flat weights, ``(p, d)``.
        reduce: As in :func:`mean_loss`; called once.
        classes: Number of classes, of a network with more outputs; None: all outputs are classes.

    Returns:
        The mean losses ``(p,)`` and the shares of samples whose largest output is their label's ``(p,)``, float64 on
        the CPU. The accuracy is NaN if the outputs are not scores of classes, ``(n, classes)``.

    Raises:
        UserError: As :func:`mean_loss`.
    """
    points = [LossAt(model, loss, batches, w, reduce=reduce) for w in at]
    device = points[0].w.device
    sums = torch.zeros(2 * len(points) + 1, dtype=accumulator_dtype(device), device=device)
    with measuring(model), torch.no_grad():
        for x, y in points[0].batches():
            scores = [point.scores(x, y) for point in points]
            losses = [values.sum(dtype=sums.dtype) for values, _ in scores]
            correct = [_correct(outputs, y.to(device), classes).to(sums.dtype) for _, outputs in scores]
            sums = sums + torch.stack([*losses, *correct, sums.new_tensor(len(y))])
    sums = points[0].total(sums).cpu().double()
    means = sums[:-1] / _some(int(sums[-1]))
    return means[: len(points)], means[len(points) :]


def gradient(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> Tensor:
    """Returns ∇F(w), ``(d,)``; arguments and errors as in :func:`mean_loss`."""
    f = LossAt(model, loss, batches, at, reduce=reduce)
    with measuring(model):
        total, n = f.within(f.slope)
    return f.total(total) / f.samples(n)


def passes(batches: Batches) -> Callable[[], Iterable[Batch]]:
    """Returns the function that starts a pass over the data.

    Raises:
        UserError: If the data can be read only once.
    """
    if callable(batches):
        return batches
    once = "batches: an iterator can be read only once; give a list, or a function that returns the data at every call"
    ensure(not isinstance(batches, Iterator), once)
    return lambda: batches


def batch_sizes(batches: Batches) -> list[int]:
    """Returns the number of samples of each batch."""
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a base seed in every pass
        return [len(y) for _, y in passes(batches)()]


@contextmanager
def arithmetic(device: torch.device) -> Iterator[None]:
    """Enables gradients and disables autocast, whatever is active outside."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def measuring(model: nn.Module, fused: bool = False) -> Iterator[None]:
    """Enters eval mode and :func:`arithmetic`; restores the modes and the global random state.

    Args:
        model: The network.
        fused: Whether its attention may be fused, which has no second derivative.
    """
    with (
        eval_mode(model),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws a base seed in every pass
        arithmetic(next(model.parameters()).device),
        nullcontext() if fused else sdpa_kernel(SDPBackend.MATH),
        plain_recurrence(model),
    ):
        yield


def _correct(outputs: Tensor, y: Tensor, classes: int | None) -> Tensor:
    """Returns the number of samples that are classified correctly; NaN if the outputs are not scores of classes."""
    if outputs.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return torch.full((), math.nan, device=outputs.device)
    return (outputs[:, :classes].argmax(1) == y).sum()


def vjp(
    y: Tensor, w: Tensor, v: Tensor | None = None, *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """Returns vᵀ ∂y/∂w; zero where y does not depend on w, as the gradient of a linear loss does not."""
    if not y.requires_grad:
        return torch.zeros_like(w)
    return torch.autograd.grad(
        y, w, v, create_graph=create_graph, retain_graph=create_graph or retain_graph, materialize_grads=True
    )[0]


def _some(n: int) -> int:
    ensure(n != 0, "batches: no sample; give a function that returns the data at every call")
    return n
