"""The data loss F(w), its gradient and its Hessian as functions of the flat weights.

F is the sample-weighted mean of ``loss(model(x), y)`` over all samples, whatever the batch sizes, in eval mode and in
the model's own dtype (an active autocast is switched off). The model is never written to: weights, gradients, modes
and the global random state are afterwards what they were.

Many processes may share the work: each calls the same function with batches of its own (or none) and the same
``reduce``, and all get the value over all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import FlatSpec
from fl_lightning.flatness.convolution import ConstantInputs

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Called once for every pass over the data; must give the same samples each time (no augmentation, no drop_last)."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Per-sample losses: ``loss(logits, target)`` of shape ``(n,)``, e.g. ``nn.CrossEntropyLoss(reduction="none")``."""

Reduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over the processes that share the samples, on each of them; it may change its argument."""

Progress = Callable[[int, int], None]
"""Told again and again how much is done, and of how much at most: products with a vector, or points of a landscape."""


@dataclass(frozen=True)
class Estimate:
    """A mean of random draws.

    Attributes:
        value: The mean.
        error: Its standard error.
        samples: Number of draws, for a trace that of Hessian-vector products.
    """

    value: float
    error: float
    samples: int


KEEP_BYTES = 2**30
""":func:`hvp` keeps the graph of the gradient by default if it takes no more memory: 1,600 images for `HsuCNN`."""


def mean_loss(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> float:
    """F(w) = 1/n Σ loss(model(x_i), y_i).

    Args:
        model: The network; buffers and frozen parameters are its own.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        at: Flat weights ``(d,)`` to measure at; by default the model's own.
        reduce: Sums up over the processes; every process must call. None: this process has all samples.

    Returns:
        The mean loss, summed up in float64.

    Raises:
        UserError: If there is no sample, or if ``loss`` does not return one value per sample.
    """
    point = _Point(model, loss, at)
    total, n = torch.zeros((), dtype=torch.float64, device=point.w.device), 0
    with _measuring(model), torch.no_grad():
        for x, y in batches():
            losses = point.losses(x, y)
            total, n = total + losses.sum(dtype=torch.float64), n + len(losses)
    return _summed(total, reduce).item() / _samples(n, total, reduce)


def mean_losses(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor, *, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """F(w) and the accuracy at many points in one pass over the data.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data, as in :func:`mean_loss`.
        at: Flat weights, ``(p, d)``.
        reduce: As in :func:`mean_loss`; it is called once.

    Returns:
        The mean losses ``(p,)`` and the shares of samples whose largest output is their label's ``(p,)``, both float64
        and on the CPU. The accuracy is NaN if the outputs are not scores of classes, ``(n, classes)``.

    Raises:
        UserError: As :func:`mean_loss`.
    """
    points = [_Point(model, loss, w) for w in at]
    total = torch.zeros(2 * len(points) + 1, dtype=torch.float64, device=points[0].w.device)
    with _measuring(model), torch.no_grad():
        for x, y in batches():
            scores = [point.scores(x, y) for point in points]
            sums = [losses.sum(dtype=torch.float64) for losses, _ in scores]
            right = [_right(outputs, y.to(total.device)) for _, outputs in scores]
            total += torch.stack([*sums, *right, total.new_tensor(len(x))])
    total = _summed(total, reduce).cpu()
    means = total[:-1] / _samples(int(total[-1]), total, None)
    return means[: len(points)], means[len(points) :]


def gradient(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> Tensor:
    """∇F(w), shape ``(d,)``; arguments and errors as in :func:`mean_loss`."""
    point = _Point(model, loss, at)
    total, n = torch.zeros_like(point.w), 0
    with _measuring(model):
        for x, y in batches():
            losses = point.losses(x, y)
            total, n = total + _grad(losses.sum(), point.w), n + len(losses)
    return _summed(total, reduce) / _samples(n, total, reduce)


def hvp(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
) -> Callable[[Tensor], Tensor]:
    """Exact Hessian-vector products v -> ∇²F(w) v by double backprop (Pearlmutter 1994).

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data, as in :func:`mean_loss`.
        at: Flat weights ``(d,)``; by default a copy of the model's own, taken now.
        keep_graph: Keep the graph of ∇F over these batches in memory, so that a product costs one backward only. By
            default if they are a single one, or if the graph takes no more than ``KEEP_BYTES``, judged by that of the
            first batch; each process decides for itself.
        reduce: As in :func:`mean_loss`; it is called once in every product, too.

    Returns:
        A function from ``(d,)`` to ``(d,)``, both in the model's dtype. It holds the graph as long as it lives.

    Raises:
        UserError: As :func:`mean_loss`.
    """
    point = _Point(model, loss, at)
    sizes = batch_sizes(batches)
    n = _samples(sum(sizes), point.w, reduce)

    def shares() -> Iterator[Tensor]:
        """Each batch's share of ∇F, differentiable."""
        for x, y in batches():
            with ConstantInputs():
                loss = point.losses(x, y).sum() / n
            yield _grad(loss, point.w, create_graph=True)

    kept: list[Tensor] = []
    if sizes and keep_graph is not False:
        with _measuring(model):
            rest, saved = shares(), _Saved()
            with saved:
                kept = [next(rest)]
            fits = len(sizes) == 1 or saved.bytes * sum(sizes) <= KEEP_BYTES * sizes[0]
            kept = [*kept, *rest] if keep_graph or fits else []

    def product(v: Tensor) -> Tensor:
        total, v = torch.zeros_like(point.w), v.to(point.w)
        with arithmetic(total.device) if kept else _measuring(model):
            for share in kept or shares():
                total = total + _grad(share, point.w, v, retain_graph=bool(kept))
        return _summed(total, reduce)

    return product


def batch_sizes(batches: Batches) -> list[int]:
    """Samples in each batch."""
    with _same_random_state():
        return [len(x) for x, _ in batches()]


class _Point:
    """The network at fixed flat weights ``w``, a leaf of the graph that shares no memory with the model."""

    def __init__(self, model: nn.Module, loss: Loss, at: Tensor | None) -> None:
        self.model, self.loss, self.spec = model, loss, FlatSpec(model)
        own = self.spec.vector(model)
        with torch.inference_mode(False):  # an inference tensor could not require gradients
            self.w = (own if at is None else at.to(own)).detach().clone().requires_grad_()

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scores(x, y)[0]

    def scores(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The losses ``(n,)`` and the network's outputs."""
        x, y = x.to(self.w.device), y.to(self.w.device)
        outputs = torch.func.functional_call(self.model, self.spec.split(self.w), (x,))
        losses = self.loss(outputs, y)
        if losses.shape != (len(x),):
            raise UserError(f"loss: gives {tuple(losses.shape)}, not one value per sample; use reduction='none'")
        return losses, outputs


def _right(outputs: Tensor, y: Tensor) -> Tensor:
    """How many samples are classified rightly, float64; NaN if the outputs are not scores of classes."""
    if outputs.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return torch.full((), math.nan, dtype=torch.float64, device=outputs.device)
    return (outputs.argmax(1) == y).sum(dtype=torch.float64)


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Within it, the memory is counted that the graph holds on to."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Eval mode and exact arithmetic; modes and global random state are restored."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    try:
        model.eval()
        with (
            _same_random_state(),
            arithmetic(device),
            sdpa_kernel(SDPBackend.MATH),  # fused attention has no second derivative
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def arithmetic(device: torch.device) -> Iterator[None]:
    """Gradients can be taken, and an active autocast rounds nothing."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


def _same_random_state() -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[])  # a DataLoader draws a base seed in every pass


def _grad(
    y: Tensor, w: Tensor, v: Tensor | None = None, *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """vᵀ ∂y/∂w, also where y is constant in w (a linear loss has a constant gradient)."""
    if not y.requires_grad:
        return torch.zeros_like(w)
    retain = create_graph or retain_graph
    (g,) = torch.autograd.grad(y, w, v, create_graph=create_graph, retain_graph=retain, materialize_grads=True)
    return g


def _summed(mine: Tensor, reduce: Reduce | None) -> Tensor:
    return mine if reduce is None else reduce(mine)


def _samples(mine: int, like: Tensor, reduce: Reduce | None) -> int:
    """Number of samples of all processes; it is reduced on the device of ``like``."""
    n = mine if reduce is None else int(reduce(torch.tensor(mine, device=like.device)))
    if n == 0:
        raise UserError("batches: no sample; give a function that returns the data anew in every call")
    return n
