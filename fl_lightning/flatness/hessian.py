"""The largest eigenvalues of the Hessian H of the data loss F."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.rng import generator
from fl_lightning.flatness.functional import Batches, Loss, Progress, Reduce, arithmetic, hvp
from fl_lightning.flatness.krylov import Lanczos, Power

T = TypeVar("T")

Method = Literal["lanczos", "power"]


class Interrupted(KeyboardInterrupt, Generic[T]):
    """A measurement was interrupted from the keyboard, but not for nothing.

    Attributes:
        partial: What it would have returned, from what it had seen so far.
    """

    def __init__(self, partial: T) -> None:
        super().__init__()
        self.partial = partial


@dataclass(frozen=True, eq=False)
class Eigenpair:
    """An approximate eigenpair (θ, v) of H.

    Attributes:
        value: θ = vᵀHv.
        residual: ‖Hv - θv‖ / |θ|. H has an eigenvalue within ``residual * |value|`` of θ.
        iterations: Products taken.
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
        values: θ_i = v_iᵀHv_i, ``(k,)``, float64; fewer than were asked for if there are fewer weights, or if the
            measurement was interrupted early.
        residuals: ‖Hv_i - θ_i v_i‖ / |θ_i|, ``(k,)``. H has an eigenvalue within ``residuals[i] * |values[i]|`` of θ_i.
        iterations: Products taken.
        converged: Whether the stopping rule was met for all.
        vectors: v_i, unit length, ``(k, d)``, in the model's dtype; None unless asked for.
    """

    values: Tensor
    residuals: Tensor
    iterations: int
    converged: bool
    vectors: Tensor | None = None

    def ratio(self, i: int = 5) -> float:
        """λ_1 / λ_i, counted from 1: how far the largest stands out (FedSAM, ECCV 2022, Table 1, has i = 5).

        Raises:
            UserError: If there are fewer than ``i`` eigenvalues.
        """
        if not 1 <= i <= len(self.values):
            raise UserError(f"ratio: there are {len(self.values)} eigenvalues, none at {i}; use a larger k")
        return (self.values[0] / self.values[i - 1]).item()


class Hessian:
    """H as Krylov methods and probes use it: products that are counted, and random vectors like the weights.

    Args:
        model: The network, and so on as for :func:`~fl_lightning.flatness.hvp`.
        loss: Per-sample losses.
        batches: The data.
        at: Flat weights ``(d,)``.
        draws: Generator of the random vectors.
        most: Most products that will be taken.
        keep_graph: See :func:`~fl_lightning.flatness.hvp`.
        reduce: Sums up over the processes.
        progress: Is told of each product.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        at: Tensor | None,
        draws: torch.Generator,
        most: int,
        keep_graph: bool | None,
        reduce: Reduce | None,
        progress: Progress | None,
    ) -> None:
        self._product = hvp(model, loss, batches, at, keep_graph=keep_graph, reduce=reduce)
        self.like = FlatSpec(model).vector(model)
        self.d = len(self.like)
        self.products = 0
        self.most, self._draws, self._reduce, self._progress = most, draws, reduce, progress

    def __call__(self, v: Tensor) -> Tensor:
        """H v, both ``(d,)``."""
        hv = self._product(v)
        self.products += 1
        if self._progress is not None:
            self._progress(self.products, self.most)
        return hv

    def normal(self) -> Tensor:
        """A normally distributed vector, ``(d,)``."""
        return torch.randn(self.d, generator=self._draws, dtype=torch.float64).to(self.like)

    def signs(self) -> Tensor:
        """A vector of random signs (Rademacher), ``(d,)``."""
        return torch.randint(2, (self.d,), generator=self._draws).to(self.like).mul_(2).sub_(1)

    def agreed(self, stop: bool) -> bool:
        """A decision of all: processes that round differently may see the same number on two sides of a tolerance."""
        return stop if self._reduce is None else bool(self._reduce(self.like.new_tensor(stop)) > 0)


def lambda_max(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    method: Method = "lanczos",
    iterations: int | None = None,
    tol: float | None = None,
    basis: int | None = None,
    seed: int = 0,
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
) -> Eigenpair:
    """The largest eigenvalue λ_max of the Hessian of F at the model's weights, in eval mode.

    It is :func:`spectrum` with ``k=1``, and its vector.

    Returns:
        The eigenpair; value and residual are NaN if the Hessian is not finite.

    Raises:
        UserError: As :func:`spectrum`.
        Interrupted: As :func:`spectrum`; ``partial`` is a :class:`Spectrum`.
    """
    found = spectrum(
        model, loss, batches, at, k=1, method=method, iterations=iterations, tol=tol, basis=basis, vectors=True,
        seed=seed, keep_graph=keep_graph, reduce=reduce, progress=progress,
    )  # fmt: skip
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
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
) -> Spectrum:
    """The k largest eigenvalues of the Hessian of F at the model's weights, in eval mode.

    ``lanczos``: the algebraically largest, by :class:`~fl_lightning.flatness.krylov.Lanczos`, stopped when the relative
    residuals of all k are at most ``tol``. A value is then wrong by about ``tol``² |θ| / (relative gap to the next):
    the default of 1e-2 gives three digits or more. Memory: ``basis`` vectors of the model's size and dtype.

    ``power``: the papers' measure (FedGloSS, arXiv 2412.03752, App. D.3; FedSAM, ECCV 2022, Fig. 5): deflated power
    iteration, each stopped when the relative change of the estimate is at most ``tol``. It finds the eigenvalues
    largest in magnitude, of either sign, and is often stopped long before it is there: see the residuals.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        at: Flat weights ``(d,)`` to measure at; by default the model's own.
        k: How many; of d weights at most d.
        method: As above.
        iterations: Most Hessian-vector products, default 100 + 10 k (``lanczos``), or most for each eigenvalue, default
            20 (``power``).
        tol: As above, default 1e-2 (``lanczos``), 1e-4 (``power``).
        basis: Most Lanczos vectors kept, default the larger of 2 k and k + 50.
        vectors: Return the eigenvectors, too.
        seed: Of the normally distributed start.
        keep_graph: See :func:`~fl_lightning.flatness.hvp`.
        reduce: Sums up over the processes; each then runs the same iteration on products of all samples.
        progress: Called after each product.

    Returns:
        The eigenvalues; values and residuals are NaN if the Hessian is not finite.

    Raises:
        UserError: If ``method`` is unknown, ``k`` or ``iterations`` not positive, or ``basis`` less than k + 2; else as
            ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the first product; ``partial`` is a :class:`Spectrum` without vectors,
            of power iterations with the eigenvalues that are done.
    """
    if method not in ("lanczos", "power"):
        raise UserError(f"method: {method!r} is unknown; use 'lanczos' or 'power'")
    steps, accuracy = (100 + 10 * k, 1e-2) if method == "lanczos" else (20, 1e-4)
    steps, accuracy = steps if iterations is None else iterations, accuracy if tol is None else tol
    size = max(2 * k, k + 50) if basis is None else basis
    for key, number, least in (("k", k, 1), ("iterations", steps, 1), ("basis", size, k + 2)):
        if number < least:
            raise UserError(f"{key}: {number} is too few; use {least} or more")
    k = min(k, FlatSpec(model).d)
    most = steps if method == "lanczos" else steps * k
    h = Hessian(model, loss, batches, at, generator(seed, "spectrum"), most, keep_graph, reduce, progress)
    with arithmetic(h.like.device):
        if method == "power":
            return _power(h, k, steps, accuracy, vectors)
        return _lanczos(h, k, steps, accuracy, size, vectors)


def _lanczos(h: Hessian, k: int, steps: int, tol: float, basis: int, vectors: bool) -> Spectrum:
    lanczos, converged = Lanczos(h, h.normal, k, basis, h.agreed), False

    def found(with_vectors: bool) -> Spectrum:
        values, residuals = (x[-k:].flip(0) for x in (lanczos.values, lanczos.residuals))
        vectors = lanczos.vectors() if with_vectors else None
        return Spectrum(values, _relative(residuals, values), h.products, converged, vectors)

    try:
        while h.products < steps and not converged and not lanczos.failed:
            lanczos.step()
            converged = h.agreed(lanczos.converged(tol))
    except KeyboardInterrupt:
        if len(lanczos.values) == 0:
            raise
        raise Interrupted(found(with_vectors=False)) from None
    return found(vectors)


def _power(h: Hessian, k: int, steps: int, tol: float, vectors: bool) -> Spectrum:
    power = Power(h, h.normal, steps, tol, h.agreed)

    def found(with_vectors: bool) -> Spectrum:
        pairs = sorted(power.pairs, key=lambda pair: -pair.value)
        values, residuals = (
            torch.tensor(x, dtype=torch.float64) for x in zip(*((p.value, p.residual) for p in pairs), strict=True)
        )
        converged = len(pairs) == k and all(p.converged for p in pairs)
        vectors = torch.stack([p.vector for p in pairs]) if with_vectors else None
        return Spectrum(values, _relative(residuals, values), h.products, converged, vectors)

    try:
        while len(power.pairs) < k:
            power.next()
    except KeyboardInterrupt:
        if not power.pairs:
            raise
        raise Interrupted(found(with_vectors=False)) from None
    return found(vectors)


def _relative(residuals: Tensor, values: Tensor) -> Tensor:
    return torch.where(residuals == 0, 0.0, residuals / values.abs())
