"""Critical sharpness: the step along a direction at which the loss is back at its value, by forward passes alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fl_lightning.core import FlatSpec, Interval, Positive, checked
from fl_lightning.flatness.functional import Batches, Loss, Reduce, mean_loss

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
        found = value(rate) - start
        return found if math.isfinite(found) else math.inf

    rate, found = first, rise(first)
    if abs(found) <= noise and (half := rise(first / 2)) < -noise:  # the first rate is the crossing
        rate, found = first / 2, half
    while abs(found) <= noise and evaluations < MOST and rate < highest:  # too short to tell
        rate *= 2
        found = rise(rate)
        if found > noise:
            return Crossing(0.0, 0.0, evaluations)
    if found > 0:
        level, halvings = False, 0
        while found >= -noise and evaluations < MOST:
            if level and abs(found) <= noise:
                return Crossing(0.0, 0.0, evaluations)
            level = abs(found) <= noise  # at the crossing, or too short to tell: half of it says which
            rate, halvings = rate / 2, halvings + 1
            found = rise(rate)
            if halvings == 8 and found > noise and rise(rate * 2**-20) > noise:  # does it fall at all?
                return Crossing(0.0, 0.0, evaluations)
        if found >= -noise:
            return Crossing(0.0, 0.0, evaluations)
        lo, hi = rate, 2 * rate
    else:
        while found <= 0 and evaluations < MOST and rate < highest:
            rate *= 2
            found = rise(rate)
        if found <= 0:
            return Crossing(rate, math.inf, evaluations)
        lo, hi = rate / 2, rate
    while 1 - lo / hi > tol:
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if rise(middle) > 0 else (middle, hi)
    return Crossing(lo, hi, evaluations)
