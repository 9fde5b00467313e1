"""Sharpness of a loss, and the flatness discrepancy between the global and the local losses (FedGF)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.flat import FlatSpec, norm, to_radius
from fl_lightning.flatness.functional import Batches, Loss, Reduce, batch_sizes, gradient, mean_loss


def sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    rho: float = 0.05,
    steps: int = 1,
    at: Tensor | None = None,
    *,
    reduce: Reduce | None = None,
) -> float:
    """max_{‖δ‖≤rho} F(w+δ) - F(w), the maximum approximated from below by gradient ascent.

    One step is δ = rho ∇F/‖∇F‖, with the gradient of all data (the first-order maximiser, Foret et al. 2021, Eq. 2;
    FedGF Eq. 5). With more, each adds rho ∇F(w+δ)/‖∇F(w+δ)‖ and projects δ onto the ball.

    Args:
        model: The network; its weights are not moved.
        loss: Per-sample losses.
        batches: The data; of many processes this one's share, which may be nothing.
        rho: Radius, in weight units.
        steps: Ascent steps, one pass with gradient each; two passes without come on top.
        at: Flat weights w, ``(d,)``; by default the model's own.
        reduce: Sums up over the processes; every process must call. None: this process has all samples.

    Returns:
        The sharpness, in units of the loss.

    Raises:
        UserError: If ``rho`` is negative or ``steps`` is not positive; else as ``mean_loss``.
    """
    if rho < 0 or steps < 1:
        raise UserError(f"sharpness: needs rho >= 0 and steps >= 1, not {rho} and {steps}")
    w = FlatSpec(model).vector(model) if at is None else at
    delta = torch.zeros_like(w)
    for _ in range(steps):
        delta = delta + to_radius(gradient(model, loss, batches, w + delta, reduce=reduce), rho)
        delta = torch.where(norm(delta) > rho, to_radius(delta, rho), delta)
    before, after = (mean_loss(model, loss, batches, v, reduce=reduce) for v in (w, w + delta))
    return after - before


def flatness_discrepancy(global_sharpness: float, local_sharpness: Sequence[float], sizes: Sequence[int]) -> float:
    """Δ_F = |S - Σ_i (m_i/m) S_i| (FedGF Definition 1, Eq. 7).

    Args:
        global_sharpness: S, of the aggregated model on the data of all clients.
        local_sharpness: S_i, of each local model on its own data.
        sizes: m_i, samples of each client.

    Raises:
        UserError: If there are no samples, or not one size per local sharpness.
    """
    if len(sizes) != len(local_sharpness) or sum(sizes) <= 0:
        raise UserError(f"sizes: {len(sizes)} with sum {sum(sizes)} for {len(local_sharpness)} clients; give one each")
    mean = sum(m * s for m, s in zip(sizes, local_sharpness, strict=True)) / sum(sizes)
    return abs(global_sharpness - mean)


def measure_discrepancy(
    model: nn.Module, loss: Loss, clients: Sequence[tuple[Tensor, Batches]], rho: float = 0.05, steps: int = 1
) -> float:
    """Δ_F of the aggregated ``model`` and its clients, each as (local flat weights w_i ``(d,)``, its data D_i).

    F is the loss over the union of the D_i. The paper leaves open how the maximum is found, rho, and which clients are
    meant: here :func:`sharpness`, and whoever is passed, usually the active clients whose w_i were averaged.

    Raises:
        UserError: As :func:`sharpness` and :func:`flatness_discrepancy`.
    """
    local = [sharpness(model, loss, batches, rho, steps, at=w) for w, batches in clients]
    sizes = [sum(batch_sizes(batches)) for _, batches in clients]
    everything = sharpness(model, loss, lambda: chain.from_iterable(batches() for _, batches in clients), rho, steps)
    return flatness_discrepancy(everything, local, sizes)
