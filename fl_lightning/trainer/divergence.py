"""Why a round has no finite result."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.core import DivergenceError, FlatSpec, State, accumulator_dtype, is_finite

ROUNDS = 5
"""Rounds whose norms are kept."""
Norms = Sequence[Mapping[str, Tensor]]
"""Norms of the server's vectors, after each of the last rounds."""


def norms(server: State, d: int) -> dict[str, Tensor]:
    """Returns the norm of each vector ``(d,)`` of the server, as scalars on its device: nothing waits for them."""
    vectors = {name: v for name, v in server.items() if v.shape == (d,)}
    return {name: torch.linalg.vector_norm(v, dtype=accumulator_dtype(v.device)) for name, v in vectors.items()}


def culprit(values: Mapping[str, Tensor], flat: FlatSpec) -> str:
    """Returns the first value that is not finite: its name, and the first parameter of the net where it is not.

    Args:
        values: Tensors by name; at least one is not finite.
        flat: Layout of those of d numbers.
    """
    name = next(name for name, v in values.items() if not bool(is_finite(v)))
    if values[name].shape != (flat.d,):
        return name
    return f"{name}, first in {next(n for n, v in flat.split(values[name]).items() if not bool(v.isfinite().all()))}"


def growth(history: Norms) -> str:
    """Returns the norms of the last rounds, what grew most first."""
    table = {name: [float(row[name]) for row in history if name in row] for name in history[-1]}

    def factor(name: str) -> float:
        first = next((x for x in table[name] if x), 0.0)
        return table[name][-1] / first if first else 0.0

    order = sorted(table, key=factor, reverse=True)
    return ", ".join(f"‖{name}‖ {' → '.join(f'{x:.3g}' for x in table[name])}" for name in order)


def diverged(t: int, what: str, history: Norms) -> DivergenceError:
    """Returns the error of a round without a finite result.

    Args:
        t: The round, from 0.
        what: What is not finite.
        history: Norms of the server's vectors up to the round before.
    """
    return DivergenceError(
        f"round {t + 1}: {what}, training has diverged; in the last rounds: {growth(history)}; lower "
        "model.optimizer.lr or set model.optimizer.clip, find where it begins with trainer.engine = debug, or leave "
        "such rounds out with trainer.on_divergence = continue"
    )
