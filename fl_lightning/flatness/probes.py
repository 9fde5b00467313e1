"""What products with random vectors tell of the Hessian H of the data loss F: its trace, its spectral density."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import generator
from fl_lightning.flatness.functional import Batches, Estimate, Loss, Progress, Reduce, arithmetic
from fl_lightning.flatness.hessian import Hessian, Interrupted
from fl_lightning.flatness.krylov import Lanczos


@dataclass(frozen=True, eq=False)
class Density:
    """The spectral density of H, (1/d) Σ_i δ(t - λ_i), as a mean of quadratures: one a probe.

    Attributes:
        nodes: Eigenvalues of the projected matrices, ascending, ``(probes, steps)``, float64.
        weights: Their weights, of sum 1 in each row; 0 where a row has fewer nodes.
        d: Number of weights of the model.
    """

    nodes: Tensor
    weights: Tensor
    d: int

    def __call__(self, grid: Tensor, sigma: float) -> Tensor:
        """The density convolved with a Gaussian, at the points of ``grid``; its integral is 1.

        Args:
            grid: Eigenvalues t, any shape.
            sigma: Standard deviation of the Gaussian, in the same units.

        Raises:
            UserError: If ``sigma`` is not positive.
        """
        if sigma <= 0:
            raise UserError(f"sigma: {sigma} is no width; use a positive number, such as a hundredth of the range")
        nodes, weights = (x.reshape(-1).to(grid.device) for x in (self.nodes, self.weights / len(self.weights)))
        bell = torch.exp(-(((grid.double().unsqueeze(-1) - nodes) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
        return (bell * weights).sum(-1)

    def moment(self, p: int) -> float:
        """tr(H^p) / d, estimated: a quadrature of ``steps`` nodes gives vᵀH^p v exactly for p < 2 ``steps``."""
        return (self.weights * self.nodes**p).sum(1).mean().item()


def trace(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    method: Literal["hutch++", "hutchinson"] = "hutch++",
    samples: int = 60,
    seed: int = 0,
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """The trace of the Hessian of F at the model's weights, in eval mode, without bias.

    ``hutchinson``: the mean of zᵀHz over vectors z of random signs (Hutchinson 1990).

    ``hutch++``: exact on a random subspace, in which the large eigenvalues show, and Hutchinson on the rest (Meyer et
    al., Hutch++, SOSA 2021, Algorithm 1). A third of the products makes the subspace, a third measures on it, a
    third is probes. Memory: ``samples`` / 3 vectors of the model's size, twice for a moment.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        at: Flat weights ``(d,)`` to measure at; by default the model's own.
        method: As above.
        samples: Hessian-vector products, fewer if they are more than it takes to span the whole space.
        seed: Of the random signs.
        keep_graph: See :func:`~fl_lightning.flatness.hvp`.
        reduce: Sums up over the processes.
        progress: Called after each product.

    Returns:
        The estimate, in units of the loss, with its standard error, for ``hutch++`` that of the rest; NaN if the
        Hessian is not finite. ``samples`` counts products.

    Raises:
        UserError: If ``method`` is unknown, or there are fewer than 2 (``hutchinson``) or 4 samples; else as
            ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the second probe; ``partial`` is the estimate by those so far.
    """
    if method not in ("hutch++", "hutchinson"):
        raise UserError(f"method: {method!r} is unknown; use 'hutch++' or 'hutchinson'")
    least = 4 if method == "hutch++" else 2
    if samples < least:
        raise UserError(f"samples: {samples} is too few for {method}; use {least} or more")
    h = Hessian(model, loss, batches, at, generator(seed, "trace"), samples, keep_graph, reduce, progress)
    exact, space = 0.0, h.like.new_zeros(h.d, 0)
    probes: list[float] = []

    def estimate() -> Estimate:
        values = torch.tensor(probes, dtype=torch.float64)
        return Estimate(exact + values.mean().item(), (values.std() / math.sqrt(len(probes))).item(), h.products)

    try:
        with arithmetic(h.like.device):
            if method == "hutch++":
                directions = min(samples // 3, h.d)
                space, _ = torch.linalg.qr(torch.stack([h(h.signs()) for _ in range(directions)], dim=1))
                exact = sum((q @ h(q)).item() for q in space.T)
            while h.products < samples:
                z = h.signs()
                z = z - space @ (z @ space)
                probes.append((z @ h(z)).item())
    except KeyboardInterrupt:
        if len(probes) < 2:
            raise
        raise Interrupted(estimate()) from None
    return estimate()


def spectral_density(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    at: Tensor | None = None,
    *,
    probes: int = 5,
    steps: int = 60,
    seed: int = 0,
    keep_graph: bool | None = None,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
) -> Density:
    """The spectral density of the Hessian of F at the model's weights, in eval mode, by stochastic Lanczos quadrature.

    Each probe is ``steps`` of Lanczos from a vector of random signs. The eigenvalues of the projected matrix are nodes,
    the squared first components of its eigenvectors their weights (Ubaru, Chen & Saad, SIAM J. Matrix Anal. Appl. 38,
    2017). Memory: ``steps`` vectors of the model's size and dtype.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        at: Flat weights ``(d,)`` to measure at; by default the model's own.
        probes: Random vectors.
        steps: Products with each; fewer where its Krylov space is exhausted, which then is exact.
        seed: Of the random signs.
        keep_graph: See :func:`~fl_lightning.flatness.hvp`.
        reduce: Sums up over the processes.
        progress: Called after each product.

    Returns:
        The density; nodes are NaN if the Hessian is not finite.

    Raises:
        UserError: If ``probes`` or ``steps`` is not positive; else as ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the first probe; ``partial`` is the density by the probes that are done.
    """
    for key, number in (("probes", probes), ("steps", steps)):
        if number < 1:
            raise UserError(f"{key}: {number} is too few; use 1 or more")
    draws = generator(seed, "spectral_density")
    h = Hessian(model, loss, batches, at, draws, probes * steps, keep_graph, reduce, progress)
    nodes: list[Tensor] = []
    weights: list[Tensor] = []

    def density() -> Density:
        return Density(pad_sequence(nodes, batch_first=True), pad_sequence(weights, batch_first=True), h.d)

    try:
        with arithmetic(h.like.device):
            for _ in range(probes):
                lanczos = Lanczos(h, h.signs, 1, steps, h.agreed)
                while len(lanczos.values) < steps and not lanczos.invariant and not lanczos.failed:
                    lanczos.step()
                nodes.append(lanczos.values)
                weights.append(lanczos.coefficients[0] ** 2)
    except KeyboardInterrupt:
        if not nodes:
            raise
        raise Interrupted(density()) from None
    return density()
