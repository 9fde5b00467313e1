"""Corrections of client drift, one line each, on vectors ``(..., d)``."""

from torch import Tensor


def prox_pull(w: Tensor, w0: Tensor, mu: float) -> Tensor:
    """Gradient of ``mu/2 ||w - w0||^2`` (FedProx)."""
    return mu * (w - w0)


def admm_pull(dual: Tensor, w: Tensor, w0: Tensor, beta: float) -> Tensor:
    """Gradient of ``-<dual, w> + 1/(2 beta) ||w - w0||^2`` (FedDyn with alpha = 1/beta)."""
    return (w - w0) / beta - dual


def admm_dual(dual: Tensor, w: Tensor, w0: Tensor, beta: float) -> Tensor:
    """Dual ascent ``dual - (w - w0) / beta``, of a client or (with beta M/S) of the server."""
    return dual - (w - w0) / beta


def control_variate(c_i: Tensor, c: Tensor, w: Tensor, w0: Tensor, k_lr: float) -> Tensor:
    """A client's new variate ``c_i - c + (w0 - w) / (K lr)`` (SCAFFOLD, option II)."""
    return c_i - c + (w0 - w) / k_lr


def effective_steps(K: int, momentum: float) -> float:
    """``(K - m (1 - m^K) / (1 - m)) / (1 - m)``: how many plain steps K steps with momentum are worth (FedNova)."""
    return (K - momentum * (1 - momentum**K) / (1 - momentum)) / (1 - momentum)
