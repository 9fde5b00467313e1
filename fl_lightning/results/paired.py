"""Differences of two groups of runs over the same seeds, with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.results.compare import Group
from fl_lightning.results.metrics import average, deviation


@dataclass(frozen=True)
class Difference:
    """A statistic of one group minus that of another, over their common seeds.

    Attributes:
        mean: Mean of the differences.
        half: Half the width of the 95 % interval of the mean, by Student's t; NaN of a single seed.
        seeds: Number of common seeds in which both are finite.
    """

    mean: float
    half: float
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return self.mean - self.half, self.mean + self.half

    def text(self, form: str = "+.4f", scale: float = 1.0) -> str:
        """Returns the difference with its interval, if it has one, in a format and multiplied by a factor."""
        mean, *ends = (format(scale * value, form) for value in (self.mean, *self.ends))
        return mean if math.isnan(self.half) else f"{mean} [{', '.join(ends)}]"


def difference(group: Group, reference: Group, name: str) -> Difference | None:
    """Returns the paired difference of a statistic; None without a common seed.

    Args:
        group: Runs of one config.
        reference: Runs of another config.
        name: The statistic, as in `Group.values`.
    """
    ours, theirs = _by_seed(group, name), _by_seed(reference, name)
    apart = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return interval(apart) if apart else None


def interval(apart: Sequence[float]) -> Difference:
    """Returns the mean of differences, at least one, with its 95 % interval."""
    from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import

    n = len(apart)
    half = math.nan if n < 2 else float(stdtrit(n - 1, 0.975)) * (deviation(apart) or 0.0) / math.sqrt(n)
    return Difference(average(apart), half, n)


def _by_seed(group: Group, name: str) -> Mapping[object, float]:
    found = ((seed, group.value(run, name)) for seed, run in zip(group.seeds, group.runs, strict=True))
    return {seed: value for seed, value in found if value is not None and math.isfinite(value)}
