"""The largest eigenvalues of the Hessian H of the data loss F."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fl_lightning.core import ensure, generator
from fl_lightning.flatness.functional import Batches, Loss, LossAt, Options, arithmetic
from fl_lightning.flatness.krylov import Lanczos, Power

T = TypeVar("T")

Method = Literal["lanczos", "power"]


class SpectrumOptions(Options, total=False):
    """Keywords of :func:`spectrum` that :func:`lambda_max` takes, too."""

    method: Method
    iterations: int | None
    tol: float | None
    basis: int | None
    seed: int


class Interrupted(KeyboardInterrupt, Generic[T]):
    """A measurement was interrupted from the keyboard and holds its partial result.

    Attributes:
        partial: The result of the products computed so far.
    """

    def __init__(self, partial: T) -> None:
        super().__init__()
        self.partial = partial


@contextmanager
def interruptible(partial: Callable[[], T], enough: Callable[[], bool]) -> Iterator[None]:
    """Turns a KeyboardInterrupt into :class:`Interrupted` with the partial result, if there is enough for one."""
    try:
        yield
    except KeyboardInterrupt:
        if not enough():
            raise
        raise Interrupted(partial()) from None


@dataclass(frozen=True, eq=False)
class Eigenpair:
    """An approximate eigenpair (θ, v) of H.

    Attributes:
        value: θ = vᵀHv.
        residual: ‖Hv - θv‖ / |θ|. H has an eigenvalue within ``residual * |value|`` of θ.
        iterations: Number of products computed.
        converged: Whether the stopping rule was met; for the power iteration that alone says little.
        vector: v, unit length, ``(d,)``, in the model's dtype.
    """

    value: float
    residual: float
    iterations: int
    converged: bool
    vector: Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Approximate eigenpairs (θ_i, v_i) of H, from the largest θ_i down.

    Attributes:
        values: θ_i = v_iᵀHv_i, ``(k,)``, float64; fewer than requested if there are fewer weights, or if the
            measurement was interrupted early.
        residuals: ‖Hv_i - θ_i v_i‖ / |θ_i|, ``(k,)``. H has an eigenvalue within ``residuals[i] * |values[i]|`` of θ_i.
        iterations: Number of products computed.
        converged: Whether the stopping rule was met for all.
        vectors: v_i, unit length, ``(k, d)``, in the model's dtype; None unless requested.
        dtype: The model's dtype, in which the products are computed.
    """

    values: Tensor
    residuals: Tensor
    iterations: int
    converged: bool
    vectors: Tensor | None = None
    dtype: torch.dtype = torch.float64

    def ratio(self, i: int = 5) -> float:
        """λ_1 / λ_i, counted from 1; FedSAM (ECCV 2022, Table 1) has i = 5.

        Returns:
            The ratio; NaN if λ_i is zero up to rounding, as of a Hessian of lower rank.

        Raises:
            UserError: If there are fewer than ``i`` eigenvalues.
        """
        ensure(
            1 <= i <= len(self.values), f"ratio: there are {len(self.values)} eigenvalues, none at {i}; use a larger k"
        )
        top, other = self.values[0].item(), self.values[i - 1].item()
        zero = Lanczos.ROUNDING * torch.finfo(self.dtype).eps * self.values.abs().max().item()
        return top / other if abs(other) > zero else math.nan


class Hessian:
    """H as Krylov methods and probes use it: products that are counted, and random vectors like the weights.

    Args:
        f: The loss, at the weights of H.
        draws: Generator of the random vectors.
        most: Maximum number of products, for ``f.progress``.

    Attributes:
        like: A tensor of the dtype and device of the vectors, ``(d,)``.
        products: Number of products computed.
    """

    def __init__(self, f: LossAt, draws: torch.Generator, most: int) -> None:
        self._f, self._product, self._draws = f, f.hvp(), draws
        self.like, self.d, self.most, self.products = f.w, f.spec.d, most, 0

    def __call__(self, v: Tensor) -> Tensor:
        """H v, both ``(d,)``."""
        hv = self._product(v)
        self.products += 1
        if self._f.progress is not None:
            self._f.progress(self.products, self.most)
        return hv

    def normal(self) -> Tensor:
        """A normally distributed vector, ``(d,)``."""
        return torch.randn(self.d, generator=self._draws, dtype=torch.float64).to(self.like)

    def signs(self) -> Tensor:
        """A vector of random signs (Rademacher), ``(d,)``."""
        return torch.randint(2, (self.d,), generator=self._draws).to(self.like).mul_(2).sub_(1)

    def agreed(self, stop: bool) -> bool:
        """One decision for all processes: with different rounding they may disagree about a tolerance."""
        return bool(self._f.total(self.like.new_tensor(stop)) > 0)


def lambda_max(
    model: nn.Module, loss: Loss, batches: Batches, at: Tensor | None = None, **options: Unpack[SpectrumOptions]
) -> Eigenpair:
    """The largest eigenvalue λ_max of the Hessian of F, in eval mode: :func:`spectrum` with ``k=1``, and its vector.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights ``(d,)``; by default the model's own.
        **options: ``method``, ``iterations``, ``tol``, ``basis``, ``seed`` of :func:`spectrum`, and the options of
            :class:`~fl_lightning.flatness.functional.LossAt`.

    Returns:
        The eigenpair; value and residual are NaN if the Hessian is not finite.

    Raises:
        UserError: As :func:`spectrum`.
        Interrupted: As :func:`spectrum`; ``partial`` is a :class:`Spectrum`.
    """
    found = spectrum(model, loss, batches, at, k=1, vectors=True, **options)
    assert found.vectors is not None
    value, residual = found.values.item(), found.residuals.item()
    return Eigenpair(value, residual, found.iterations, found.converged, found.vectors[0])


def spectrum(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    k: int = 50,
    method: Method = "lanczos",
    iterations: int | None = None,
    tol: float | None = None,
    basis: int | None = None,
    vectors: bool = False,
    seed: int = 0,
    **options: Unpack[Options],
) -> Spectrum:
    """The k largest eigenvalues of the Hessian of F, in eval mode.

    ``lanczos``: the algebraically largest, by :class:`~fl_lightning.flatness.krylov.Lanczos`, stopped when the relative
    residuals of all k are at most ``tol``. The error of a value is then about ``tol``² |θ| / (relative gap to the
    next): with the default of 1e-2 three digits or more of a value that stands apart, as lambda_max of a trained net
    does, but only some per cent where eigenvalues lie closer together than ``tol``; there one may also be missed. Take
    a smaller ``tol`` for those. Memory: ``basis`` vectors of the model's size and dtype.

    ``power``: the papers' measure (FedGloSS, arXiv 2412.03752, App. D.3; FedSAM, ECCV 2022, Fig. 5): deflated power
    iteration, each stopped when the relative change of the estimate is at most ``tol``. It finds the eigenvalues
    largest in magnitude, of either sign, and often stops long before it converges: see the residuals.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights ``(d,)``; by default the model's own.
        k: Number of eigenvalues; at most d are returned.
        method: As above.
        iterations: Maximum number of Hessian-vector products, default 100 + 10 k (``lanczos``); with ``power`` for each
            eigenvalue, default 20.
        tol: As above, default 1e-2 (``lanczos``), 1e-4 (``power``).
        basis: Maximum number of Lanczos vectors kept, default the larger of 2 k and k + 50.
        vectors: Return the eigenvectors, too.
        seed: Seed of the normally distributed start.
        **options: See :class:`~fl_lightning.flatness.functional.LossAt`. With ``reduce`` every process runs the same
            iteration on products of all samples.

    Returns:
        The eigenvalues; values and residuals are NaN if the Hessian is not finite.

    Raises:
        UserError: If ``method`` is unknown, ``k`` or ``iterations`` not positive, or ``basis`` less than k + 2; else as
            ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the first product; ``partial`` is a :class:`Spectrum` without vectors,
            with ``power`` of the eigenvalues found so far.
    """
    ensure(method in ("lanczos", "power"), f"method: {method!r} is unknown; use 'lanczos' or 'power'")
    steps, accuracy = (100 + 10 * k, 1e-2) if method == "lanczos" else (20, 1e-4)
    steps, accuracy = steps if iterations is None else iterations, accuracy if tol is None else tol
    size = max(2 * k, k + 50) if basis is None else basis
    for key, number, least in (("k", k, 1), ("iterations", steps, 1), ("basis", size, k + 2)):
        ensure(number >= least, f"{key}: {number} is too few; use {least} or more")
    f = LossAt(model, loss, batches, at, **options)
    k = min(k, f.spec.d)
    h = Hessian(f, generator(seed, "spectrum"), steps if method == "lanczos" else steps * k)
    with arithmetic(h.like.device):
        if method == "power":
            return _power(h, k, steps, accuracy, vectors)
        return _lanczos(h, k, steps, accuracy, size, vectors)


def _lanczos(h: Hessian, k: int, steps: int, tol: float, basis: int, vectors: bool) -> Spectrum:
    lanczos, converged = Lanczos(h, h.normal, k, basis, h.agreed), False

    def found(with_vectors: bool = False) -> Spectrum:
        values, residuals = (x[-k:].flip(0) for x in (lanczos.values, lanczos.residuals))
        vectors = lanczos.vectors() if with_vectors else None
        return Spectrum(values, _relative(residuals, values), h.products, converged, vectors, h.like.dtype)

    with interruptible(found, lambda: len(lanczos.values) > 0):
        while h.products < steps and not converged and not lanczos.failed:
            lanczos.step()
            converged = h.agreed(lanczos.converged(tol))
    return found(vectors)


def _power(h: Hessian, k: int, steps: int, tol: float, vectors: bool) -> Spectrum:
    power = Power(h, h.normal, steps, tol, h.agreed)

    def found(with_vectors: bool = False) -> Spectrum:
        pairs = sorted(power.pairs, key=lambda pair: -pair.value)
        values, residuals = (
            torch.tensor(x, dtype=torch.float64) for x in zip(*((p.value, p.residual) for p in pairs), strict=True)
        )
        converged = len(pairs) == k and all(p.converged for p in pairs)
        vectors = torch.stack([p.vector for p in pairs]) if with_vectors else None
        return Spectrum(values, _relative(residuals, values), h.products, converged, vectors, h.like.dtype)

    with interruptible(found, lambda: bool(power.pairs)):
        while len(power.pairs) < k:
            power.next()
    return found(vectors)


def _relative(residuals: Tensor, values: Tensor) -> Tensor:
    return torch.where(residuals == 0, 0.0, residuals / values.abs())
