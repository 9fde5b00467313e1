"""How much a loss rises nearby: sharpness, low-pass filter, discrepancy, critical sharpness; distances of models."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fl_lightning.core import (
    EPS,
    FlatSpec,
    Interval,
    NonNegative,
    Positive,
    PositiveInt,
    checked,
    ensure,
    generator,
    norm,
    to_radius,
)
from fl_lightning.flatness.functional import Batches, Estimate, Loss, Reduce, batch_sizes, gradient, mean_loss, passes


@checked
def sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    rho: NonNegative = 0.05,
    steps: PositiveInt = 1,
    at: Tensor | None = None,
    *,
    eta: NonNegative | None = None,
    reduce: Reduce | None = None,
) -> float:
    """Returns max_{‖δ‖≤rho} F(w+δ) - F(w), approximated from below by gradient ascent.

    One step is δ = rho ∇F/‖∇F‖, with the gradient of all data (the first-order maximiser, Foret et al. 2021, Eq. 2;
    FedGF Eq. 5; FedGMT Eq. 4). With more, each adds rho ∇F(w+δ)/‖∇F(w+δ)‖ and projects δ onto the ball. One step of
    rho 0.05 found 0.99 of the maximum on small untrained nets, and 0.81, 0.61 and 0.23 on three trained ones, whose
    gradient is small; at rho 0.5 it found 0.16, 0.11 and 0.02.

    With ``eta`` it is ASAM's adaptive sharpness (Kwon et al. 2021, Eq. 2): the ball is ‖T⁻¹δ‖ ≤ rho with T = |w| + eta
    for weights and 1 for the rest, and one step is δ = rho T²∇F/‖T∇F‖.

    Args:
        model: The network; its weights are not moved.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        rho: Radius, in weight units; with ``eta`` a multiple of T.
        steps: Number of ascent steps, one pass with gradient each, plus two passes without.
        at: Flat weights w, ``(d,)``; by default the model's own.
        eta: Added to the absolute weights of the adaptive sharpness; None: the plain one.
        reduce: Sums over the processes; every process must call. None: this process has all samples.

    Returns:
        The sharpness, in units of the loss.

    Raises:
        UserError: If ``rho`` or ``eta`` is negative or ``steps`` is not positive; else as ``mean_loss``.
    """
    spec = FlatSpec(model)
    w = spec.vector(model) if at is None else at
    T = torch.ones(()).to(w) if eta is None else spec.adaptive_scale(w, eta)
    u = torch.zeros_like(w)  # δ = T u
    for _ in range(steps):
        u = u + to_radius(T * gradient(model, loss, batches, w + T * u, reduce=reduce), rho)
        u = torch.where(norm(u) > rho, to_radius(u, rho), u)
    before, after = (mean_loss(model, loss, batches, v, reduce=reduce) for v in (w, w + T * u))
    return after - before


@checked
def lpf(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    sigma: NonNegative = 0.01,
    draws: Annotated[int, Interval("[2, inf)")] = 100,
    at: Tensor | None = None,
    *,
    scale: Literal["none", "filter"] = "none",
    seed: int = 0,
    reduce: Reduce | None = None,
) -> Estimate:
    """Estimates E_ε F(w+ε), ε ~ N(0, sigma² I): the loss seen through a low-pass filter (Bisla et al., AISTATS 2022).

    It includes the level of the loss: for a quadratic it is F(w) + sigma² tr(H) / 2. FedGF's Table 2 reports this
    measure without its scale.

    Args:
        model: The network.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        sigma: Standard deviation of the noise on every weight.
        draws: Number of Monte Carlo draws, one pass without gradient each.
        at: Flat weights ``(d,)``; by default the model's own.
        scale: "none": as above. "filter": as in the authors' program, the noise of a filter (or row) is ``sigma`` times
            its norm plus its absolute bias, that of a normalisation channel ``sigma`` times |γ| + |β|.
        seed: Seed of the noise.
        reduce: Sums over the processes, which all draw the same noise.

    Returns:
        The mean over the draws, with its standard error.

    Raises:
        UserError: If ``sigma`` is negative, ``draws`` below 2 or ``scale`` unknown; else as ``mean_loss``.
    """
    spec = FlatSpec(model)
    w = spec.vector(model) if at is None else at
    width = sigma * (filter_scale(spec, w) if scale == "filter" else torch.ones(()).to(w))
    losses = []
    for draw in range(draws):
        noise = torch.randn(spec.d, generator=generator(seed, "lpf", draw), dtype=torch.float64)
        losses.append(mean_loss(model, loss, batches, w + width * noise.to(w), reduce=reduce))
    values = torch.tensor(losses, dtype=torch.float64)
    return Estimate(values.mean().item(), values.std().item() / draws**0.5, draws)


def filter_scale(spec: FlatSpec, w: Tensor) -> Tensor:
    """Returns for each weight ‖w_f‖ + |b_f| of its filter f, the first index of its tensor, ``(d,)``."""
    sizes: dict[str, Tensor] = {}
    parts = {name: p.reshape(len(p) if p.ndim else 1, -1) for name, p in spec.split(w).items()}
    owner = {name: f"{name.removesuffix('weight').removesuffix('bias')} {len(p)}" for name, p in parts.items()}
    for name, p in parts.items():
        sizes[owner[name]] = sizes.get(owner[name], 0) + p.norm(dim=1)
    return torch.cat([sizes[owner[name]].repeat_interleave(p.shape[1]) for name, p in parts.items()])


def flatness_discrepancy(global_sharpness: float, local_sharpness: Sequence[float], sizes: Sequence[int]) -> float:
    """Returns Δ_F = |S - Σ_i (m_i/m) S_i| (FedGF Definition 1, Eq. 7).

    Args:
        global_sharpness: S, of the aggregated model on the data of all clients.
        local_sharpness: S_i, of each local model on its own data.
        sizes: m_i, number of samples of each client.

    Raises:
        UserError: If there are no samples, or not one size per local sharpness.
    """
    ensure(
        len(sizes) == len(local_sharpness) and sum(sizes) > 0,
        f"sizes: {len(sizes)} with sum {sum(sizes)} for {len(local_sharpness)} clients; give one each",
    )
    return abs(global_sharpness - sum(m * s for m, s in zip(sizes, local_sharpness, strict=True)) / sum(sizes))


@checked
def measure_discrepancy(
    model: nn.Module,
    loss: Loss,
    clients: Sequence[tuple[Tensor, Batches]],
    rho: float = 0.05,
    steps: int = 1,
) -> float:
    """Returns Δ_F of the aggregated ``model`` and its clients, each a pair (flat weights ``(d,)``, its data).

    F is the loss over the union of the clients' data. The paper does not specify how the maximum is found, its radius,
    or which clients count: here by :func:`sharpness`, over the clients passed, usually those whose w_i were averaged.

    Raises:
        UserError: As :func:`sharpness` and :func:`flatness_discrepancy`.
    """
    local = [sharpness(model, loss, batches, rho, steps, at=w) for w, batches in clients]
    sizes = [sum(batch_sizes(batches)) for _, batches in clients]
    data = [passes(batches) for _, batches in clients]
    everything = sharpness(model, loss, lambda: chain.from_iterable(batches() for batches in data), rho, steps)
    return flatness_discrepancy(everything, local, sizes)


# A round's models, without data


def cosine(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of the angle between two vectors ``(d,)``; 0 if one is zero."""
    return float(a @ b / (a.norm() * b.norm() + EPS))


def delta_epsilon(previous: Tensor, current: Tensor, rho: float) -> float:
    """Returns δ_ε = rho ‖Δ̃/‖Δ̃‖ - Δ/‖Δ‖‖, from 0 to 2 rho (FedGloSS, Eq. 6): how stale last round's direction is.

    Args:
        previous: Δ̃^{t-1}, the pseudo-gradient of the last round, ``(d,)``.
        current: Δ^t, that of this round's clients trained from the unperturbed global model, ``(d,)``.
        rho: The server's radius.
    """
    a, b = (v / (v.norm() + EPS) for v in (previous, current))
    return rho * float(torch.linalg.vector_norm(a - b))


MOST = 100
"""Most evaluations of a search."""


@dataclass(frozen=True)
class Crossing:
    """Where a loss, which falls first, is back at its value: between two rates.

    Attributes:
        lo: The loss has not risen above its value here.
        hi: It has here. Infinite if it rises nowhere where it was evaluated; 0 if it rises at once.
        evaluations: Number of passes over the data, after that at the start.
    """

    lo: float
    hi: float
    evaluations: int

    @property
    def rate(self) -> float:
        """The critical rate: the middle of the two; ``lo``, a lower bound, if the loss never rises."""
        return self.lo if math.isinf(self.hi) else (self.lo + self.hi) / 2

    @property
    def sharpness(self) -> float:
        """The critical sharpness 2 / rate; infinite if the loss rises at once."""
        return 2 / self.rate if self.rate else math.inf


@checked
def critical_rate(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    direction: Tensor,
    at: Tensor | None = None,
    *,
    first: Positive = 1e-3,
    highest: Positive | None = None,
    slope: float | None = None,
    tol: Annotated[float, Interval("(0, 0.5]")] = 1 / 16,
    reduce: Reduce | None = None,
) -> Crossing:
    """Finds η_c = inf {η > 0 : F(w - η D) > F(w)} along a direction D (arXiv:2601.16979).

    λ_c = 2 / η_c is the critical sharpness. On a quadratic it is DᵀHD / DᵀD for the gradient D, and at most λ_max; for
    other directions there is no such bound, and s D has s times the λ_c of D.

    The rate is doubled or halved until F changes sides, and then bisected. At least 8 roundings of F count as a change,
    so that noise is no descent. A value that is not finite counts as a rise. It is a crossing, and with a bump between
    two doublings not the first one.

    Args:
        model: The network; its weights are not moved.
        loss: Per-sample losses.
        batches: The data; with several processes this one's share, which may be empty.
        direction: D, ``(d,)``, with the sign of a gradient.
        at: Flat weights w, ``(d,)``; by default the model's own.
        first: The first rate; near η_c, as from an earlier measurement, about 6 evaluations do, from 1e-3 up to 18.
        highest: Where the search ends upwards; None: after 100 evaluations.
        slope: DᵀF'(w), if it is known: where it is not positive, nothing is evaluated. Otherwise a loss that rises at
            once costs about as many evaluations as the first search.
        tol: Relative width ``1 - lo / hi`` of the result.
        reduce: Sums over the processes; every process must call. None: this process has all samples.

    Returns:
        The two rates, and the number of evaluations.

    Raises:
        UserError: If ``first`` or ``tol`` is out of range; else as ``mean_loss``.
    """
    if slope is not None and slope <= 0:
        return Crossing(0.0, 0.0, 0)
    w = FlatSpec(model).vector(model) if at is None else at

    def value(rate: float) -> float:
        return mean_loss(model, loss, batches, w - rate * direction if rate else w, reduce=reduce)

    return search(value, first, tol, torch.finfo(w.dtype).eps / 2, math.inf if highest is None else highest)


def search(
    value: Callable[[float], float], first: float, tol: float, roundoff: float = 2**-53, highest: float = math.inf
) -> Crossing:
    """Returns where a function of a rate, which falls first, is back at its value at 0; see `critical_rate`."""
    start, evaluations = value(0.0), 0
    noise = 8 * roundoff * abs(start)

    def rise(rate: float) -> float:
        nonlocal evaluations
        evaluations += 1
        change = value(rate) - start
        return change if math.isfinite(change) else math.inf

    rate, change = first, rise(first)
    if abs(change) <= noise and (half := rise(first / 2)) < -noise:  # the first rate is the crossing
        rate, change = first / 2, half
    while abs(change) <= noise and evaluations < MOST and rate < highest:  # too short to tell
        rate *= 2
        change = rise(rate)
        if change > noise:
            return Crossing(0.0, 0.0, evaluations)
    if change > 0:
        level, halvings = False, 0
        while change >= -noise and evaluations < MOST:
            if level and abs(change) <= noise:
                return Crossing(0.0, 0.0, evaluations)
            level = abs(change) <= noise  # at the crossing, or too short to tell: half of it says which
            rate, halvings = rate / 2, halvings + 1
            change = rise(rate)
            if halvings == 8 and change > noise and rise(rate * 2**-20) > noise:  # does it fall at all?
                return Crossing(0.0, 0.0, evaluations)
        if change >= -noise:
            return Crossing(0.0, 0.0, evaluations)
        lo, hi = rate, 2 * rate
    else:
        while change <= 0 and evaluations < MOST and rate < highest:
            rate *= 2
            change = rise(rate)
        if change <= 0:
            return Crossing(rate, math.inf, evaluations)
        lo, hi = rate / 2, rate
    while 1 - lo / hi > tol:
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if rise(middle) > 0 else (middle, hi)
    return Crossing(lo, hi, evaluations)
