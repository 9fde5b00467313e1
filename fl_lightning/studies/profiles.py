"""Performance profiles, of what reaching the target costs over all columns of a study; and Pareto fronts."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fl_lightning.results.compare import Group
from fl_lightning.results.metrics import markdown

TAU, RESAMPLES = 4.0, 1000
"""Up to how many times the smallest cost a method scores, and how often the seeds are drawn again."""
COSTS = {"target_round": "by rounds", "target_passes": "by passes", "target_bits": "by bits"}
"""What is compared, in `Summary`."""
LEGEND = (
    "What reaching the targets costs: the score is the mean of a method's performance profile from 1 to 4 times the "
    "smallest cost, over the columns (1: the cheapest everywhere; 0, left out: nowhere within 4 times), with 95 % "
    "bootstrap intervals over the seeds. Never reaching a target costs infinitely much."
)


def scores(costs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, tuple[float, float, float]]:
    """Returns the score of each method, and its bootstrap interval.

    The cost of a method in a column is the median over its seeds. Its performance profile is the share of the columns
    in which that is at most tau times the smallest one of all methods (Dolan and Moré, 2002); the score is its mean
    from tau 1 to `TAU`.

    Args:
        costs: Of each method in each column, the cost with each seed; infinite, if it never reaches the target.
    """
    random = np.random.default_rng(0)

    def medians(seeds: Sequence[float]) -> list[float]:
        """That of the seeds first, then those of the resamples."""
        drawn = random.integers(len(seeds), size=(RESAMPLES, len(seeds)))
        return [*map(float, np.median(np.asarray(seeds, float)[np.vstack([np.arange(len(seeds)), drawn])], axis=1))]

    found = np.array([[medians(seeds) for seeds in columns] for columns in costs.values()])
    with np.errstate(invalid="ignore"):  # inf / inf: nobody reaches the target there, and nobody scores
        ratios = np.nan_to_num(found / found.min(axis=0), nan=math.inf)
    each = np.clip((TAU - ratios) / (TAU - 1), 0, 1).mean(axis=1)
    lows, highs = np.quantile(each, [0.025, 0.975], axis=1)
    return dict(zip(costs, zip(each[:, 0].tolist(), lows.tolist(), highs.tolist(), strict=True), strict=True))


def table(columns: Sequence[Sequence[Group]]) -> str:
    """Returns the table of scores, as Markdown, of the methods that all columns have; nothing without a target."""
    runs = [{group.name: group.runs for group in groups} for groups in columns]
    if any(run.target is None for of in runs for each in of.values() for run in each):
        return ""
    names = [name for name in runs[0] if all(name in of for of in runs)]
    found = {}
    for cost, head in COSTS.items():
        needed = {name: [[_cost(getattr(run, cost)) for run in of[name]] for of in runs] for name in names}
        if any(math.isfinite(each) for of in needed.values() for seeds in of for each in seeds):
            found[head] = scores(needed)
    if not found:
        return ""
    names.sort(key=lambda name: -max(of[name][0] for of in found.values()))
    scored = [name for name in names if any(of[name][0] for of in found.values())]
    lines = [[name, *("{:.2f} [{:.2f}, {:.2f}]".format(*of[name]) for of in found.values())] for name in scored]
    return f"{LEGEND}\n\n{markdown([['score', *found], *lines]).strip()}"


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the places of the points that no other one surpasses in both numbers, of which large ones are good."""
    return [k for k, (x, y) in enumerate(points) if not any(v > x and w > y for v, w in points)]


def _cost(value: float | None) -> float:
    return math.inf if value is None else value
