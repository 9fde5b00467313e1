"""Trace and spectral density of a symmetric matrix A, estimated from its products with random vectors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl_lightning.core import Positive, PositiveInt, checked, ensure, generator
from fl_lightning.flatness.eigenvalues import interruptible
from fl_lightning.flatness.functional import Estimate, Progress, arithmetic
from fl_lightning.flatness.krylov import Lanczos, Matrix, Products


@dataclass(frozen=True, eq=False)
class Density:
    """The spectral density (1/d) Σ_i δ(t - λ_i): k eigenvalues are known, quadratures describe the other d - k.

    Attributes:
        eigenvalues: The eigenvalues that are known, ascending, ``(k,)``, float64.
        nodes: Eigenvalues of the projected matrices, ascending, ``(probes, steps)``, float64.
        weights: Their weights; each row sums to 1, and is 0 where it has fewer nodes.
        d: Number of rows of the matrix.
        products: Number of products computed.
    """

    eigenvalues: Tensor
    nodes: Tensor
    weights: Tensor
    d: int
    products: int

    @checked
    def __call__(self, grid: Tensor, sigma: Positive) -> Tensor:
        """Returns the density convolved with a Gaussian, at the points of ``grid``; it integrates to 1.

        Args:
            grid: Eigenvalues t, any shape.
            sigma: Standard deviation of the Gaussian, in the same units.

        Raises:
            UserError: If ``sigma`` is not positive.
        """
        at, scale = grid.cpu().double()[..., None, None], sigma * math.sqrt(2 * math.pi)
        return self._mean(lambda t: torch.exp(-(((at - t) / sigma) ** 2) / 2) / scale)[0].to(grid.device)

    def moment(self, p: int) -> Estimate:
        """Returns an estimate of tr(A^p) / d with its standard error over the probes.

        A quadrature of ``steps`` nodes gives the moment of its own probe exactly for p < 2 ``steps``.
        """
        mean, error = self._mean(lambda t: t**p)
        return Estimate(mean.item(), error.item(), self.products)

    def _mean(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean of f(t) over the density, with its standard error; f maps ``(n, k)`` to ``(..., n, k)``."""
        known, rest = f(self.eigenvalues[None]).sum((-2, -1)) / self.d, 1 - len(self.eigenvalues) / self.d
        of_probes, n = rest * (self.weights * f(self.nodes)).sum(-1), len(self.nodes)
        mean = of_probes.mean(-1, keepdim=True)
        error = ((of_probes - mean).square().sum(-1) / (n * (n - 1))).sqrt()  # NaN for a single probe
        return known + mean[..., 0], error


@checked
def trace(
    a: Matrix,
    *,
    method: Literal["hutch++", "hutchinson"] = "hutch++",
    samples: int = 60,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """Returns an unbiased estimate of the trace of a symmetric matrix.

    ``hutchinson``: the mean of zᵀAz over vectors z of random signs (Hutchinson 1990).

    ``hutch++``: exact on a random subspace that captures the large eigenvalues, and Hutchinson on the rest (Meyer et
    al., Hutch++, SOSA 2021, Algorithm 1). A third of the products builds the subspace, a third measures on it, and a
    third is probes. If a third is d or more, the subspace is the whole space: the trace is exact, after d products.
    Memory: ``samples`` / 3 vectors, briefly twice.

    Args:
        a: The matrix, ``(d, d)``, as for :func:`~fl_lightning.flatness.lambda_max`.
        method: As above.
        samples: Number of products.
        seed: Seed of the random signs.
        progress: Called after each product.

    Returns:
        The estimate with its standard error (of ``hutch++``: that of the rest); NaN if the matrix is not finite.
        ``samples`` counts products.

    Raises:
        UserError: If ``method`` is unknown, there are fewer than 2 (``hutchinson``) or 4 samples, or the matrix is not
            square.
        Interrupted: On KeyboardInterrupt after the second probe; ``partial`` is the estimate from the probes so far.
    """
    minimum = 4 if method == "hutch++" else 2
    ensure(samples >= minimum, f"samples: {samples} is too few for {method}; use {minimum} or more")
    d = a.shape[0]
    full_space = method == "hutch++" and samples // 3 >= d
    product = Products(a, generator(seed, "trace"), d if full_space else samples, progress)
    exact, space = 0.0, product.like.new_zeros(d, 0)
    probes: list[float] = []

    def estimate() -> Estimate:
        values = torch.tensor(probes, dtype=torch.float64)
        return Estimate(exact + values.mean().item(), (values.std() / math.sqrt(len(probes))).item(), product.done)

    with interruptible(estimate, lambda: len(probes) >= 2), arithmetic(product.like.device):
        if full_space:
            basis = torch.eye(d, dtype=product.like.dtype, device=product.like.device)
            return Estimate(sum((e @ product(e)).item() for e in basis), 0.0, product.done)
        if method == "hutch++":
            space, _ = torch.linalg.qr(torch.stack([product(product.signs()) for _ in range(samples // 3)], dim=1))
            exact = sum((q @ product(q)).item() for q in space.T)
        while product.done < samples:
            z = product.signs()
            z = z - space @ (z @ space)
            probes.append((z @ product(z)).item())
    return estimate()


@checked
def density(
    a: Matrix,
    *,
    probes: PositiveInt = 5,
    steps: PositiveInt = 50,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """Returns the spectral density of a symmetric matrix, by deflated stochastic Lanczos quadrature.

    A first Lanczos run finds the eigenvalues that stand apart, of either sign: those whose relative residual is at most
    1e-2 are taken as they are. On the space orthogonal to their vectors each probe runs Lanczos from a vector of random
    signs: the eigenvalues of its projected matrix are the nodes, the squared first components of their eigenvectors the
    weights (Ubaru, Chen & Saad, SIAM J. Matrix Anal. Appl. 38, 2017). Without deflation a probe misjudges the mass of a
    single large eigenvalue λ by a factor with standard deviation 1.4, and so the moments: the variance of zᵀA^p z for
    one eigenvalue that dominates is 2 λ^2p.

    It costs ``(probes + 1) * steps`` products, and memory for 2 ``steps`` vectors at most.

    Args:
        a: The matrix, ``(d, d)``, as for :func:`~fl_lightning.flatness.lambda_max`.
        probes: Number of random vectors; the standard error needs two or more.
        steps: Number of products with each, and in the first run; fewer if a Krylov space is exhausted. With d rows or
            fewer the first run finds all eigenvalues, and the density is exact.
        seed: Seed of the random vectors.
        progress: Called after each product.

    Returns:
        The density; nodes are NaN if the matrix is not finite.

    Raises:
        UserError: If ``probes`` or ``steps`` is not positive, or the matrix not square.
        Interrupted: On KeyboardInterrupt after the first probe; ``partial`` is the density from the probes so far.
    """
    product = Products(a, generator(seed, "spectral_density"), (probes + 1) * steps, progress)
    quadratures: list[tuple[Tensor, Tensor]] = []

    def estimate() -> Density:
        nodes, weights = (pad_sequence(list(rows), batch_first=True) for rows in zip(*quadratures, strict=True))
        return Density(first.values[accurate], nodes, weights, product.d, product.done)

    def deflated(v: Tensor) -> Tensor:
        return v - (space @ v) @ space

    with interruptible(estimate, lambda: bool(quadratures)), arithmetic(product.like.device):
        first = Lanczos(product, product.normal, 1, steps, product.agreed)
        while len(first.values) < min(steps, product.d) and not first.failed:
            first.step()
        accurate = first.accurate(1e-2)
        space = first.vectors(accurate)
        rest = min(steps, product.d - len(space))
        for _ in range(probes):
            lanczos = Lanczos(
                lambda v: deflated(product(v)), lambda: deflated(product.signs()), 1, rest, product.agreed, first.floor
            )
            while len(lanczos.values) < rest and not lanczos.invariant and not lanczos.failed:
                lanczos.step()
            quadratures.append((lanczos.values, lanczos.coefficients[:1].flatten() ** 2))
    return estimate()
