"""Trace and spectral density of the Hessian H of the data loss F, estimated from products with random vectors."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Unpack

from fl_lightning.core import ensure, generator
from fl_lightning.flatness.functional import Batches, Estimate, Loss, LossAt, Options, arithmetic
from fl_lightning.flatness.hessian import Hessian, interruptible
from fl_lightning.flatness.krylov import Lanczos


@dataclass(frozen=True, eq=False)
class Density:
    """The spectral density of H, (1/d) Σ_i δ(t - λ_i), as a mean of quadratures, one per probe.

    Attributes:
        nodes: Eigenvalues of the projected matrices, ascending, ``(probes, steps)``, float64.
        weights: Their weights; each row sums to 1, and is 0 where it has fewer nodes.
        d: Number of weights of the model.
    """

    nodes: Tensor
    weights: Tensor
    d: int

    def __call__(self, grid: Tensor, sigma: float) -> Tensor:
        """The density convolved with a Gaussian, at the points of ``grid``; it integrates to 1.

        Args:
            grid: Eigenvalues t, any shape.
            sigma: Standard deviation of the Gaussian, in the same units.

        Raises:
            UserError: If ``sigma`` is not positive.
        """
        ensure(sigma > 0, f"sigma: {sigma} is not positive; use a width such as a hundredth of the range")
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
    **options: Unpack[Options],
) -> Estimate:
    """An unbiased estimate of the trace of the Hessian of F, in eval mode.

    ``hutchinson``: the mean of zᵀHz over vectors z of random signs (Hutchinson 1990).

    ``hutch++``: exact on a random subspace that captures the large eigenvalues, and Hutchinson on the rest (Meyer et
    al., Hutch++, SOSA 2021, Algorithm 1). A third of the products builds the subspace, a third measures on it, and a
    third is probes. Memory: ``samples`` / 3 vectors of the model's size, briefly twice.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights ``(d,)``; by default the model's own.
        method: As above.
        samples: Number of Hessian-vector products; fewer if they span the whole space.
        seed: Seed of the random signs.
        **options: See :class:`~fl_lightning.flatness.functional.LossAt`.

    Returns:
        The estimate, in units of the loss, with its standard error (of ``hutch++``: that of the rest); NaN if the
        Hessian is not finite. ``samples`` counts products.

    Raises:
        UserError: If ``method`` is unknown, or there are fewer than 2 (``hutchinson``) or 4 samples; else as
            ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the second probe; ``partial`` is the estimate from the probes so far.
    """
    ensure(method in ("hutch++", "hutchinson"), f"method: {method!r} is unknown; use 'hutch++' or 'hutchinson'")
    least = 4 if method == "hutch++" else 2
    ensure(samples >= least, f"samples: {samples} is too few for {method}; use {least} or more")
    h = Hessian(LossAt(model, loss, batches, at, **options), generator(seed, "trace"), samples)
    exact, space = 0.0, h.like.new_zeros(h.d, 0)
    probes: list[float] = []

    def estimate() -> Estimate:
        values = torch.tensor(probes, dtype=torch.float64)
        return Estimate(exact + values.mean().item(), (values.std() / math.sqrt(len(probes))).item(), h.products)

    with interruptible(estimate, lambda: len(probes) >= 2), arithmetic(h.like.device):
        if method == "hutch++":
            directions = min(samples // 3, h.d)
            space, _ = torch.linalg.qr(torch.stack([h(h.signs()) for _ in range(directions)], dim=1))
            exact = sum((q @ h(q)).item() for q in space.T)
        while h.products < samples:
            z = h.signs()
            z = z - space @ (z @ space)
            probes.append((z @ h(z)).item())
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
    **options: Unpack[Options],
) -> Density:
    """The spectral density of the Hessian of F, in eval mode, by stochastic Lanczos quadrature.

    Each probe runs ``steps`` of Lanczos from a vector of random signs. The eigenvalues of the projected matrix are the
    nodes, the squared first components of its eigenvectors their weights (Ubaru, Chen & Saad, SIAM J. Matrix Anal.
    Appl. 38, 2017). Memory: ``steps`` vectors of the model's size and dtype.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        at: Flat weights ``(d,)``; by default the model's own.
        probes: Number of random vectors.
        steps: Number of products with each; fewer if its Krylov space is exhausted, which is then exact.
        seed: Seed of the random signs.
        **options: See :class:`~fl_lightning.flatness.functional.LossAt`.

    Returns:
        The density; nodes are NaN if the Hessian is not finite.

    Raises:
        UserError: If ``probes`` or ``steps`` is not positive; else as ``mean_loss``.
        Interrupted: On KeyboardInterrupt after the first probe; ``partial`` is the density from the probes so far.
    """
    for key, number in (("probes", probes), ("steps", steps)):
        ensure(number >= 1, f"{key}: {number} is too few; use 1 or more")
    f = LossAt(model, loss, batches, at, **options)
    h = Hessian(f, generator(seed, "spectral_density"), probes * steps)
    quadratures: list[tuple[Tensor, Tensor]] = []

    def density() -> Density:
        nodes, weights = (pad_sequence(list(rows), batch_first=True) for rows in zip(*quadratures, strict=True))
        return Density(nodes, weights, h.d)

    with interruptible(density, lambda: bool(quadratures)), arithmetic(h.like.device):
        for _ in range(probes):
            lanczos = Lanczos(h, h.signs, 1, steps, h.agreed)
            while len(lanczos.values) < steps and not lanczos.invariant and not lanczos.failed:
                lanczos.step()
            quadratures.append((lanczos.values, lanczos.coefficients[0] ** 2))
    return density()
