"""The aggregation rules, which combine a cohort's uploads for the server step: interface, mean, and robust ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    Checked,
    ClientContext,
    Init,
    Interval,
    Positive,
    PositiveInt,
    RoundContext,
    State,
    Upload,
    Uploads,
    accumulator_dtype,
    ensure,
    to_device,
)
from fl_lightning.trainer.aggregation.noise import NoiseKey
from fl_lightning.trainer.participation.samplers import CohortSampler

BLOCK = 1 << 20
"""Maximum number of values in a block of rows, over all clients."""
Minority = Annotated[float, Interval("[0, 0.5)")]


@dataclass(frozen=True)
class Plan:
    """The facts about a run that a rule needs before the first round.

    Attributes:
        objective: The local objective.
        sampler: Draws the cohorts.
        m: Number of clients.
        rounds: Number of rounds.
        local_steps: Local steps of each client; None: clients differ in it.
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
        known: Reference value for each upload, by name: what the server already knows the upload to be close to; see
            `LocalObjective.references`.
        clients: The clients' contexts.
        server: The server's state.
        ctx: The phase's context.
        seed: Seed of the run.
        refused: Number of uploads that were left out because they are not finite.
    """

    arrived: Sequence[Upload]
    known: Mapping[str, Tensor]
    clients: Sequence[ClientContext]
    server: State
    ctx: RoundContext
    seed: int
    refused: int = 0

    def blocks(self, *names: str) -> Iterator[Tensor]:
        """Yields the uploads minus their reference values (0 if there is none), in blocks ``(n, coordinates)``.

        The values are float64, and only one block is in memory at a time.

        Args:
            *names: Names of uploads, processed one after another; all by default.
        """
        width = max(1, BLOCK // max(1, len(self.clients)))
        for name in names or self.arrived[0]:
            rows = [upload[name].reshape(-1) for upload in self.arrived]
            dtype = accumulator_dtype(rows[0].device)
            for start in range(0, max(1, len(rows[0])), width):
                block = torch.stack([row[start : start + width] for row in rows]).to(dtype)
                known = self.known.get(name)
                yield block if known is None else block - known.reshape(-1)[start : start + width].to(dtype)


def check_references(key: str, objective: LocalObjective) -> None:
    """Checks that what is new in each upload of an algorithm is known.

    Args:
        key: The setting that needs it.
        objective: The local objective.

    Raises:
        UserError: If an upload has no reference.
    """
    missing = [name for name in objective.wire[1] if name not in objective.all_references]
    ensure(
        not missing,
        f"{key}: {type(objective).__name__} has no references for its upload {', '.join(missing)}, so that what it "
        "says of a client has no bound; choose another algorithm",
    )


class Aggregation(Checked, key="trainer.aggregation"):
    """Base class of the rules. A subclass defines ``__call__``, which combines one block of coordinates of all uploads.

    Attributes:
        by_rows: Whether one process must see all uploads of a cohort.
        empty: Whether the rule gives a result for a cohort without clients.
        server_state: State that the server keeps for the rule: initial values by name.
        noise_key: Key of the rule's noise in one run; None: it draws none.
    """

    by_rows = True
    empty = False
    server_state: Mapping[str, Init] = {}
    noise_key: NoiseKey | None = None

    @property
    def identity(self) -> str | None:
        """Text that must be the same when a run is resumed; None: the rule may change."""
        return None

    def bind(self, plan: Plan) -> "Aggregation":
        """Returns the rule for one run.

        Raises:
            UserError: If the rule does not fit the run.
        """
        return self

    def check_round(self) -> None:
        """Checks that the run may do its first round.

        Raises:
            UserError: If it may not, for example because the privacy budget is too small.
        """

    def check(self, n: int, refused: int = 0) -> None:
        """Checks that a cohort is large enough.

        Args:
            n: Number of clients whose uploads are finite.
            refused: Number of clients whose uploads are not finite.

        Raises:
            UserError: If the cohort is too small.
        """

    def weigh(self, received: Received, weights: Tensor) -> Tensor:
        """Returns the weights that ``__call__`` gets, ``(n,)``. A rule may derive them from whole uploads.

        Args:
            received: The uploads.
            weights: Numbers of samples of the clients, or ones, ``(n,)``.
        """
        return weights

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns one value for each coordinate, ``(coordinates,)``.

        Args:
            rows: The uploads minus their reference values, ``(n, coordinates)``.
            weights: Weights of the clients, ``(n,)``; see `weigh`.
        """
        raise TypeError(f"{type(self).__name__} must define __call__")

    def cohort_seed(self, seed: int) -> int:
        """Returns the seed of the cohorts, in place of the run's."""
        return seed

    # Methods that a phase of a round calls

    def uploads(
        self, objective: LocalObjective, accepted: Sequence[ClientContext], ctx: RoundContext, like: Tensor
    ) -> Uploads:
        """Returns empty averages, for `fill`.

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
        """Fills the averages by this rule, name by name: unweighted, and weighted by samples if models are."""
        self.check(len(received.clients), received.refused)
        device = received.server.w.device
        counts = to_device([float(c.n_k) for c in received.clients], device, accumulator_dtype(device))
        kinds = [(torch.ones_like(counts), uploads.n), (counts, uploads.samples)]
        weights = [self.weigh(received, w) for w, _ in kinds[: 2 if uploads.weighting == "samples" else 1]]

        def sums(name: str, _: object) -> Tensor:
            shape, like = received.arrived[0][name].shape, received.server.w
            blocks = [torch.stack([self._combined(b, w.to(b)) for w in weights]) for b in received.blocks(name)]
            means = torch.cat(blocks, dim=1).view(len(weights), *shape)
            means = means + received.known[name].to(means) if name in received.known else means
            return torch.stack([means[min(i, len(means) - 1)] * total for i, (_, total) in enumerate(kinds)]).to(like)

        uploads.change(sums)

    def _combined(self, rows: Tensor, weights: Tensor) -> Tensor:
        combined: Any = self(rows, weights)  # that of a user's rule may be anything
        form = f"shape {tuple(combined.shape)}" if isinstance(combined, Tensor) else f"{combined!r:.40}"
        ensure(
            isinstance(combined, Tensor) and combined.shape == rows.shape[1:],
            f"trainer.aggregation = {type(self).__name__}: returns {form}; return one value for each coordinate, "
            f"({rows.shape[1]},)",
        )
        return combined  # type: ignore[no-any-return]

    def phase_end(self, server: State, uploads: Uploads) -> State:
        """Returns the server's state after its step, with the rule's own state updated."""
        return server

    def metrics(self, uploads: Uploads, known: Mapping[str, Tensor], server: State) -> dict[str, float]:
        """Returns metrics of a phase that started from this server's state."""
        return {}


class Mean(Aggregation):
    """The mean, with the algorithm's weighting. It holds one upload at a time."""

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
        ordered, total = weights[order], weights.sum()
        until = ordered.cumsum(0)
        low, high = self.share * total, (1 - self.share) * total
        kept = until.clamp(max=high) - (until - ordered).clamp(min=low)
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
        norms = torch.stack([(block * block).sum(1) for block in received.blocks()]).sum(0).sqrt()
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
        n, products = len(received.clients), torch.stack([block @ block.T for block in received.blocks()]).sum(0)
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
