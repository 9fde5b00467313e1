"""The largest eigenvalue of the Hessian of the data loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.flat import FlatSpec
from fl_lightning.flatness.functional import Batches, Loss, Reduce, hvp
from fl_lightning.rng import generator


@dataclass(frozen=True, eq=False)
class Eigenpair:
    """An approximate eigenpair (θ, v) of the Hessian H of F.

    Attributes:
        value: θ = vᵀHv.
        residual: ‖Hv - θv‖ / |θ|, from an explicit product. H has an eigenvalue within ``residual * |value|`` of θ.
        iterations: Steps taken.
        converged: Whether the stopping rule was met; for the power iteration that alone says little.
        vector: v, unit length, ``(d,)``, float64.
    """

    value: float
    residual: float
    iterations: int
    converged: bool
    vector: Tensor


def lambda_max(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    method: Literal["lanczos", "power"] = "lanczos",
    iterations: int | None = None,
    tol: float | None = None,
    seed: int = 0,
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
) -> Eigenpair:
    """The largest eigenvalue λ_max of the Hessian of F at the model's weights, in eval mode.

    ``lanczos``: the largest algebraic eigenvalue, by Lanczos with full reorthogonalisation (Golub & Van Loan, Matrix
    Computations, 10.1-10.3), stopped when the Ritz residual is below ``tol``. Memory: ``iterations`` x d x 8 bytes at
    most.

    ``power``: the papers' measure (FedGloSS, arXiv 2412.03752, App. D.3): power iteration, stopped when the relative
    change of the estimate is below ``tol``. It finds the eigenvalue largest in magnitude, of either sign, and is often
    stopped long before it is there: see the residual.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        at: Flat weights ``(d,)`` to measure at; by default the model's own.
        method: As above.
        iterations: Most steps, one Hessian-vector product each; default 100 (``lanczos``), 20 (``power``).
        tol: Relative tolerance; default 1e-3 (``lanczos``), 1e-4 (``power``).
        seed: Of the normally distributed start.
        keep_graph: See :func:`~fl_lightning.flatness.hvp`.
        reduce: Sums up over the processes; each then runs the same iteration on products of all samples.

    Returns:
        The eigenpair; value and residual are NaN if the Hessian is not finite.

    Raises:
        UserError: If ``method`` is unknown or ``iterations`` is not positive; else as ``mean_loss``.
    """
    if method not in ("lanczos", "power"):
        raise UserError(f"method: {method!r} is unknown; use 'lanczos' or 'power'")
    steps, accuracy = (100, 1e-3) if method == "lanczos" else (20, 1e-4)
    steps, accuracy = steps if iterations is None else iterations, accuracy if tol is None else tol
    if steps < 1:
        raise UserError(f"iterations: {steps} is too few; use 1 or more")
    matvec = hvp(model, loss, batches, at, keep_graph=keep_graph, reduce=reduce)
    weights = FlatSpec(model).vector(model)
    start = torch.randn(len(weights), generator=generator(seed, "lambda_max"), dtype=torch.float64)
    start = start.to(weights.device)

    def product(v: Tensor) -> Tensor:
        return matvec(v).double()

    def agreed(stop: bool) -> bool:
        # processes that round differently may see the same residual on two sides of the tolerance
        return stop if reduce is None else bool(reduce(start.new_tensor(stop)) > 0)

    if method == "power":
        return _power(product, start, steps, accuracy, agreed)
    return _lanczos(product, start, steps, accuracy, agreed, torch.finfo(weights.dtype).eps)


def _lanczos(
    matvec: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    tol: float,
    agreed: Callable[[bool], bool],
    eps: float,
) -> Eigenpair:
    basis = [start / start.norm()]
    t = torch.zeros(steps, steps + 1, dtype=torch.float64)  # the tridiagonal matrix and the next off-diagonal entry
    for k in range(steps):
        r = matvec(basis[k])
        t[k, k] = basis[k] @ r
        for _ in range(2):  # once is not enough when r is nearly in the span
            for q in basis:
                r = r.addcmul(q, q @ r, value=-1)
        t[k, k + 1] = beta = r.norm().item()
        if k + 1 < steps:
            t[k + 1, k] = beta
        if not t[k].isfinite().all():
            return Eigenpair(math.nan, math.nan, k + 1, False, basis[k])
        ritz, s = torch.linalg.eigh(t[: k + 1, : k + 1])
        # below the rounding of H nothing can be told: this ends invariant subspaces and eigenvalues that are zero
        floor = 4 * eps * ritz.abs().max().item()
        found = beta * abs(s[-1, -1].item()) <= max(tol * abs(ritz[-1].item()), floor)
        if agreed(found) or k + 1 == len(start):
            break
        basis.append(r / beta)
    v = torch.zeros_like(start)
    for q, weight in zip(basis, s[:, -1].tolist(), strict=False):
        v.add_(q, alpha=weight)
    v /= v.norm()
    theta, residual = _residual(v, matvec(v))
    return Eigenpair(theta, _relative(residual, theta), k + 1, residual <= max(tol * abs(theta), floor), v)


def _power(
    matvec: Callable[[Tensor], Tensor], start: Tensor, steps: int, tol: float, agreed: Callable[[bool], bool]
) -> Eigenpair:
    v, theta = start / start.norm(), 0.0
    for k in range(1, steps + 1):
        last, hv = theta, matvec(v)
        theta, residual = _residual(v, hv)
        converged = agreed(abs(theta - last) <= tol * abs(last))
        if converged or k == steps:
            break
        v = hv / hv.norm()
    return Eigenpair(theta, _relative(residual, theta), k, converged, v)


def _residual(v: Tensor, hv: Tensor) -> tuple[float, float]:
    """θ = vᵀHv and ‖Hv - θv‖ for a unit vector v."""
    theta = v @ hv
    return theta.item(), (hv - theta * v).norm().item()


def _relative(residual: float, theta: float) -> float:
    return residual / abs(theta) if theta else (math.inf if residual else 0.0)
