"""The state of a run, which a round replaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.core import State, accumulator_dtype, earlier
from fl_lightning.trainer.participation.faults import Failures, counted

T = TypeVar("T")
ROUNDS = 5
"""Rounds whose norms are kept."""
Norms = Sequence[Mapping[str, Tensor]]
"""Norms of the server's vectors, after each of the last rounds."""


def by_key(objects: Sequence[T]) -> dict[str, T]:
    """Returns objects by the key of their state: the class, numbered from the second object of the same class on."""
    names = [type(x).__name__ for x in objects]
    return {f"{name}.{n}" if n else name: x for name, n, x in zip(names, earlier(names), objects, strict=True)}


def norms(server: State) -> dict[str, Tensor]:
    """Returns the norm of each of the server's vectors ``(d,)``, as scalars on its device: nothing waits for them."""
    vectors = {name: v for name, v in server.items() if v.shape == server.w.shape}
    return {name: torch.linalg.vector_norm(v, dtype=accumulator_dtype(v.device)) for name, v in vectors.items()}


@dataclass(frozen=True, repr=False)
class RunState:
    """The state of a run between two rounds, without the clients' rows.

    A round replaces it as a whole and changes nothing in place. So a reference is a snapshot, and a checkpoint holds
    these fields under these names.

    Attributes:
        server: The server's state.
        round: Number of rounds done.
        total_bits: Bits sent and uploaded so far.
        metrics: The latest value of every metric.
        failures: How often each client was refused, dropped or late, by kind and id.
        norms: Norms of the server's vectors after each of the last rounds.
        training: What training without rounds, centralized or asynchronous, needs in addition to continue.
    """

    server: State
    round: int = 0
    total_bits: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failures: Failures = field(default_factory=dict)
    norms: Norms = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns the round, the server's state, and the names of the metrics."""
        return f"RunState(round {self.round}, server: {self.server}, metrics: {', '.join(self.metrics) or 'none'})"

    def after_round(
        self,
        server: State,
        bits: int = 0,
        failed: Mapping[str, Sequence[int]] | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> "RunState":
        """Returns the state after one more round.

        Args:
            server: The server's next state.
            bits: Bits that went over the wire.
            failed: Clients that were refused, dropped or late, by kind.
            training: What centralized training needs in addition to continue.
        """
        return RunState(
            server=server,
            round=self.round + 1,
            total_bits=self.total_bits + bits,
            metrics=self.metrics,
            failures=counted(self.failures, failed or {}),
            norms=(*self.norms[1 - ROUNDS :], norms(server)),
            training=training or {},
        )
