"""A symmetric matrix A given by its products with vectors, and Lanczos for its eigenvalues.

Vectors keep the dtype and the device of the random ones; the small projected matrix is float64 on the CPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_lightning.core import ensure
from fl_lightning.flatness.functional import Progress

COLUMNS = 2**16
"""A restart mixes this many columns of the basis at a time, so that it needs no second basis."""


@runtime_checkable
class Matrix(Protocol):
    """A symmetric matrix as the measures take it: an `Operator`, a tensor, or an operator of curvlinops."""

    @property
    def shape(self) -> Sequence[int]:
        """``(d, d)``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the vectors."""

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""

    def __matmul__(self, v: Any, /) -> Any:
        """Returns the product with ``v``, ``(d,)``."""


class Products:
    """A matrix as Krylov methods and probes use it: products that are counted, and random vectors that fit it.

    Args:
        a: The matrix.
        draws: Generator of the random vectors.
        most: Maximum number of products, for ``progress``.
        progress: Called after each product.

    Attributes:
        like: An empty tensor of the dtype and device of the vectors.
        d: Their length.
        eps: The dtype's relative rounding.
        done: Number of products computed.
        agreed: Makes one decision for all processes that share the products.

    Raises:
        UserError: If the matrix is not square.
    """

    def __init__(self, a: Matrix, draws: torch.Generator, most: int, progress: Progress | None) -> None:
        shape = tuple(a.shape)
        ensure(len(shape) == 2 and shape[0] == shape[1], f"matrix: its shape {shape} is not (d, d)")
        self._a, self._draws, self._most, self._progress = a, draws, most, progress
        self.like, self.d, self.done = torch.empty(0, dtype=a.dtype, device=a.device), shape[0], 0
        self.eps = torch.finfo(a.dtype).eps
        self.agreed: Callable[[bool], bool] = getattr(a, "agreed", bool)

    def __call__(self, v: Tensor) -> Tensor:
        """Returns the product with ``v``, ``(d,)``."""
        product: Tensor = self._a @ v
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self._most)
        return product

    def normal(self) -> Tensor:
        """Returns a normally distributed vector, ``(d,)``."""
        return torch.randn(self.d, generator=self._draws, dtype=torch.float64).to(self.like)

    def signs(self) -> Tensor:
        """Returns a vector of random signs (Rademacher), ``(d,)``."""
        return torch.randint(2, (self.d,), generator=self._draws).to(self.like).mul_(2).sub_(1)


class Lanczos:
    """Lanczos with full reorthogonalisation and thick restart (Wu & Simon, SIAM J. Matrix Anal. Appl. 22, 2000).

    With orthonormal rows V, A Vᵀ = Vᵀ T + r eᵀ, where e is the last unit vector. T = V A Vᵀ is formed of explicit inner
    products. So a restart only replaces V by the best Ritz vectors and T by their values; the next column of T then
    holds what couples them to r.

    A Krylov space holds one eigenvector of each eigenvalue. Once the space is invariant, the iteration continues with a
    random vector orthogonal to it, until a further invariant space no longer changes the wanted values: multiple
    eigenvalues, including zero, are counted as often as they occur. If the iteration converges before that, a multiple
    eigenvalue may be counted once.

    Args:
        matvec: The matrix: v -> A v, from ``(d,)`` to ``(d,)``.
        random: Returns a random vector ``(d,)`` at each call.
        wanted: Number of the algebraically largest eigenvalues to find.
        size: Maximum number of basis vectors kept, more than ``wanted``; at most d are kept.
        agreed: Makes one decision for all processes that share the products.
        floor: Values up to this magnitude are rounding; it rises to `ROUNDING` eps ‖A‖ as A shows its size.

    Attributes:
        values: Ritz values, ascending, ``(n,)``, float64; NaN if a product was not finite.
        residuals: ‖Av - θv‖ of each Ritz pair (θ, v).
        coefficients: Ritz vectors in terms of the basis, one per column, ``(n, n)``.
        invariant: Whether the basis spans an invariant space, up to rounding.
    """

    ROUNDING = 50
    """Values below this many eps ‖A‖ count as zero, because products of that size are rounding."""

    def __init__(
        self,
        matvec: Callable[[Tensor], Tensor],
        random: Callable[[], Tensor],
        wanted: int,
        size: int,
        agreed: Callable[[bool], bool] = bool,
        floor: float = 0.0,
    ) -> None:
        self.matvec, self.random, self.wanted, self.agreed, self.floor = matvec, random, wanted, agreed, floor
        start = random()
        self._next = start / start.norm()
        size = min(size, len(start))
        self._basis = start.new_empty(size, len(start))
        self._t = torch.zeros(size, size, dtype=torch.float64)
        self._n, self._settled, self.invariant = 0, False, False
        self._before: list[Tensor] = []
        self.values = self.residuals = torch.empty(0, dtype=torch.float64)
        self.coefficients = torch.empty(0, 0, dtype=torch.float64)

    def step(self) -> None:
        """Computes one more product."""
        if self._n == len(self._basis):
            self._restart()
        n = self._n + 1
        basis = self._basis[:n]
        basis[-1] = self._next
        r, column = _orthogonalised(self.matvec(basis[-1]), basis)
        self._t[:n, n - 1] = self._t[n - 1, :n] = column
        self._n, beta = n, r.norm().item()
        if not math.isfinite(beta) or not bool(column.isfinite().all()):
            self.coefficients = torch.full((n, n), math.nan, dtype=torch.float64)
            self.values = self.residuals = self.coefficients[0]
            return
        values, self.coefficients = torch.linalg.eigh(self._t[:n, :n])
        self.floor = max(self.floor, self.ROUNDING * torch.finfo(r.dtype).eps * values.abs().max().item())
        full = n == basis.shape[1]
        self.invariant = self.agreed(full or beta <= self.floor)
        if self.invariant:
            top = values[-self.wanted :]
            self._settled = full or (n >= self.wanted and self._nothing_new(top))
            self._before.append(top)
            if not full:
                r, _ = _orthogonalised(self.random(), basis)
        self.values, self.residuals = values, beta * self.coefficients[-1].abs()
        if not full:
            self._next = r / r.norm()

    @property
    def failed(self) -> bool:
        """Returns whether a product was not finite."""
        return bool(self.values.isnan().any())

    def converged(self, tol: float) -> bool:
        """Returns whether the wanted Ritz values are :meth:`accurate`, and no further ones can be among them."""
        if self._before:
            return self.invariant and self._settled
        wanted = self.accurate(tol)[-self.wanted :]
        return len(wanted) == self.wanted and bool(wanted.all())

    def accurate(self, tol: float) -> Tensor:
        """Marks the Ritz values with residuals of at most ``tol`` times their magnitude, or of rounding, ``(n,)``."""
        return self.residuals <= (tol * self.values.abs()).clamp(min=self.floor)

    def vectors(self, which: Tensor | None = None) -> Tensor:
        """Returns Ritz vectors of unit length, that of the largest value first, ``(k, d)``.

        Args:
            which: Marks them, ``(n,)``; by default the wanted ones.
        """
        chosen = self.coefficients[:, -self.wanted :] if which is None else self.coefficients[:, which]
        return torch.nn.functional.normalize(chosen.T.flip(0).to(self._basis) @ self._basis[: self._n])

    def _nothing_new(self, top: Tensor) -> bool:
        """Returns whether a further invariant space is useless: each holds all eigenvalues, but none twice."""
        if len(self._before) + 1 >= self.wanted:
            return True
        last = self._before[-1] if self._before else top[:0]
        return len(last) == len(top) and bool(((top - last).abs() <= self.floor).all())

    def _restart(self) -> None:
        kept = self.wanted + (self._n - self.wanted) // 2  # more than wanted: they keep converging
        mix = self.coefficients[:, -kept:].T.to(self._basis)
        for part in torch.split(self._basis, COLUMNS, dim=1):
            part[:kept] = mix @ part
        self._t.zero_()
        self._t.diagonal()[:kept] = self.values[-kept:]
        self._n = kept


def _orthogonalised(r: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``r`` minus its projection onto the rows, and the projection's coefficients, float64 on the CPU."""
    total = torch.zeros(len(basis), dtype=torch.float64)
    for _ in range(2):  # once is not enough when r is nearly in the span
        c = basis @ r
        r, total = torch.addmv(r, basis.T, c, alpha=-1), total + c.cpu().double()
    return r, total
