"""Aggregation rules: from the cohort's uploads to what the server's step sees of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    ClientContext,
    Init,
    RoundContext,
    State,
    Upload,
    Uploads,
    accumulator_dtype,
    ensure,
    require,
)
from fl_lightning.trainer.samplers import CohortSampler

BLOCK = 1 << 20
"""Numbers of a block of rows, over all clients."""


@dataclass(frozen=True)
class Plan:
    """What a run does, as far as a rule must know it beforehand.

    Attributes:
        objective: The local objective.
        sampler: Draws the cohorts.
        m: Number of clients.
        rounds: Number of rounds.
        local_steps: Local steps of each client; None: they depend on its number of samples.
    """

    objective: LocalObjective
    sampler: CohortSampler
    m: int
    rounds: int
    local_steps: int | None


@dataclass(frozen=True)
class Received:
    """The finite uploads of a phase, on the process that aggregates them.

    Attributes:
        arrived: Upload of each client, in cohort order.
        known: By name the value of which the server knows that uploads lie near it; see `LocalObjective.references`.
        clients: The clients' contexts.
        server: The server's state.
        ctx: The phase's context.
        seed: Seed of the run.
        refused: Number of further uploads, which are not finite.
    """

    arrived: Sequence[Upload]
    known: Mapping[str, Tensor]
    clients: Sequence[ClientContext]
    server: State
    ctx: RoundContext
    seed: int
    refused: int = 0

    def blocks(self, *names: str) -> Iterator[Tensor]:
        """Differences of the uploads from the known values (0 if there is none), as blocks ``(n, coordinates)``.

        They are float64, and only one block of them is held at a time.

        Args:
            *names: The uploaded names, one after another; all by default.
        """
        width = max(1, BLOCK // max(1, len(self.clients)))
        for name in names or self.arrived[0]:
            rows = [upload[name].reshape(-1) for upload in self.arrived]
            dtype = accumulator_dtype(rows[0].device)
            for start in range(0, len(rows[0]), width):
                block = torch.stack([row[start : start + width] for row in rows]).to(dtype)
                known = self.known.get(name)
                yield block if known is None else block - known.reshape(-1)[start : start + width].to(dtype)

    def products(self) -> Tensor:
        """Inner products of the clients' differences, over all names jointly, ``(n, n)``."""
        return torch.stack([block @ block.T for block in self.blocks()]).sum(0)

    def norms(self) -> Tensor:
        """Norms of the clients' differences, over all names jointly, ``(n,)``."""
        return torch.stack([(block * block).sum(1) for block in self.blocks()]).sum(0).sqrt()


class Aggregation:
    """Base of the rules. A subclass defines ``__call__``, on the uploads of a cohort in a block of coordinates.

    Attributes:
        by_rows: Whether one process must see all uploads of a cohort.
        empty: Whether there is a result for a cohort without clients.
        server_state: State that the server keeps for the rule, by name with its initial value.
    """

    by_rows = True
    empty = False
    server_state: Mapping[str, Init] = {}

    @property
    def identity(self) -> str | None:
        """What a resumed run must have in common, in words; None: the rule may change."""
        return None

    def bind(self, plan: Plan) -> Aggregation:
        """Returns the rule for one run.

        Raises:
            UserError: If it does not fit what the run does.
        """
        return self

    def check_round(self) -> None:
        """Checks that the first round may be done.

        Raises:
            UserError: If it may not.
        """

    def check(self, n: int, refused: int = 0) -> None:
        """Checks that a cohort is large enough.

        Args:
            n: Number of clients whose uploads are finite.
            refused: Number of the others.

        Raises:
            UserError: If it is too small.
        """

    def weigh(self, received: Received, weights: Tensor) -> Tensor:
        """Returns the weights that ``__call__`` gets, ``(n,)``: a rule may look at whole uploads first.

        Args:
            received: The uploads.
            weights: Numbers of samples of the clients, or ones, ``(n,)``.
        """
        return weights

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns one value for each coordinate, ``(coordinates,)``.

        Args:
            rows: Differences of the uploads from what the server knows, ``(n, coordinates)``.
            weights: Of the clients, ``(n,)``; see `weigh`.
        """
        raise TypeError(f"{type(self).__name__} must define __call__")

    # What a phase calls

    def uploads(
        self, objective: LocalObjective, accepted: Sequence[ClientContext], ctx: RoundContext, like: Tensor
    ) -> Uploads:
        """Averages to be filled.

        Args:
            objective: The local objective.
            accepted: Contexts of the clients whose uploads are finite.
            ctx: The phase's context.
            like: A tensor with the dtype and device of the uploads.
        """
        return Uploads(objective.wire[1], objective.weighting, accepted, like)

    def shapes(self, shapes: Mapping[str, list[int]], known: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Returns the shape of each average, from those of the uploads and the known values, by name."""
        return dict(shapes)

    def fill(self, uploads: Uploads, received: Received) -> None:
        """Fills the averages by this rule, name by name: unweighted, and weighted by samples if the model is."""
        n = len(received.clients)
        self.check(n, received.refused)
        ones = torch.ones(n, dtype=torch.float64)
        counts = torch.tensor([float(c.n_k) for c in received.clients], dtype=torch.float64)
        kinds = [(ones, uploads.n), (counts, uploads.samples)]
        weights = [self.weigh(received, w) for w, _ in kinds[: 2 if uploads.weighting == "samples" else 1]]

        def sums(name: str, _: object) -> Tensor:
            like = received.arrived[0][name]
            blocks = [torch.stack([self(b, w.to(b)) for w in weights]) for b in received.blocks(name)]
            means = torch.cat(blocks, dim=1).view(len(weights), *like.shape)
            if name in received.known:
                means = means + received.known[name].to(means)
            return torch.stack([means[min(i, len(means) - 1)] * total for i, (_, total) in enumerate(kinds)]).to(like)

        uploads.change(sums)

    def phase_end(self, server: State, uploads: Uploads) -> State:
        """Returns the server's state after its step, with that of the rule."""
        return server

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        """Returns metrics of a phase that started from this server's state."""
        return {}


class Mean(Aggregation):
    """The mean, weighted as the algorithm asks for; one upload at a time."""

    by_rows = False

    def fill(self, uploads: Uploads, received: Received) -> None:
        for upload, client in zip(received.arrived, received.clients, strict=True):
            uploads.add(upload, client.n_k)


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

    On either side values of this share of the total weight are left out; a value on the border counts in part. Bad
    clients with at most this share of the weight keep no coordinate outside the range of the others.

    Args:
        share: Share of the weight that is left out on either side, from 0 to below 0.5.
    """

    def __init__(self, share: float = 0.2) -> None:
        require(0 <= share < 0.5, "trainer.aggregation.share", share, "from 0 to below 0.5")
        self.share = share

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        values, order = rows.sort(dim=0)
        own, total = weights[order], weights.sum()
        until = own.cumsum(0)
        low, high = self.share * total, (1 - self.share) * total
        kept = until.clamp(max=high) - (until - own).clamp(min=low)
        kept = torch.where(kept > 1e-9 * total, kept, 0.0)  # of what is left out, rounding leaves nothing
        return (kept * values).sum(0) / kept.sum(0)


class WeightedSum(Aggregation):
    """Base of the rules that give every client one factor, from its whole upload; a subclass defines `weigh`."""

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        return weights @ rows


class NormClipping(WeightedSum):
    """The weighted mean of the differences from what the server knows, each shortened to a norm (Sun et al., 2019).

    The norm is joint over all that a client uploads. A client moves the mean by at most its weight times the norm.

    Args:
        clip: The largest norm; null: the median of the norms of the round's cohort.
    """

    def __init__(self, clip: float | None = None) -> None:
        require(clip is None or clip > 0, "trainer.aggregation.clip", clip, "above 0, or null for the median norm")
        self.clip = clip

    def bind(self, plan: Plan) -> NormClipping:
        objective = plan.objective
        missing = [name for name in objective.wire[1] if name not in objective.all_references]
        ensure(
            not missing,
            f"trainer.aggregation = {type(self).__name__}: {type(objective).__name__} has no references for its upload "
            f"{', '.join(missing)}, so that what is new in it is unknown; choose another rule",
        )
        return self

    def weigh(self, received: Received, weights: Tensor) -> Tensor:
        norms = received.norms()
        clip = norms.quantile(0.5) if self.clip is None else torch.full_like(norms[0], self.clip)
        return weights.to(norms) / weights.sum().to(norms) * shortening(norms, clip)


class MultiKrum(WeightedSum):
    """The weighted mean of the uploads that lie nearest to their neighbours (Blanchard et al., NeurIPS 2017).

    The score of a client is the sum of its squared distances to its n - f - 2 nearest others, with n the cohort's size
    and f the number of bad clients; the distance is joint over all that a client uploads.

    Args:
        share: Largest share of bad clients in a cohort: f is this share of n, rounded up; clients whose uploads are
            refused, as they are not finite, count among both, and are left out. Needs n > 2 f + 2.
        keep: Number of clients in the mean; null: n - f.
    """

    def __init__(self, share: float = 0.2, keep: int | None = None) -> None:
        require(0 <= share < 0.5, "trainer.aggregation.share", share, "from 0 to below 0.5")
        require(keep is None or keep >= 1, "trainer.aggregation.keep", keep, "at least 1, or null for n - f")
        self.share, self.keep = share, keep

    def bad(self, n: int, refused: int = 0) -> int:
        """Returns the number f of bad clients that ``n`` clients may have, next to those that were refused."""
        return max(0, math.ceil(self.share * (n + refused) - 1e-9) - refused)

    def check(self, n: int, refused: int = 0) -> None:
        f = self.bad(n, refused)
        ensure(
            n > 2 * f + 2,
            f"trainer.aggregation.share = {self.share}: {type(self).__name__} needs cohorts of more than 2 f + 2 "
            f"clients, and this one has {n}, with f = {f} bad ones; lower it, or raise trainer.clients_per_round",
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

    def __init__(self, share: float = 0.2) -> None:
        super().__init__(share, keep=1)


def shortening(norms: Tensor, clip: Tensor) -> Tensor:
    """Factors that shorten vectors of these norms to at most ``clip``; 1 for those that are not longer."""
    return torch.where(norms > clip, clip / norms, 1.0)
