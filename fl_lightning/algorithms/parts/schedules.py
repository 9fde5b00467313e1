"""Schedules of the local learning rate by round."""

import math
from typing import Annotated

from fl_lightning.core import Checked, Interval, PositiveInt, UnitInterval


class Schedule(Checked, key="model.optimizer.schedule"):
    """Base class of the schedules; a subclass defines ``__call__(t, rounds)``."""

    def __call__(self, t: int, rounds: int) -> float:
        """Returns the factor of the learning rate in round ``t`` of ``rounds``, counted from 0."""
        raise TypeError(f"{type(self).__name__} must define __call__")


class Cosine(Schedule):
    """Half a cosine from 1 to ``floor`` over all rounds.

    Args:
        floor: Factor at the end.
    """

    def __init__(self, floor: UnitInterval = 0.0) -> None:
        self.floor = floor

    def __call__(self, t: int, rounds: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * t / rounds)) / 2


class Poly(Schedule):
    """``(1 - t / rounds) ** power``, common in segmentation (FedDrive: 0.9).

    FedDrive's own code creates a schedule for each client and round, with a length of 10,000 times its local steps:
    there the learning rate hardly falls.

    Args:
        power: Exponent; 1 falls linearly.

    Raises:
        UserError: If it is negative.
    """

    def __init__(self, power: Annotated[float, Interval("[0, 100]")] = 0.9) -> None:
        self.power = power

    def __call__(self, t: int, rounds: int) -> float:
        return float((1 - t / rounds) ** self.power)


class Cyclic(Schedule):
    """A sawtooth: ``(1 - s) + s floor``, ``s = ((t mod period) + 1) / period``: SWA's cycle, from the first round on.

    Args:
        period: Rounds of a cycle.
        floor: Factor in its last round.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(self, period: PositiveInt = 10, floor: UnitInterval = 0.01) -> None:
        self.period, self.floor = period, floor

    def __call__(self, t: int, rounds: int) -> float:
        return in_cycle(t, self.period, 1.0, self.floor)


def in_cycle(t: int, period: int, first: float, last: float) -> float:
    """``(1 - s) first + s last`` with ``s = ((t mod period) + 1) / period`` (FedASAM + SWA, ECCV 2022, Algorithm 1)."""
    s = (t % period + 1) / period
    return (1 - s) * first + s * last
