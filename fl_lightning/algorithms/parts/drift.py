"""Corrections of client drift on vectors ``(..., d)``."""

from torch import Tensor

from fl_lightning.algorithms.parts.local_optimizer import LocalOptimizer
from fl_lightning.core import ensure


def prox_pull(w: Tensor, w0: Tensor, mu: float) -> Tensor:
    """Returns the gradient of ``mu/2 ||w - w0||^2`` (FedProx)."""
    return mu * (w - w0)


def admm_pull(dual: Tensor, w: Tensor, w0: Tensor, beta: float) -> Tensor:
    """Returns the gradient of ``-<dual, w> + 1/(2 beta) ||w - w0||^2`` (FedDyn with alpha = 1/beta)."""
    return (w - w0) / beta - dual


def admm_dual(dual: Tensor, w: Tensor, w0: Tensor, beta: float) -> Tensor:
    """Returns a client's or (with beta M/S) the server's dual after an ascent step: ``dual - (w - w0) / beta``."""
    return dual - (w - w0) / beta


def control_variate(c_i: Tensor, c: Tensor, w: Tensor, w0: Tensor, k_lr: float) -> Tensor:
    """Returns a client's new variate ``c_i - c + (w0 - w) / (K lr)`` (SCAFFOLD, option II)."""
    return c_i - c + (w0 - w) / k_lr


def check_fresh_momentum(optimizer: LocalOptimizer, needs: str) -> None:
    """Checks that momentum starts from 0 in each round, as `effective_steps` takes it.

    Raises:
        UserError: If clients keep the momentum of their last round.
    """
    ensure(
        not (optimizer.keeps_state and optimizer.momentum),
        f"model.optimizer.state = keep: {needs} counts the steps of a momentum that starts from 0; set it to reset",
    )


def effective_steps(K: int, momentum: float) -> float:
    """Returns the number of plain steps that K steps with momentum equal: ``(K - m (1 - m^K) / (1 - m)) / (1 - m)``."""
    return (K - momentum * (1 - momentum**K) / (1 - momentum)) / (1 - momentum)
