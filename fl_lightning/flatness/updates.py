"""Distances, angles and norms of a round's models; no data needed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.core import EPS, ensure


def divergence(clients: Sequence[Tensor], center: Tensor) -> float:
    """Mean over the clients of ‖w_i - w‖² (FedSMOO, Table 2).

    The paper's table has w^t as the ``center``, its text w^{t+1}; the authors' program uses w^{t+1}.

    Args:
        clients: Local models w_i, ``(d,)`` each.
        center: The global model, ``(d,)``.

    Raises:
        UserError: If there is no client.
    """
    return sum(d * d for d in distances(clients, center)) / len(clients)


def distances(clients: Sequence[Tensor], center: Tensor) -> list[float]:
    """‖w_i - w‖ of each client: with w^t FedGF's drift (its mean is D), with w^{t+1} the terms of Theorem 2's bound.

    Raises:
        UserError: If there is no client.
    """
    ensure(len(clients) > 0, "clients: none; give at least one local model")
    return [(w - center).norm().item() for w in clients]


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two vectors ``(d,)``; 0 if one is zero."""
    return float(a @ b / (a.norm() * b.norm() + EPS))


def delta_epsilon(previous: Tensor, current: Tensor, rho: float) -> float:
    """δ_ε = rho ‖Δ̃/‖Δ̃‖ - Δ/‖Δ‖‖, from 0 to 2 rho (FedGloSS, Eq. 6): how stale last round's direction is.

    Args:
        previous: Δ̃^{t-1}, the pseudo-gradient of the last round, ``(d,)``.
        current: Δ^t, that of this round's clients trained from the unperturbed global model, ``(d,)``.
        rho: The server's radius.
    """
    a, b = (v / (v.norm() + EPS) for v in (previous, current))
    difference: Tensor = torch.linalg.vector_norm(a - b)
    return rho * difference.item()
