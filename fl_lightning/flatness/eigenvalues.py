"""The largest eigenvalues of a symmetric matrix A given by its products, such as the Hessian of a loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.core import PositiveInt, checked, ensure, generator
from fl_lightning.flatness.functional import Progress, arithmetic
from fl_lightning.flatness.krylov import Lanczos, Matrix, Products

Method = Literal["lanczos", "power"]
MORE = 4
"""Products after Lanczos has converged: they show a larger eigenvalue whose vector the random start nearly lacks."""


class Interrupted(KeyboardInterrupt):
    """A measurement was interrupted from the keyboard and holds its partial result.

    Attributes:
        partial: The result of the products computed so far.
    """

    def __init__(self, partial: Any) -> None:
        super().__init__()
        self.partial = partial


@contextmanager
def interruptible(partial: Callable[[], Any], enough: Callable[[], bool]) -> Iterator[None]:
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
        residual: ‖Av - θv‖ / |θ|, at least that of rounding. A has an eigenvalue within ``residual * |value|`` of θ.
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
        residuals: ‖Av_i - θ_i v_i‖ / |θ_i|, ``(k,)``, at least that of rounding, 50 eps λ_1 / |θ_i| (λ_1: the largest
            |θ|). A has an eigenvalue within ``residuals[i] * |values[i]|`` of θ_i.
        iterations: Number of products computed.
        converged: Whether the stopping rule was met for all; with ``lanczos`` a residual of rounding above ``tol`` does
            not meet it, unless the value is zero up to rounding.
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


@checked
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
    largest = spectrum(
        a, k=1, method=method, iterations=iterations, tol=tol, basis=basis, vectors=True, seed=seed, progress=progress
    )
    assert largest.vectors is not None
    value, residual = largest.values.item(), largest.residuals.item()
    return Eigenpair(value, residual, largest.iterations, largest.converged, largest.vectors[0])


@checked
def spectrum(
    a: Matrix,
    *,
    k: PositiveInt = 50,
    method: Method = "lanczos",
    iterations: PositiveInt | None = None,
    tol: float | None = None,
    basis: int | None = None,
    vectors: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Spectrum:
    """Returns the k largest eigenvalues of a symmetric matrix.

    ``lanczos``: the algebraically largest, by :class:`~fl_lightning.flatness.krylov.Lanczos`, stopped when the relative
    residuals of all k are at most ``tol``, and four further products have raised none by more than its residual: a
    random start may nearly lack the first vector, and the second value then converges in its place. The error of a
    value is then about ``tol``² |θ| / (relative gap to the next): with the default of 1e-2 three digits or more of a
    value that stands apart, as lambda_max of a trained net does, but only some per cent where eigenvalues lie closer
    together than ``tol``; there one may also be missed. Take a smaller ``tol`` for those. Memory: ``basis`` vectors.

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
    steps, accuracy = (100 + 10 * k, 1e-2) if method == "lanczos" else (20, 1e-4)
    steps, accuracy = steps if iterations is None else iterations, accuracy if tol is None else tol
    size = max(2 * k, k + 50) if basis is None else basis
    ensure(size >= k + 2, f"basis: {size} is too few; use {k + 2} or more")
    k = min(k, a.shape[0])
    product = Products(a, generator(seed, "spectrum"), steps if method == "lanczos" else steps * k, progress)
    with arithmetic(product.like.device):
        if method == "power":
            return _power(product, k, steps, accuracy, vectors)
        return _lanczos(product, k, steps, accuracy, size, vectors)


def _lanczos(product: Products, k: int, steps: int, tol: float, basis: int, vectors: bool) -> Spectrum:
    lanczos, converged = Lanczos(product, product.normal, k, basis, product.agreed), False

    def estimate(with_vectors: bool = False) -> Spectrum:
        values, residuals = (x[-k:].flip(0) for x in (lanczos.values, lanczos.residuals))
        rounding = lanczos.floor
        known = residuals.clamp(min=rounding) <= values.abs() * max(tol, Lanczos.ROUNDING * product.eps)
        reached = converged and bool((known | (values.abs() <= rounding)).all())
        return _spectrum(product, values, residuals, rounding, reached, lanczos.vectors() if with_vectors else None)

    found: Spectrum | None = None
    with interruptible(estimate, lambda: len(lanczos.values) > 0):
        while product.done < steps and not lanczos.failed:
            lanczos.step()
            converged = product.agreed(lanczos.converged(tol))
            if found is None or product.agreed(_risen(lanczos.values[-k:].flip(0), found)):
                found = estimate(vectors) if converged else None
            if found is not None and (lanczos.invariant or product.done >= found.iterations + MORE):
                break
    return replace(found, iterations=product.done) if found else estimate(vectors)


def _risen(values: Tensor, found: Spectrum) -> bool:
    """Returns whether a value lies above its earlier one by more than the residual: then another one had its place."""
    return bool((values - found.values > found.residuals * found.values.abs()).any())


def _power(product: Products, k: int, steps: int, tol: float, vectors: bool) -> Spectrum:
    """Returns eigenpairs by the deflated power iteration of FedGloSS (arXiv 2412.03752, App. D.3, and its program).

    They are those of the largest magnitude, one after another: v <- Hv / ‖Hv‖ until the change of θ = vᵀHv is at most
    ``tol`` |θ|, then H <- H - θ v vᵀ. The first start is random, each further one is the eigenvector before.
    """
    pairs: list[Eigenpair] = []  # in the order in which they are found; their residuals are absolute

    def estimate(with_vectors: bool = False) -> Spectrum:
        ordered = sorted(pairs, key=lambda pair: -pair.value)
        values = torch.tensor([pair.value for pair in ordered], dtype=torch.float64)
        residuals = torch.tensor([pair.residual for pair in ordered], dtype=torch.float64)
        vectors = torch.stack([pair.vector for pair in ordered]) if with_vectors else None
        rounding = Lanczos.ROUNDING * product.eps * values.abs().max().item()
        reached = len(pairs) == k and all(pair.converged for pair in pairs)
        return _spectrum(product, values, residuals, rounding, reached, vectors)

    with interruptible(estimate, lambda: bool(pairs)):
        while len(pairs) < k:
            pairs.append(_next_pair(product, pairs, steps, tol))
    return estimate(vectors)


def _next_pair(product: Products, pairs: Sequence[Eigenpair], steps: int, tol: float) -> Eigenpair:
    v, theta = pairs[-1].vector if pairs else product.normal(), 0.0
    v = v / v.norm()
    for step in range(1, steps + 1):
        last, av = theta, product(v)
        deflated = av
        for pair in pairs:
            deflated = deflated - pair.value * (pair.vector @ v) * pair.vector
        theta = (v @ deflated).item()
        converged = product.agreed(abs(theta - last) <= tol * abs(last))
        if converged or step == steps or math.isnan(theta):
            break
        v = deflated / deflated.norm()
    return Eigenpair(theta, (av - theta * v).norm().item(), product.done, converged, v)


def _spectrum(
    product: Products, values: Tensor, residuals: Tensor, rounding: float, converged: bool, vectors: Tensor | None
) -> Spectrum:
    residuals = residuals.clamp(min=rounding)
    relative = torch.where(residuals == 0, 0.0, residuals / values.abs())
    return Spectrum(values, relative, product.done, converged, vectors, product.like.dtype)
