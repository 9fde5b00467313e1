"""The boxes of the papers, transcribed in plain PyTorch from the spec alone; no code is shared with the package.

A and B are the two files of the spec, FedGF/FedSAM/FedGloSS and FedSMOO/FedGMT/baselines, by section; its addenda win.
A box is a function of a `Problem` that returns the global models ``[w^0, ..., w^T]``. Names are those of the boxes:
``v`` the local iterate, ``S`` the cohort, ``M`` the number of clients.
"""
# ruff: noqa: B023  (a closure is called in its own round only)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

Loss = Callable[[Tensor, Tensor], Tensor]
Ascent = Callable[["Problem", int, int, Tensor], Tensor]
ServerStep = Callable[[Tensor, Tensor], Tensor]
Models = list[Tensor]
Prox = Literal["squared", "unsquared", "fl_simulator"]


@dataclass(frozen=True)
class Setting:
    """What is common to all algorithms; without ``local_steps``, K_k = ceil(n_k / batch)."""

    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    lr_decay: float = 1.0
    local_steps: int | None = 3
    batch: int | None = None
    weighting: Literal["samples", "uniform"] = "samples"
    schedule: list[list[int]] | None = None


class Problem:
    """Clients, net and the local loop. Gradients are of the mean loss over all samples of the client."""

    def __init__(
        self, net: nn.Module, arrays: Sequence[tuple[np.ndarray, np.ndarray]], schedule: list[list[int]], s: Setting
    ) -> None:
        self.net, self.s, self.schedule = net.double(), s, schedule
        self.data = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in arrays]
        self.n = [len(y) for _, y in arrays]
        self.M = len(arrays)
        self.K = [s.local_steps or math.ceil(n / s.batch) for n in self.n]
        self.lr = [s.lr * s.lr_decay**t for t in range(len(schedule))]
        self.shapes = {name: p.shape for name, p in self.net.named_parameters()}
        self.w0 = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        self.zero = torch.zeros_like(self.w0)

    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        return enumerate(self.schedule)

    def zeros(self) -> list[Tensor]:
        return [self.zero for _ in range(self.M)]

    def split(self, v: Tensor) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        return {n: x.view(s) for (n, s), x in zip(self.shapes.items(), v.split(sizes), strict=True)}

    def logits(self, k: int, v: Tensor) -> Tensor:
        return functional_call(self.net, self.split(v), (self.data[k][0],))

    def g(self, k: int, v: Tensor, loss: Loss = cross_entropy) -> Tensor:
        v = v.detach().requires_grad_()
        return torch.autograd.grad(loss(self.logits(k, v), self.data[k][1]), v)[0]

    def sharp(self, t: int, k: int, v: Tensor, ascent: Ascent | None) -> Tensor:
        """Returns g at v + e, with e from the loss gradient alone (A 1.3, 1.4)."""
        return self.g(k, v if ascent is None else v + ascent(self, t, k, v))

    def sgd(self, t: int, k: int, v: Tensor, d: Callable[[Tensor], Any]) -> Tensor:
        """Runs A 0, SGDstep: m = mu m + (u + wd v), v - lr m, from a zero buffer; ``d`` may add an unclipped part."""
        m = self.zero
        for _ in range(self.K[k]):
            u, free = x if isinstance(x := d(v), tuple) else (x, self.zero)
            if self.s.clip is not None:
                u = u * min(1.0, self.s.clip / (float(u.norm()) + 1e-6))
            m = self.s.momentum * m + (u + free + self.s.weight_decay * v)
            v = v - self.lr[t] * m
        return v

    def p(self, S: list[int]) -> dict[int, float]:
        """Returns the weights of the models in their mean."""
        if self.s.weighting == "uniform":
            return {k: 1 / len(S) for k in S}
        return {k: self.n[k] / sum(self.n[j] for j in S) for k in S}

    def mean(self, wk: dict[int, Tensor]) -> Tensor:
        p = self.p(list(wk))
        return total({k: p[k] * w for k, w in wk.items()})


def total(xs: dict[int, Tensor]) -> Tensor:
    return torch.stack(list(xs.values())).sum(0)


def plain_mean(xs: dict[int, Tensor]) -> Tensor:
    return total(xs) / len(xs)


def unit(x: Tensor) -> Tensor:
    """Returns x over its norm: A 5, eps in norms is 1e-12, and zero gives zero."""
    return x / (x.norm() + 1e-12)


# Ascents


def ramp(t: int, rho: float, T_s: int, rho0: float) -> float:
    """A 1.9: rho(t) = rho0 + (rho - rho0) t / T_s for t <= T_s, only if T_s > 1."""
    return rho0 + (rho - rho0) * t / T_s if T_s > 1 and t <= T_s else rho


def sam(rho: float, T_s: int = 0, rho0: float = 1e-3) -> Ascent:
    """A 1.4."""
    return lambda P, t, k, v: ramp(t, rho, T_s, rho0) * unit(P.g(k, v))


def asam(rho: float, eta: float) -> Ascent:
    """A 1.5: T = |v| + eta where the name has 'weight', else 1; e = rho T^2 g / ||T g||."""

    def e(P: Problem, t: int, k: int, v: Tensor) -> Tensor:
        parts = P.split(v).items()
        T = torch.cat([(x.abs() + eta if "weight" in name else torch.ones_like(x)).flatten() for name, x in parts])
        return rho * T * unit(T * P.g(k, v))

    return e


# FedAvg, FedProx, FedOpt


def momentum(beta: float, lr: float = 1.0) -> ServerStep:
    """A 1.2."""
    v: Any = 0.0

    def step(w: Tensor, D: Tensor) -> Tensor:
        nonlocal v
        v = beta * v - D
        return w - lr * v

    return step


def fedopt(
    kind: str, lr: float, tau: float, b1: float, b2: float = 0.0, v0: str = "0", bias_correction: bool = False
) -> ServerStep:
    """B 1.3, addenda 4: D the mean of w_i - w^t; tau outside the root."""
    t, m, v = 0, torch.zeros(()), torch.tensor(tau**2 if v0 == "tau2" else 0.0, dtype=torch.float64)

    def step(w: Tensor, D: Tensor) -> Tensor:
        nonlocal t, m, v
        t, m = t + 1, b1 * m + (1 - b1) * D
        if kind == "adagrad":
            v = v + D**2
        elif kind == "yogi":
            v = v - (1 - b2) * D**2 * torch.sign(v - D**2)
        else:
            v = b2 * v + (1 - b2) * D**2
        factor = math.sqrt(1 - b2**t) / (1 - b1**t) if bias_correction else 1.0
        return w + lr * factor * m / (v.sqrt() + tau)

    return step


def fedavg(
    P: Problem, ascent: Ascent | None = None, mu: float = 0.0, server: ServerStep | None = None, b: float = 0.0
) -> Models:
    """A 1.1, 1.3 (mu), 1.2 and B 1.3 (server), 1.4, 1.5 (ascent), 7 (b: w_0 = w^t + b (w^t - w_last))."""
    w, last = [P.w0], [P.w0] * P.M
    for t, S in P.rounds():
        D = {}
        for k in S:
            start = w[t] + b * (w[t] - last[k])
            last[k] = P.sgd(t, k, start, lambda v, k=k: P.sharp(t, k, v, ascent) + mu * (v - w[t]))
            D[k] = last[k] - start
        w.append(w[t] + P.mean(D) if server is None else server(w[t], P.mean(D)))
    return w


def fednova(P: Problem) -> Models:
    """B 1.14."""
    w, m = [P.w0], P.s.momentum
    tau = [(K - m * (1 - m**K) / (1 - m)) / (1 - m) for K in P.K]
    for t, S in P.rounds():
        wk = {k: P.sgd(t, k, w[t], lambda v, k=k: P.g(k, v)) for k in S}
        tau_eff = sum(p * tau[k] for k, p in P.p(S).items())
        w.append(w[t] + tau_eff * P.mean({k: (wk[k] - w[t]) / tau[k] for k in S}))
    return w


# Control variates and momentum


def scaffold(
    P: Problem,
    ascent: Ascent | None = None,
    c_scale: Literal["sum", "mean"] = "sum",
    lesam: dict[str, Any] | None = None,
    cv_scale: float = 1.0,
    eta_g: float = 1.0,
) -> Models:
    """B 1.4, 1.9 FedGAMMA (ascent; c_scale: A 1.13), 1.10 FedLESAM-S (lesam)."""
    w, ci, c, eps = [P.w0], P.zeros(), P.zero, Lesam(P, **(lesam or {"rho": 0.0}))
    for t, S in P.rounds():
        wk, dc = {}, {}
        for k in S:
            e = eps(w, t, k)
            wk[k] = P.sgd(t, k, w[t], lambda v, k=k, e=e: P.sharp(t, k, v + e, ascent) + cv_scale * (c - ci[k]))
            dc[k] = -c + (w[t] - wk[k]) / (P.K[k] * P.lr[t])
            ci[k] = ci[k] + dc[k]
        w.append(w[t] + eta_g * P.mean({k: wk[k] - w[t] for k in S}))
        c = c + total(dc) / P.M / (len(S) if c_scale == "mean" else 1)
    return w


def fedcm(P: Problem, alpha: float, ascent: Ascent | None = None, eta_g: float = 1.0, gf_repo: bool = False) -> Models:
    """B 1.5 FedCM, MoFedSAM (ascent), A 1.14 (gf_repo: the step is -Delta).

    Delta is a plain mean, divided by lr times the mean number of steps (A 1.14).
    """
    w, Delta = [P.w0], P.zero
    for t, S in P.rounds():
        wk = {k: P.sgd(t, k, w[t], lambda v, k=k: alpha * P.sharp(t, k, v, ascent) + (1 - alpha) * Delta) for k in S}
        K = sum(P.K[k] for k in S) / len(S)
        Delta = -(plain_mean(wk) - w[t]) / (K * P.lr[t])
        w.append(w[t] + eta_g * (-Delta if gf_repo else P.mean({k: wk[k] - w[t] for k in S})))
    return w


def adabest(P: Problem, mu: float, beta: float, ascent: Ascent | None = None) -> Models:
    """A 1.15 with addenda 1: the correction times (mean client size) / n_k; rounds count from 1."""
    w, h, seen, bar = [P.w0], P.zeros(), [0] * P.M, P.w0
    scale = [sum(P.n) / P.M / n for n in P.n]
    for t, S in P.rounds():
        wk = {k: P.sgd(t, k, w[t], lambda v, k=k: P.sharp(t, k, v, ascent) - scale[k] * h[k]) for k in S}
        for k in S:
            h[k] = h[k] / (t + 1 - seen[k]) + mu * (w[t] - wk[k])
            seen[k] = t + 1
        before, bar = bar, P.mean(wk)
        w.append(bar - beta * (before - bar))
    return w


# ADMM


def pull(u: Tensor, v: Tensor, w: Tensor, beta: float, prox: Prox = "squared") -> Any:
    """B 0, warnings 1 and 2: u + (v - w)/beta; with a norm that is not squared; with v/beta hidden from the clip."""
    if prox == "fl_simulator":
        return u - w / beta, v / beta
    return u + (v - w) / beta if prox == "squared" else u + unit(v - w) / (2 * beta)


def virtual(P: Problem, lam_i: list[Tensor], ends: dict[int, Tensor], w_0: Tensor, beta: float) -> Tensor:
    """Third group, A-FedPD, lines 3 and 4: the absent move to the mean of the others; returns the mean dual."""
    for k in range(P.M):
        if k not in ends:
            lam_i[k] = lam_i[k] - (plain_mean(ends) - w_0) / beta
    return torch.stack(lam_i).mean(0)


def feddyn(
    P: Problem,
    beta: float,
    ascent: Ascent | None = None,
    prox: Prox = "squared",
    alpha: float = 1.0,
    dual_agg: Literal["all", "active"] = "all",
    lesam: dict[str, Any] | None = None,
    b: float = 0.0,
    absent: bool = False,
) -> Models:
    """B 1.6, 1.8 FedSpeed (alpha, dual_agg), 1.10 FedLESAM-D (lesam), A 7 (b: w_0 in place of w^t at the client).

    absent: A-FedPD.
    """
    w, lam_i, lam, last, eps = [P.w0], P.zeros(), P.zero, [P.w0] * P.M, Lesam(P, **(lesam or {"rho": 0.0}))
    for t, S in P.rounds():
        wk, moved = {}, {}
        for k in S:
            e = eps(w, t, k)
            w_0 = w[t] + b * (w[t] - last[k])

            def d(v: Tensor, k: int = k, e: Tensor = e, w_0: Tensor = w_0) -> Any:
                g = P.sharp(t, k, v + e, ascent)
                if alpha != 1:
                    g = (1 - alpha) * P.g(k, v) + alpha * g
                return pull(g - lam_i[k], v, w_0, beta, prox)

            last[k] = wk[k] = P.sgd(t, k, w_0, d)
            moved[k] = wk[k] - w_0
            lam_i[k] = lam_i[k] - moved[k] / beta
        mean = virtual(P, lam_i, wk, w[t], beta) if absent else None
        if dual_agg == "active":
            w.append(P.mean({k: wk[k] - beta * lam_i[k] for k in S}))
        else:
            lam = lam - total(moved) / (beta * P.M) if mean is None else mean
            w.append(P.mean(wk) - beta * lam)
    return w


class Lesam:
    """B 1.10: eps_i = rho (w_i^old - w^t) / ||.||, w_i^old <- w^t; zero at the first participation (in round 0)."""

    def __init__(self, P: Problem, rho: float, ref: str = "own_last_active") -> None:
        self.rho, self.ref, self.zero, self.old = rho, ref, P.zero, {}

    def __call__(self, w: Models, t: int, k: int) -> Tensor:
        old = self.old.get(k) if self.ref == "own_last_active" else w[t - 1] if t else None
        self.old[k] = w[t]
        return self.zero if old is None else self.rho * unit(old - w[t])


def fedlesam(P: Problem, rho: float, ref: str = "own_last_active") -> Models:
    """B 1.10."""
    w, eps = [P.w0], Lesam(P, rho, ref)
    for t, S in P.rounds():
        e = {k: eps(w, t, k) for k in S}
        w.append(P.mean({k: P.sgd(t, k, w[t], lambda v, k=k: P.g(k, v + e[k])) for k in S}))
    return w


def fedsmoo(
    P: Problem,
    rho: float,
    beta: float,
    use_dual: bool = True,
    s_agg: str = "mu_minus_shat",
    prox: Prox = "squared",
    b: float = 0.0,
    absent: bool = False,
    T_s: int = 0,
) -> Models:
    """B 1.2; A 1.8 (use_dual False), 7 (b), 1.9 (T_s: the radius of each round, from 1e-3)."""
    w, mu, s, lam_i, lam = [P.w0], P.zeros(), P.zero, P.zeros(), P.zero
    last = [P.w0] * P.M
    full = rho
    for t, S in P.rounds():
        rho = ramp(t, full, T_s, 1e-3)
        moved, s_tilde = {}, {}
        for k in S:
            w_0 = w[t] + b * (w[t] - last[k])

            def d(v: Tensor, k: int = k, w_0: Tensor = w_0) -> Any:
                shat = rho * unit(P.g(k, v) - mu[k] - s)
                mu[k] = mu[k] + (shat - s)
                s_tilde[k] = mu[k] - shat if s_agg == "mu_minus_shat" else mu[k]
                ghat = P.g(k, v + shat)
                return pull(ghat - lam_i[k], v, w_0, beta, prox) if use_dual else ghat

            last[k] = P.sgd(t, k, w_0, d)
            moved[k] = last[k] - w_0
            lam_i[k] = lam_i[k] - moved[k] / beta
        s = rho * unit(plain_mean(s_tilde))
        lam = lam - total(moved) / (beta * P.M)
        if absent:
            lam = virtual(P, lam_i, {k: last[k] for k in S}, w[t], beta)
        w.append(P.mean({k: last[k] for k in S}) - (beta * lam if use_dual else 0))
    return w


# Global flatness


def fedgf(
    P: Problem,
    rho: float,
    T_D: float,
    W: int,
    rho_g: float | None = None,
    c: float | None = None,
    window_warmup: Literal["available", "full"] = "available",
    eta_g: float = 1.0,
) -> Models:
    """A 1.7; a number ``c`` is used from round 1 on."""
    w, bits, c_r, w_tilde = [P.w0], [], 0.0, P.w0
    for t, S in P.rounds():
        wk = {}
        for k in S:

            def d(v: Tensor, k: int = k) -> Tensor:
                e = rho * unit(P.g(k, v))
                return P.g(k, c_r * w_tilde + (1 - c_r) * (v + e))

            wk[k] = P.sgd(t, k, w[t], d)
        D = sum(float((w[t] - wk[k]).norm()) for k in S) / len(S)
        bits = [*bits, float(D > T_D)][-W:]
        c_r = sum(bits) / (len(bits) if window_warmup == "available" else W) if c is None else c
        w.append(w[t] - eta_g * P.mean({k: w[t] - wk[k] for k in S}))
        w_tilde = w[t + 1] + (rho if rho_g is None else rho_g) * unit(w[t] - w[t + 1])
    return w


def fedgloss(
    P: Problem,
    rho: float,
    beta: float,
    rho_l: float = 0.0,
    T_s: int = 0,
    rho0: float = 1e-3,
    sigma_scale: Literal["paper", "code"] = "paper",
    sigma_ref: Literal["perturbed", "clean"] = "perturbed",
    rho_schedule: Literal["constant", "linear", "repo_bug"] = "constant",
    eta_s: float = 1.0,
    naive: bool = False,
    absent: bool = False,
) -> Models:
    """A 1.9; 1.10 (naive): Delta of a first exchange with the same clients and the current sigma_k."""
    w, sigma_k, sigma, Delta = [P.w0], P.zeros(), P.zero, P.zero
    ascent = sam(rho_l, T_s, rho0) if rho_l else None
    for t, S in P.rounds():

        def train(sent: Tensor, t: int = t, S: list[int] = S) -> dict[int, Tensor]:
            def d(v: Tensor, k: int) -> Tensor:
                return P.sharp(t, k, v, ascent) - sigma_k[k] + (v - sent) / beta

            return {k: P.sgd(t, k, sent, lambda v, k=k: d(v, k)) for k in S}

        if naive:
            Delta = P.mean({k: w[t] - v for k, v in train(w[t]).items()})
        rho_t = ramp(t, rho, T_s, rho0) if rho_schedule == "linear" else rho
        if rho_schedule == "repo_bug" and 1 <= t <= T_s:
            rho_t = rho_l + (rho - rho0) / T_s
        w_tilde = w[t] + rho_t * unit(Delta)
        wk = train(w_tilde)
        for k in S:
            sigma_k[k] = sigma_k[k] - (wk[k] - w_tilde) / beta
        ref = w_tilde if sigma_ref == "perturbed" else w[t]
        scale = beta * P.M * (len(S) if sigma_scale == "code" else 1)
        sigma = sigma - total({k: wk[k] - ref for k in S}) / scale
        if absent:
            sigma = virtual(P, sigma_k, wk, w_tilde, beta)
        Delta = P.mean({k: w_tilde - wk[k] for k in S})
        w.append(w[t] - eta_s * Delta - beta * sigma)
    return w


# Teachers


def kl(teacher: Tensor, z: Tensor, tau: float) -> Tensor:
    """Returns KL(softmax(teacher / tau) || softmax(z / tau)), summed over classes, averaged over the batch."""
    return kl_div(log_softmax(z / tau, 1), softmax(teacher / tau, 1), reduction="batchmean")


def fedntd(P: Problem, gamma: float, tau: float) -> Models:
    """B 1.11."""

    def others(z: Tensor, y: Tensor) -> Tensor:
        return torch.stack([torch.cat([row[: int(j)], row[int(j) + 1 :]]) for row, j in zip(z, y, strict=True)])

    w = [P.w0]
    for t, S in P.rounds():
        wk = {}
        for k in S:
            zT = P.logits(k, w[t]).detach()

            def loss(z: Tensor, y: Tensor, zT: Tensor = zT) -> Tensor:
                return cross_entropy(z, y) + gamma * tau**2 * kl(others(zT, y), others(z, y), tau)

            wk[k] = P.sgd(t, k, w[t], lambda v, k=k, loss=loss: P.g(k, v, loss))
        w.append(P.mean(wk))
    return w


def fedgmt(
    P: Problem,
    gamma: float,
    tau: float,
    ema_alpha: float,
    beta: float,
    kl_tau2: bool = True,
    v2: Literal["w0", "first_seen"] | None = None,
    absent: bool = False,
) -> Models:
    """B 1.12; 1.13 (v2: the client's own EMA of what it received, and what it starts at)."""
    w, u_m, u, e, e_m = [P.w0], P.zeros(), P.zero, P.w0, {}
    for t, S in P.rounds():
        wk = {}
        for k in S:
            if v2:
                e_m[k] = ema_alpha * e_m.get(k, P.w0 if v2 == "w0" else w[t]) + (1 - ema_alpha) * w[t]
            zE = P.logits(k, e_m[k] if v2 else e).detach()

            def loss(z: Tensor, y: Tensor, zE: Tensor = zE) -> Tensor:
                return cross_entropy(z, y) + gamma * (tau**2 if kl_tau2 else 1) * kl(zE, z, tau)

            wk[k] = P.sgd(t, k, w[t], lambda v, k=k, loss=loss: P.g(k, v, loss) - u_m[k])
            u_m[k] = u_m[k] - (wk[k] - w[t]) / beta
        u = u - total({k: wk[k] - w[t] for k in S}) / (beta * P.M)
        if absent:
            u = virtual(P, u_m, wk, w[t], beta)
        w.append(P.mean(wk) - beta * u)
        e = ema_alpha * e + (1 - ema_alpha) * w[t + 1]
    return w


# Averages of the global model: (w^0..w^T, what is evaluated after 0..T rounds)


def with_swa(
    P: Problem,
    box: Callable[[Problem], Models],
    start: int,
    cycle: int,
    lr_min: float = 1e-4,
    init_in_average: bool = False,
    collect: Literal["code", "cycle_end"] = "code",
) -> tuple[Models, Models]:
    """A 1.6."""
    if cycle > 1:
        for t in range(start, len(P.lr)):
            s = (t % cycle + 1) / cycle
            P.lr[t] = (1 - s) * P.lr[t] + s * lr_min
    w = box(P)
    evaluated, swa, n = w[: start + 1], w[start], int(init_in_average)
    for t in range(start, len(P.lr)):
        if t > start and ((t - start) % cycle == 0 if collect == "code" else t % cycle == cycle - 1):
            swa, n = (n * swa + w[t + 1]) / (n + 1), n + 1
        evaluated.append(swa)
    return w, evaluated


def with_ema(P: Problem, box: Callable[[Problem], Models], alpha: float) -> tuple[Models, Models]:
    """ema <- alpha ema + (1 - alpha) w^{t+1}, from w^0."""
    w = box(P)
    evaluated = [w[0]]
    for x in w[1:]:
        evaluated.append(alpha * evaluated[-1] + (1 - alpha) * x)
    return w, evaluated
