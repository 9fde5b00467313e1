"""The interface of the aggregation rules, which combine a cohort's uploads for the server step, and the mean."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    Checked,
    ClientContext,
    Init,
    RoundContext,
    State,
    Upload,
    Uploads,
    accumulator_dtype,
    ensure,
    to_device,
)
from fl_lightning.trainer.aggregation.accountant import NoiseKey
from fl_lightning.trainer.participation.samplers import CohortSampler

BLOCK = 1 << 20
"""Maximum number of values in a block of rows, over all clients."""


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

    def products(self) -> Tensor:
        """Returns the inner products of the clients' differences, over all names jointly, ``(n, n)``."""
        return torch.stack([block @ block.T for block in self.blocks()]).sum(0)

    def norms(self) -> Tensor:
        """Returns the norms of the clients' differences, over all names jointly, ``(n,)``."""
        return torch.stack([(block * block).sum(1) for block in self.blocks()]).sum(0).sqrt()


def check_references(key: str, objective: LocalObjective) -> None:
    """Checks that what is new in each upload of an algorithm is known.

    Args:
        key: The setting that needs it.
        objective: The local objective.

    Raises:
        UserError: If an upload has no reference.
    """
    missing = [name for name in objective.wire[1] if name not in objective.all_references]
    unknown = f"{type(objective).__name__} has no references for its upload {', '.join(missing)}"
    ensure(not missing, f"{key}: {unknown}, so that what it says of a client has no bound; choose another algorithm")


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
            like = received.arrived[0][name]
            blocks = [torch.stack([self._combined(b, w.to(b)) for w in weights]) for b in received.blocks(name)]
            means = torch.cat(blocks, dim=1).view(len(weights), *like.shape)
            means = means + received.known[name].to(means) if name in received.known else means
            return torch.stack([means[min(i, len(means) - 1)] * total for i, (_, total) in enumerate(kinds)]).to(like)

        uploads.change(sums)

    def _combined(self, rows: Tensor, weights: Tensor) -> Tensor:
        combined: Any = self(rows, weights)  # that of a user's rule may be anything
        form = f"shape {tuple(combined.shape)}" if isinstance(combined, Tensor) else f"{combined!r:.40}"
        wrong = f"trainer.aggregation = {type(self).__name__}: returns {form}"
        right = isinstance(combined, Tensor) and combined.shape == rows.shape[1:]
        ensure(right, f"{wrong}; return one value for each coordinate, ({rows.shape[1]},)")
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
