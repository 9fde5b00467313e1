"""Robust aggregation rules."""

import math
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.core import Interval, Positive, PositiveInt, ensure
from fl_lightning.trainer.aggregation.base import Aggregation, Plan, Received, check_references

Minority = Annotated[float, Interval("[0, 0.5)")]


class CoordinateMedian(Aggregation):
    """The median of each coordinate (Yin et al., ICML 2018), weighted: half of the weight lies on either side.

    Bad clients with less than half of the weight keep no coordinate outside the range of the others.
    """

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        values, order = rows.sort(dim=0)
        below, half = weights[order].cumsum(0), weights.sum() / 2
        lower, upper = (reached.int().argmax(0, keepdim=True) for reached in (below >= half, below > half))
        return (values.gather(0, lower) + values.gather(0, upper))[0] / 2


class TrimmedMean(Aggregation):
    """The mean of each coordinate without its smallest and largest values (Yin et al., ICML 2018), weighted.

    The rule leaves out the smallest and the largest values that hold ``share`` of the total weight; a value on the
    border counts in part. Bad clients with at most this share of the weight keep no coordinate outside the range of
    the others.

    Args:
        share: Share of the weight that the rule leaves out at each end, from 0 to below 0.5.
    """

    def __init__(self, share: Minority = 0.2) -> None:
        self.share = share

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        values, order = rows.sort(dim=0)
        own, total = weights[order], weights.sum()
        until = own.cumsum(0)
        low, high = self.share * total, (1 - self.share) * total
        kept = until.clamp(max=high) - (until - own).clamp(min=low)
        kept = torch.where(kept > 1e-9 * total, kept, 0.0)  # values that are left out keep no weight by rounding
        return (kept * values).sum(0) / kept.sum(0)


class WeightedSum(Aggregation):
    """Base class of the rules that give each client one factor, from its whole upload. A subclass defines `weigh`."""

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        return weights @ rows


class NormClipping(WeightedSum):
    """The weighted mean of the uploads' differences from their references, clipped to a norm (Sun et al., 2019).

    The norm is joint over all uploads of a client. A client moves the mean by at most its weight times the norm.

    Args:
        clip: The largest norm; null: the median of the norms of the round's cohort.
    """

    def __init__(self, clip: Positive | None = None) -> None:
        self.clip = clip

    def bind(self, plan: Plan) -> "NormClipping":
        check_references(f"trainer.aggregation = {type(self).__name__}", plan.objective)
        return self

    def weigh(self, received: Received, weights: Tensor) -> Tensor:
        norms = received.norms()
        clip = norms.quantile(0.5) if self.clip is None else torch.full_like(norms[0], self.clip)
        return weights.to(norms) / weights.sum().to(norms) * shortening(norms, clip)


class MultiKrum(WeightedSum):
    """The weighted mean of the uploads that lie nearest to their neighbours (Blanchard et al., NeurIPS 2017).

    The score of a client is the sum of its squared distances to its n - f - 2 nearest others, with n the cohort's size
    and f the number of bad clients; the distance is joint over all uploads of a client.

    Args:
        share: Largest share of bad clients in a cohort; f is this share of n, rounded up. Clients whose uploads are
            refused because they are not finite count in n and in f, and are left out. The rule needs n > 2 f + 2.
        keep: Number of clients in the mean; null: n - f.
    """

    def __init__(self, share: Minority = 0.2, keep: PositiveInt | None = None) -> None:
        self.share, self.keep = share, keep

    def bad(self, n: int, refused: int = 0) -> int:
        """Returns the number f of bad clients among ``n`` clients, in addition to the refused ones."""
        return max(0, math.ceil(self.share * (n + refused) - 1e-9) - refused)

    def check(self, n: int, refused: int = 0) -> None:
        f = self.bad(n, refused)
        ensure(
            n > 2 * f + 2,
            f"trainer.aggregation.share = {self.share}: {type(self).__name__} needs cohorts of more than 2 f + 2 "
            f"clients, and this one has {n}, with f = {f} bad ones; lower it, or take larger cohorts "
            "(trainer.clients_per_round, those of trainer.sampler, or without rounds trainer.asynchronous.buffer)",
        )

    def weigh(self, received: Received, weights: Tensor) -> Tensor:
        n, products = len(received.clients), received.products()
        f, squares = self.bad(n, received.refused), products.diagonal()
        distances = (squares[:, None] + squares - 2 * products).clamp(min=0).nan_to_num(nan=math.inf)
        distances.fill_diagonal_(0)  # a client is the first of its neighbours
        scores = distances.sort(dim=1).values[:, : n - f - 1].sum(1)
        kept = scores.argsort(stable=True)[: n - f if self.keep is None else min(self.keep, n)]
        chosen = torch.zeros_like(scores)
        chosen[kept] = weights.to(scores)[kept]
        return chosen / chosen.sum()


class Krum(MultiKrum):
    """The one upload that lies nearest to its neighbours (Blanchard et al., NeurIPS 2017); see `MultiKrum`.

    Args:
        share: As for `MultiKrum`.
    """

    def __init__(self, share: Minority = 0.2) -> None:
        super().__init__(share, keep=1)


def shortening(norms: Tensor, clip: Tensor) -> Tensor:
    """Returns the factors that shorten vectors of these norms to at most ``clip``; 1 for shorter vectors."""
    return torch.where(norms > clip, clip / norms, 1.0)
