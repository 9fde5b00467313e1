"""The data loss F(w), its gradient and its Hessian as functions of the flat weights.

F is the sample-weighted mean of ``loss(model(x), y)`` over all samples, whatever the batch sizes, in eval mode and in
the model's own dtype (an active autocast is switched off). The model is never written to: weights, gradients, modes
and the global random state keep their values.

Several processes may share the samples: each calls the same function with its own batches (or none) and the same
``reduce``, and all get the value over all samples.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Unpack

from fl_lightning.core import FlatSpec, accumulator_dtype, ensure, eval_mode
from fl_lightning.flatness.convolution import ConstantInputs

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Called once per pass over the data; must give the same samples each time (no augmentation, no drop_last)."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Per-sample losses: ``loss(logits, target)`` of shape ``(n,)``, e.g. ``nn.CrossEntropyLoss(reduction="none")``."""

Reduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over the processes that share the samples, on each of them; may change its argument in place."""

Progress = Callable[[int, int], None]
"""Called with the number done so far and the maximum: of products with a vector, or of points of a landscape."""


class Options(TypedDict, total=False):
    """Keywords of all measurements of the Hessian; :class:`LossAt` describes them."""

    keep_graph: bool | None
    reduce: Reduce | None
    progress: Progress | None


@dataclass(frozen=True)
class Estimate:
    """A mean of random draws.

    Attributes:
        value: The mean.
        error: Its standard error.
        samples: Number of draws; for a trace, of Hessian-vector products.
    """

    value: float
    error: float
    samples: int


KEEP_BYTES = 2**30
"""By default :func:`hvp` keeps the graph of the gradient up to this size: 1,600 images for `HsuCNN`."""


class LossAt:
    """The data loss F at fixed flat weights w, and how it is computed.

    Args:
        model: The network; its buffers and frozen parameters are used as they are.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights w, ``(d,)``; by default a copy of the model's own, taken now.
        keep_graph: Keep the graph of ∇F over these batches in memory, so that a Hessian-vector product costs one
            backward only. By default if there is a single batch, or if the graph takes at most ``KEEP_BYTES``,
            judged by that of the first batch; each process decides for itself.
        reduce: Sums over the processes; every process must call. None: this process has all samples.
        progress: Called after each Hessian-vector product.

    Attributes:
        w: The weights, ``(d,)``, a leaf that shares no memory with the model.
        spec: Their layout.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        at: Tensor | None = None,
        *,
        keep_graph: bool | None = None,
        reduce: Reduce | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.loss, self.batches, self.spec = model, loss, batches, FlatSpec(model)
        self.keep_graph, self.reduce, self.progress = keep_graph, reduce, progress
        own = self.spec.vector(model)
        with torch.inference_mode(False):  # an inference tensor cannot require gradients
            self.w = (own if at is None else at.to(own)).detach().clone().requires_grad_()

    def scores(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of a batch, ``(n,)``, and the network's outputs.

        Raises:
            UserError: If ``loss`` does not return one value per sample.
        """
        x, y = x.to(self.w.device), y.to(self.w.device)
        outputs = torch.func.functional_call(self.model, self.spec.split(self.w), (x,))
        losses = self.loss(outputs, y)
        ensure(
            losses.shape == (len(x),),
            f"loss: gives {tuple(losses.shape)}, not one value per sample; use reduction='none'",
        )
        return losses, outputs

    def total(self, mine: Tensor) -> Tensor:
        """Sum of a tensor over the processes."""
        return mine if self.reduce is None else self.reduce(mine)

    def samples(self, mine: int) -> int:
        """Number of samples of all processes.

        Raises:
            UserError: If there is none.
        """
        return _some(mine if self.reduce is None else int(self.reduce(torch.tensor(mine, device=self.w.device))))

    def hvp(self) -> Callable[[Tensor], Tensor]:
        """See :func:`hvp`."""
        sizes = batch_sizes(self.batches)
        n = self.samples(sum(sizes))

        def shares() -> Iterator[Tensor]:
            """Each batch's share of ∇F, differentiable."""
            for x, y in self.batches():
                with ConstantInputs():
                    loss = self.scores(x, y)[0].sum() / n
                yield _grad(loss, self.w, create_graph=True)

        kept: list[Tensor] = []
        if sizes and self.keep_graph is not False:
            with _measuring(self.model):
                rest, saved = shares(), _Saved()
                with saved:
                    kept = [next(rest)]
                fits = len(sizes) == 1 or saved.bytes * sum(sizes) <= KEEP_BYTES * sizes[0]
                kept = [*kept, *rest] if self.keep_graph or fits else []

        def product(v: Tensor) -> Tensor:
            total, v = torch.zeros_like(self.w), v.to(self.w)
            with arithmetic(total.device) if kept else _measuring(self.model):
                for share in kept or shares():
                    total = total + _grad(share, self.w, v, retain_graph=bool(kept))
            return self.total(total)

        return product


def mean_loss(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> float:
    """F(w) = 1/n Σ loss(model(x_i), y_i).

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
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor, *, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """F(w) and the accuracy at many points in one pass over the data.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data, as in :func:`mean_loss`.
        at: Flat weights, ``(p, d)``.
        reduce: As in :func:`mean_loss`; called once.

    Returns:
        The mean losses ``(p,)`` and the shares of samples whose largest output is their label's ``(p,)``, float64 on
        the CPU. The accuracy is NaN if the outputs are not scores of classes, ``(n, classes)``.

    Raises:
        UserError: As :func:`mean_loss`.
    """
    points = [LossAt(model, loss, batches, w, reduce=reduce) for w in at]
    device = points[0].w.device
    sums = torch.zeros(2 * len(points) + 1, dtype=accumulator_dtype(device), device=device)
    with _measuring(model), torch.no_grad():
        for x, y in batches():
            scores = [point.scores(x, y) for point in points]
            losses = [values.sum(dtype=sums.dtype) for values, _ in scores]
            correct = [_correct(outputs, y.to(device)).to(sums.dtype) for _, outputs in scores]
            sums = sums + torch.stack([*losses, *correct, sums.new_tensor(len(x))])
    sums = points[0].total(sums).cpu().double()
    means = sums[:-1] / _some(int(sums[-1]))
    return means[: len(points)], means[len(points) :]


def gradient(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, *, reduce: Reduce | None = None
) -> Tensor:
    """∇F(w), shape ``(d,)``; arguments and errors as in :func:`mean_loss`."""
    f = LossAt(model, loss, batches, at, reduce=reduce)
    total, n = torch.zeros_like(f.w), 0
    with _measuring(model):
        for x, y in batches():
            losses, _ = f.scores(x, y)
            total, n = total + _grad(losses.sum(), f.w), n + len(losses)
    return f.total(total) / f.samples(n)


def hvp(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, **options: Unpack[Options]
) -> Callable[[Tensor], Tensor]:
    """Exact Hessian-vector products v -> ∇²F(w) v by double backward (Pearlmutter 1994).

    Args:
        model: The network, and so on as for :class:`LossAt`.
        loss: Per-sample losses.
        batches: The data.
        at: Flat weights w, ``(d,)``; by default a copy of the model's own, taken now.
        **options: ``keep_graph`` and ``reduce`` of :class:`LossAt`; ``reduce`` is called once in every product.

    Returns:
        A function from ``(d,)`` to ``(d,)``, both in the model's dtype. It holds the graph as long as it lives.

    Raises:
        UserError: As :func:`mean_loss`.
    """
    return LossAt(model, loss, batches, at, **options).hvp()


def batch_sizes(batches: Batches) -> list[int]:
    """Number of samples of each batch."""
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a base seed in every pass
        return [len(x) for x, _ in batches()]


@contextmanager
def arithmetic(device: torch.device) -> Iterator[None]:
    """Enables gradients and disables autocast, whatever is active outside."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that the graph saves for backward while this is active."""

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
    """Eval mode and exact arithmetic; restores the modes and the global random state."""
    with (
        eval_mode(model),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws a base seed in every pass
        arithmetic(next(model.parameters()).device),
        sdpa_kernel(SDPBackend.MATH),  # fused attention has no second derivative
    ):
        yield


def _correct(outputs: Tensor, y: Tensor) -> Tensor:
    """Number of samples that are classified correctly; NaN if the outputs are not scores of classes."""
    if outputs.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return torch.full((), math.nan, device=outputs.device)
    return (outputs.argmax(1) == y).sum()


def _grad(
    y: Tensor, w: Tensor, v: Tensor | None = None, *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """vᵀ ∂y/∂w, also where y is constant in w (a linear loss has a constant gradient)."""
    if not y.requires_grad:
        return torch.zeros_like(w)
    retain = create_graph or retain_graph
    (g,) = torch.autograd.grad(y, w, v, create_graph=create_graph, retain_graph=retain, materialize_grads=True)
    return g


def _some(n: int) -> int:
    ensure(n != 0, "batches: no sample; give a function that returns the data at every call")
    return n
