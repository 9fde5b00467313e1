"""Matrices of curvature of the data loss F at fixed weights, given by their products with vectors.

Each is of all weights, or of those of a group of parameters: then it is the diagonal block of that group.

| | matrix, ``(d, d)`` | |
|---|---|---|
| `hessian` | H = ∇²F(w) | by double backward (Pearlmutter 1994) |
| `gauss_newton` | G = 1/n Σ_i J_iᵀ ∇²ℓ_i J_i | J_i = ∂z_i/∂w; ∇²ℓ_i of the loss with respect to the outputs z_i |
| `finite_differences` | H, by differences of gradients | for nets without second derivatives |
| `fisher` | E = 1/n Σ_i g_i g_iᵀ | g_i, the gradient of the loss of sample i: the empirical Fisher matrix |

All products but those by differences are exact. H = G where the outputs are linear in the weights. G is positive
semi-definite if the loss is convex in the outputs, and E always is. E is not the Fisher matrix of the model: that one
draws the targets from the model's own predictions, and equals G for the cross-entropy (Kunstner et al., NeurIPS 2019).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_lightning.core import ensure, grouped, require
from fl_lightning.flatness.functional import Batches, Loss, LossAt, Reduce, batch_sizes, measuring, vjp

Settings = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation, groups."""


class ConstantInputs(TorchFunctionMode):
    """While it is active, ``conv2d`` of an input that requires no gradient is :class:`_Convolution`.

    Weight normalisation is written out: the second derivative of torch's own is wrong.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._weight_norm and not kwargs:
            v, scale, dim = (*args, 0)[:3]
            others = [i for i in range(v.ndim) if dim == -1 or i != dim]  # -1: one norm of all
            return v * (scale / torch.linalg.vector_norm(v, dim=others, keepdim=True))
        by_place = func is torch.conv2d and not kwargs and len(args) == 7  # as nn.Conv2d calls it
        if by_place and not isinstance(args[4], str):  # padding can be "same"
            x, weight, bias, *sizes, groups = args
            if x.ndim == 4 and not x.requires_grad and weight.requires_grad:
                return _Convolution.apply(x, weight, bias, (*map(_pair, sizes), groups))
        return func(*args, **(kwargs or {}))


def _pair(size: int | Sequence[int]) -> Sequence[int]:
    """Returns the sizes in both directions of what may be one number for both."""
    sizes = size if isinstance(size, Sequence) else (size,)
    return sizes if len(sizes) == 2 else (*sizes, *sizes)


class _Convolution(torch.autograd.Function):
    """The map of weight and bias, (W, b) -> x * W + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return torch.conv2d(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        of_bias = g[0].sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return None, _Adjoint.apply(g[0], *ctx.saved_tensors, ctx.settings), of_bias, None


class _Adjoint(torch.autograd.Function):
    """The adjoint of W -> x * W; of the weight only the shape matters."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        of_weight = [False, True, False]
        grads: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, dilation, False, [0, 0], groups, of_weight
        )
        return grads[1]

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return torch.conv2d(x, v[0], None, *ctx.settings), None, None, None


KEEP_BYTES = 2**30
"""By default an operator keeps the graphs of its batches up to this size: 1,600 images for `HsuCNN`."""

Kind = Literal["hessian", "gauss_newton", "fisher", "finite_differences"]

Share = Callable[[Tensor, bool], Tensor]
"""One batch's share of the product with v: ``share(v, retain)``; it can be called again after ``retain=True``."""

Linearize = Callable[[Tensor, Tensor, Tensor, int], Share]
"""A batch's share from its losses ``(n,)``, its outputs, the weights, and the number of samples of all batches."""


class Options(TypedDict, total=False):
    """Keywords of all operators; :class:`Operator` and :class:`~fl_lightning.flatness.LossAt` describe them."""

    parameters: Sequence[str] | None
    keep_graph: bool | None
    reduce: Reduce | None


class Operator:
    """A symmetric matrix of curvature; ``A @ v`` is its product with ``v``, ``(d,)`` or ``(d, k)``.

    :func:`hessian`, :func:`gauss_newton` and :func:`fisher` make one. It is fixed to the weights at which it was made.

    Args:
        linearize: Returns the share of a batch.
        model: The network, and so on as for :class:`~fl_lightning.flatness.LossAt`.
        loss: Per-sample losses.
        batches: The data.
        at: Flat weights of the whole network; by default a copy of the model's own, taken now.
        keep_graph: Keep the graphs of all batches in memory as long as the operator lives, so that a product needs no
            forward pass. By default if there is a single batch, or if the graphs take at most ``KEEP_BYTES``, judged by
            that of the first batch; each process decides for itself. Products are the same bit for bit.
        **options: ``parameters`` and ``reduce`` of :class:`~fl_lightning.flatness.LossAt`; ``reduce`` is called once in
            every product.

    Attributes:
        f: The loss at these weights.
        shape: ``(d, d)``, d the number of weights of the group.
        dtype: The model's dtype.
        device: The model's device.
        kept_bytes: Memory of the graphs that it keeps, judged by that of the first batch.

    Raises:
        UserError: If there is no sample, ``loss`` does not return one value per sample, or a pattern of ``parameters``
            matches nothing.
    """

    def __init__(
        self,
        linearize: Linearize,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        at: Tensor | None = None,
        *,
        keep_graph: bool | None = None,
        **options: Any,
    ) -> None:
        self.f, self._linearize = LossAt(model, loss, batches, at, **options), linearize
        w = self.f.w
        self.shape, self.dtype, self.device = (len(w), len(w)), w.dtype, w.device
        self.kept_bytes = 0
        sizes = batch_sizes(self.f.batches)
        self._n = self.f.samples(sum(sizes))
        self._kept: list[Share] = []
        if sizes and keep_graph is not False:
            with measuring(model):
                self.f.within(lambda: self._keep(sizes, bool(keep_graph)))

    def _keep(self, sizes: Sequence[int], always: bool) -> None:
        saved: dict[int, int] = {}  # memory of the first graph, by address

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        rest = self._shares()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            first = next(rest)
        needed = sum(saved.values()) * sum(sizes) // sizes[0]
        if always or len(sizes) == 1 or needed <= KEEP_BYTES:
            self._kept, self.kept_bytes = [first, *rest], needed

    def drop_graphs(self) -> None:
        """Frees the graphs; each product makes them again."""
        self._kept, self.kept_bytes = [], 0

    def _shares(self) -> Iterator[Share]:
        for x, y in self.f.batches():
            with ConstantInputs():
                losses, outputs = self.f.scores(x, y)
            yield self._linearize(losses, outputs, self.f.w, self._n)

    def __matmul__(self, v: Tensor) -> Tensor:
        """Returns the product with a vector ``(d,)``, or with the columns of a matrix ``(d, k)``, in the model's dtype.

        Raises:
            UserError: If ``v`` has another number of rows.
        """
        ensure(v.shape[:1] == self.shape[:1], f"v: {tuple(v.shape)} does not fit a matrix {self.shape}")
        if v.ndim == 2:
            return torch.stack([self @ column for column in v.T], dim=1)
        return self._product(v)

    def _product(self, v: Tensor) -> Tensor:
        """Returns the product with a vector ``(d,)``."""
        with measuring(self.f.model):
            return self.f.total(self.f.within(lambda: self._mine(v.to(self.f.w))))

    def _mine(self, v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for share in self._kept or self._shares():
            total = total + share(v, bool(self._kept))
        return total

    def agreed(self, stop: bool) -> bool:
        """Returns True on every process if any of them votes to stop; rounding can split them."""
        return bool(self.f.total(self.f.w.new_tensor(stop)) > 0)


class Differences(Operator):
    """The Hessian by central differences: ``H v = (g(w + e v) - g(w - e v)) / 2e`` for a vector v of length 1.

    For nets that have no second derivative, or a slow one: attention may be fused, activations computed again. A
    product takes two gradients and keeps no graph. The error is about e² / 6 times the third derivative of the gradient
    along v, plus rounding, u / e with u the unit roundoff. The embedding of a padding does not move, since it has no
    gradient: else the matrix would not be symmetric.

    That holds for smooth nets. With kinks (ReLU, max-pooling) a difference that crosses some is the curvature of the
    loss smoothed over e, not the Hessian of double backward: see :meth:`halving`.

    Args:
        model: The network, and so on as for :class:`Operator`.
        loss: Per-sample losses.
        batches: The data.
        at: Flat weights of the whole network; by default a copy of the model's own, taken now.
        keep_graph: Without effect.
        step: e; None: ``u^(1/3) max(1, ‖w‖)``.
        **options: As for :class:`Operator`.

    Raises:
        UserError: As for :class:`Operator`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        at: Tensor | None = None,
        *,
        keep_graph: bool | None = None,
        step: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(_hessian, model, loss, batches, at, keep_graph=False, **options)
        roundoff = torch.finfo(self.dtype).eps / 2
        self.step = roundoff ** (1 / 3) * max(1.0, float(self.f.w.detach().norm())) if step is None else step
        self._padding = self.f.padding()

    def _gradient(self, w: Tensor) -> Tensor:
        f = copy(self.f)
        f.w = w.detach().requires_grad_()
        with measuring(f.model, fused=True):
            return f.within(f.slope)[0] / self._n

    def _product(self, v: Tensor) -> Tensor:
        """Returns the product; the rate is that of the difference which rounding of the weights leaves."""
        v, w = v.to(self.f.w).masked_fill(self._padding, 0), self.f.w.detach()
        length = v.norm()
        if not length:
            return torch.zeros_like(w)
        unit = v / length
        after, before = w + self.step * unit, w - self.step * unit
        change = self._gradient(after) - self._gradient(before)
        product: Tensor = self.f.total(change) * (length / ((after - before) @ unit))
        return product

    def halving(self, v: Tensor) -> float:
        """Returns by how much H v moves, relative to its length, where the step is halved.

        More than a few per cent: the product is the curvature of a loss smoothed over the step.

        Args:
            v: A vector, ``(d,)``.
        """
        product, halved = self @ v, copy(self)
        halved.step = self.step / 2
        return float((halved @ v - product).norm() / product.norm().clamp(min=torch.finfo(self.dtype).tiny))


class Mixture:
    """A weighted sum of operators of one shape, such as the curvature of a mean of losses at different points.

    Args:
        operators: The operators, each with its weight.
    """

    def __init__(self, operators: Sequence[tuple[float, Operator]]) -> None:
        self.operators, (_, first) = operators, operators[0]
        self.shape, self.dtype, self.device, self.agreed = first.shape, first.dtype, first.device, first.agreed

    def __matmul__(self, v: Tensor) -> Tensor:
        """Returns the product with a vector ``(d,)``, or with the columns of a matrix ``(d, k)``."""
        return torch.stack([weight * (operator @ v) for weight, operator in self.operators]).sum(0)


def hessian(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, **options: Unpack[Options]
) -> Operator:
    """Returns the Hessian H = ∇²F(w); arguments and errors as for :class:`Operator`.

    Example:
        >>> net, loss = nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none")
        >>> H = hessian(net, loss, [(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))], parameters=["weight"])
        >>> H.shape, (H @ torch.ones(6)).shape
        ((6, 6), torch.Size([6]))
    """
    return Operator(_hessian, model, loss, batches, at, **options)


def gauss_newton(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, **options: Unpack[Options]
) -> Operator:
    """Returns the generalized Gauss-Newton matrix G (Schraudolph 2002); arguments and errors as for :class:`Operator`.

    The outputs z_i are what the network returns, and the loss is a function of them.
    """
    return Operator(_gauss_newton, model, loss, batches, at, **options)


def fisher(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, **options: Unpack[Options]
) -> Operator:
    """Returns the empirical Fisher matrix E; arguments and errors as for :class:`Operator`.

    It is the mean of the outer products of the samples' gradients, at the targets of the data.
    """
    return Operator(_fisher, model, loss, batches, at, **options)


def finite_differences(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    step: float | None = None,
    **options: Unpack[Options],
) -> Differences:
    """Returns the Hessian by differences of gradients; arguments and errors as for :class:`Differences`."""
    return Differences(model, loss, batches, at, step=step, **options)


OPERATORS: dict[Kind, Callable[..., Operator]] = {
    "hessian": hessian, "gauss_newton": gauss_newton, "fisher": fisher, "finite_differences": finite_differences,
}  # fmt: skip


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns names of parameters by layer, in order; the factors of a LoRA adapter belong to the layer it adapts.

    Example:
        >>> layers(["0.weight", "0.bias", "2.weight", "scale"])
        {'0': ['0.weight', '0.bias'], '2': ['2.weight'], 'scale': ['scale']}

    Raises:
        UserError: If something else is given, such as a net.
    """
    value: Any = names
    listed: list[Any] = [*value] if isinstance(value, Iterable) else [value]
    odd = [f"a {type(entry).__name__}" for entry in listed if not isinstance(entry, str)]
    require(not odd, "names", ", ".join(odd[:3]), "give names, as net.named_parameters() has them")
    return grouped(
        (name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0] or name, name) for name in listed
    )


def _hessian(losses: Tensor, outputs: Tensor, w: Tensor, n: int) -> Share:
    slope = vjp(losses.sum() / n, w, create_graph=True)
    return lambda v, retain: vjp(slope, w, v, retain_graph=retain)


def _gauss_newton(losses: Tensor, outputs: Tensor, w: Tensor, n: int) -> Share:
    slope = vjp(losses.sum() / n, outputs, create_graph=True)
    return _between_jacobians(outputs, w, lambda u, retain: vjp(slope, outputs, u, retain_graph=retain))


def _fisher(losses: Tensor, outputs: Tensor, w: Tensor, n: int) -> Share:
    return _between_jacobians(losses, w, lambda u, retain: u / n)


def _between_jacobians(z: Tensor, w: Tensor, middle: Share) -> Share:
    """Returns v -> Jᵀ M J v with J = ∂z/∂w and M the ``middle``."""
    u = torch.zeros_like(z, requires_grad=True)
    pulled = vjp(z, w, u, create_graph=True)  # Jᵀu is linear in u: its transposed derivative is J
    return lambda v, retain: vjp(z, w, middle(vjp(pulled, u, v, retain_graph=retain), retain), retain_graph=retain)
