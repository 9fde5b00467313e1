"""The largest eigenvalues of a symmetric matrix A given by its products, such as the Hessian of a loss."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning.core import ensure, generator
from fl_lightning.flatness.functional import Progress, arithmetic
from fl_lightning.flatness.krylov import Lanczos, Power
from fl_lightning.flatness.operators import Matrix, Products

T = TypeVar("T")

Method = Literal["lanczos", "power"]


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
    """An approximate eigenpair (θ, v) of A.

    Attributes:
        value: θ = vᵀAv.
        residual: ‖Av - θv‖ / |θ|. A has an eigenvalue within ``residual * |value|`` of θ.
        iterations: Number of products computed.
        converged: Whether the stopping rule was met; for the power iteration that alone says little.
        vector: v, unit length, ``(d,)``, in the dtype of A.
    """

    value: float
    residual: float
    iterations: int
    converged: bool
    vector: Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Approximate eigenpairs (θ_i, v_i) of A, from the largest θ_i down.

    Attributes:
        values: θ_i = v_iᵀAv_i, ``(k,)``, float64; fewer than requested if A has fewer rows, or if the measurement was
            interrupted early.
        residuals: ‖Av_i - θ_i v_i‖ / |θ_i|, ``(k,)``. A has an eigenvalue within ``residuals[i] * |values[i]|`` of θ_i.
        iterations: Number of products computed.
        converged: Whether the stopping rule was met for all.
        vectors: v_i, unit length, ``(k, d)``, in the dtype of A; None unless requested.
        dtype: The dtype of A, in which the products are computed.
    """

    values: Tensor
    residuals: Tensor
    iterations: int
    converged: bool
    vectors: Tensor | None = None
    dtype: torch.dtype = torch.float64

    def ratio(self, i: int = 5) -> float:
        """Returns λ_1 / λ_i, counted from 1; FedSAM (ECCV 2022, Table 1) has i = 5.

        Returns:
            The ratio; NaN if λ_i is zero up to rounding, as of a matrix of lower rank.

        Raises:
            UserError: If there are fewer than ``i`` eigenvalues.
        """
        ensure(
            1 <= i <= len(self.values), f"ratio: there are {len(self.values)} eigenvalues, none at {i}; use a larger k"
        )
        top, other = self.values[0].item(), self.values[i - 1].item()
        zero = Lanczos.ROUNDING * torch.finfo(self.dtype).eps * self.values.abs().max().item()
        return top / other if abs(other) > zero else math.nan


def lambda_max(
    a: Matrix,
    *,
    method: Method = "lanczos",
    iterations: int | None = None,
    tol: float | None = None,
    basis: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenpair:
    """Returns the largest eigenvalue λ_max of a symmetric matrix, and its vector: :func:`spectrum` with ``k=1``.

    Args:
        a: The matrix, ``(d, d)``: an :class:`~fl_lightning.flatness.Operator`, a tensor, or anything with ``shape``,
            ``dtype``, ``device`` and ``@``.
        method: As for :func:`spectrum`, and so are the following.
        iterations: Maximum number of products, default 110, with ``power`` 20.
        tol: Tolerance, default 1e-2, with ``power`` 1e-4.
        basis: Maximum number of Lanczos vectors kept, default 51.
        seed: Seed of the normally distributed start.
        progress: Called after each product.

    Returns:
        The eigenpair; value and residual are NaN if the matrix is not finite.

    Raises:
        UserError: As :func:`spectrum`.
        Interrupted: As :func:`spectrum`; ``partial`` is a :class:`Spectrum`.

    Example:
        >>> round(lambda_max(torch.diag(torch.tensor([3.0, 1.0, -4.0]))).value, 5)
        3.0
    """
    found = spectrum(
        a, k=1, method=method, iterations=iterations, tol=tol, basis=basis, vectors=True, seed=seed, progress=progress
    )
    assert found.vectors is not None
    value, residual = found.values.item(), found.residuals.item()
    return Eigenpair(value, residual, found.iterations, found.converged, found.vectors[0])


def spectrum(
    a: Matrix,
    *,
    k: int = 50,
    method: Method = "lanczos",
    iterations: int | None = None,
    tol: float | None = None,
    basis: int | None = None,
    vectors: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Spectrum:
    """Returns the k largest eigenvalues of a symmetric matrix.

    ``lanczos``: the algebraically largest, by :class:`~fl_lightning.flatness.krylov.Lanczos`, stopped when the relative
    residuals of all k are at most ``tol``. The error of a value is then about ``tol``² |θ| / (relative gap to the
    next): with the default of 1e-2 three digits or more of a value that stands apart, as lambda_max of a trained net
    does, but only some per cent where eigenvalues lie closer together than ``tol``; there one may also be missed. Take
    a smaller ``tol`` for those. Memory: ``basis`` vectors.

    ``power``: the papers' measure (FedGloSS, arXiv 2412.03752, App. D.3; FedSAM, ECCV 2022, Fig. 5): deflated power
    iteration, each stopped when the relative change of the estimate is at most ``tol``. It finds the eigenvalues
    largest in magnitude, of either sign, and often stops long before it converges: see the residuals.

    Args:
        a: The matrix, ``(d, d)``, as for :func:`lambda_max`.
        k: Number of eigenvalues; at most d are returned.
        method: As above.
        iterations: Maximum number of products, default 100 + 10 k (``lanczos``); with ``power`` for each
            eigenvalue, default 20.
        tol: As above, default 1e-2 (``lanczos``), 1e-4 (``power``).
        basis: Maximum number of Lanczos vectors kept, default the larger of 2 k and k + 50.
        vectors: Return the eigenvectors, too.
        seed: Seed of the normally distributed start.
        progress: Called after each product.

    Returns:
        The eigenvalues; values and residuals are NaN if the matrix is not finite. Processes that share the samples of
        an operator run the same iteration.

    Raises:
        UserError: If ``method`` is unknown, ``k`` or ``iterations`` not positive, ``basis`` less than k + 2, or the
            matrix not square.
        Interrupted: On KeyboardInterrupt after the first product; ``partial`` is a :class:`Spectrum` without vectors,
            with ``power`` of the eigenvalues found so far.
    """
    ensure(method in ("lanczos", "power"), f"method: {method!r} is unknown; use 'lanczos' or 'power'")
    steps, accuracy = (100 + 10 * k, 1e-2) if method == "lanczos" else (20, 1e-4)
    steps, accuracy = steps if iterations is None else iterations, accuracy if tol is None else tol
    size = max(2 * k, k + 50) if basis is None else basis
    for key, number, least in (("k", k, 1), ("iterations", steps, 1), ("basis", size, k + 2)):
        ensure(number >= least, f"{key}: {number} is too few; use {least} or more")
    k = min(k, a.shape[0])
    product = Products(a, generator(seed, "spectrum"), steps if method == "lanczos" else steps * k, progress)
    with arithmetic(product.like.device):
        if method == "power":
            return _power(product, k, steps, accuracy, vectors)
        return _lanczos(product, k, steps, accuracy, size, vectors)


def _lanczos(product: Products, k: int, steps: int, tol: float, basis: int, vectors: bool) -> Spectrum:
    lanczos, converged = Lanczos(product, product.normal, k, basis, product.agreed), False

    def found(with_vectors: bool = False) -> Spectrum:
        values, residuals = (x[-k:].flip(0) for x in (lanczos.values, lanczos.residuals))
        vectors = lanczos.vectors() if with_vectors else None
        return Spectrum(values, _relative(residuals, values), product.done, converged, vectors, product.like.dtype)

    with interruptible(found, lambda: len(lanczos.values) > 0):
        while product.done < steps and not converged and not lanczos.failed:
            lanczos.step()
            converged = product.agreed(lanczos.converged(tol))
    return found(vectors)


def _power(product: Products, k: int, steps: int, tol: float, vectors: bool) -> Spectrum:
    power = Power(product, product.normal, steps, tol, product.agreed)

    def found(with_vectors: bool = False) -> Spectrum:
        pairs = sorted(power.pairs, key=lambda pair: -pair.value)
        values, residuals = (
            torch.tensor(x, dtype=torch.float64) for x in zip(*((p.value, p.residual) for p in pairs), strict=True)
        )
        converged = len(pairs) == k and all(p.converged for p in pairs)
        vectors = torch.stack([p.vector for p in pairs]) if with_vectors else None
        return Spectrum(values, _relative(residuals, values), product.done, converged, vectors, product.like.dtype)

    with interruptible(found, lambda: bool(power.pairs)):
        while len(power.pairs) < k:
            power.next()
    return found(vectors)


def _relative(residuals: Tensor, values: Tensor) -> Tensor:
    return torch.where(residuals == 0, 0.0, residuals / values.abs())
