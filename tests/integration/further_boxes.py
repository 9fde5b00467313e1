"""The boxes of ten methods beyond the five papers, transcribed as those of `boxes`.

A and B are the two files of the spec on further methods: FedACG, MOON, FedExP, FedDecorr, FedLC; and FedSWA, FedMoSWA,
FedNSAM, FedSOL, FedWMSAM.
"""
# ruff: noqa: B023  (a closure is called in its own round only)

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.integration.boxes import Loss, Models, Problem, kl, plain_mean


def fedacg(P: Problem, lam: float, beta: float, whole: bool = False) -> Models:
    """A FedACG; whole: the prox without the 1/2."""
    w, m = [P.w0], P.zero
    for t, S in P.rounds():
        s = w[t] + lam * m
        wk = {k: P.sgd(t, k, s, lambda v, k=k: P.g(k, v) + (2 if whole else 1) * beta * (v - s)) for k in S}
        m = lam * m + P.mean(wk) - s
        w.append(w[t] + m)
    return w


def fednsam(P: Problem, gamma: float, rho: float, along_momentum: bool = False) -> Models:
    """B FedNSAM, columns A and (along_momentum) B."""
    w, m = [P.w0], P.zero
    for t, S in P.rounds():
        sent = w[t] if along_momentum else w[t] + gamma * m
        wk = {}
        for k in S:

            def d(v: Tensor, k: int = k) -> Tensor:
                if along_momentum:
                    return P.g(k, v + gamma * m - rho * m / (m.norm() + 1e-7))
                g1 = P.g(k, v)
                return P.g(k, v + rho * g1 / (g1.norm() + 1e-12))

            wk[k] = P.sgd(t, k, sent, d)
        m = gamma * m + P.mean({k: v - sent for k, v in wk.items()})
        w.append(w[t] + m)
    return w


def fedexp(P: Problem, eps: float, code: bool = False) -> Models:
    """A FedExP; code: eps times the cohort and the decay to the power 2 (t + 1)."""
    w = [P.w0]
    for t, S in P.rounds():
        D = {k: P.sgd(t, k, w[t], lambda v, k=k: P.g(k, v)) - w[t] for k in S}
        p, mean = P.p(S), P.mean(D)
        eps_t = len(S) * eps * P.s.lr_decay ** (2 * (t + 1)) if code else eps
        step = sum(p[k] * float(D[k] @ D[k]) for k in S) / (2 * (float(mean @ mean) + eps_t))
        w.append(w[t] + max(1.0, step) * mean)
    return w


def fedlc(P: Problem, tau: float, others: bool = False) -> Models:
    """A FedLC; others: the paper's denominator. Classes that the client lacks are taken out of the logits."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        n = torch.bincount(y, minlength=z.shape[1])  # the problem's batch is all that the client has
        u = z[:, n > 0] - tau * n[n > 0].double() ** -0.25
        y = (n > 0).cumsum(0)[y] - 1
        if not others:
            return cross_entropy(u, y)
        rows = [torch.cat([r[: int(j)], r[int(j) + 1 :]]).exp().sum().log() - r[j] for r, j in zip(u, y, strict=True)]
        return torch.stack(rows).mean()

    return [*_plain(P, lambda t, k, w: loss)]


def _plain(P: Problem, loss: Callable[[int, int, Tensor], Loss]) -> Iterator[Tensor]:
    """FedAvg with a loss of round, client and received model."""
    w = P.w0
    yield w
    for t, S in P.rounds():
        wk = {}
        for k in S:
            own = loss(t, k, w)
            wk[k] = P.sgd(t, k, w, lambda v, k=k, own=own: P.g(k, v, own))
        w = P.mean(wk)
        yield w


def hidden(P: Problem, k: int, v: Tensor) -> Tensor:
    """What the last linear layer of the golden net sees."""
    p = P.split(v)
    x = torch.nn.functional.conv2d(P.data[k][0], p["conv.weight"], p["conv.bias"], padding=1)
    x = torch.max_pool2d(torch.relu(x), 2).flatten(1)
    return torch.relu(x @ p["fc1.weight"].T + p["fc1.bias"])


def moon(P: Problem, mu: float, tau: float, initial: bool = False) -> Models:
    """A MOON, buffer 1; initial: an unseen client has its initial net."""

    def cos(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1).clamp(min=1e-8) * b.norm(dim=1).clamp(min=1e-8))

    w, last = [P.w0], dict.fromkeys(range(P.M), P.w0) if initial else {}
    for t, S in P.rounds():
        wk = {}
        for k in S:

            def d(v: Tensor, k: int = k) -> Tensor:
                g = P.g(k, v)
                if k not in last:
                    return g
                v = v.detach().requires_grad_()
                z, z_glob, z_prev = hidden(P, k, v), hidden(P, k, w[t]), hidden(P, k, last[k])
                both = torch.stack([cos(z, z_glob), cos(z, z_prev)], 1) / tau
                term = cross_entropy(both, torch.zeros(len(z), dtype=torch.int64))
                return g + mu * torch.autograd.grad(term, v)[0]

            wk[k] = P.sgd(t, k, w[t], d)
        last |= wk
        w.append(P.mean(wk))
    return w


def decorr(z: Tensor, code: bool) -> Tensor:
    """A FedDecorr: the term."""
    N, d = z.shape
    S = (z - z.mean(0)) / (1e-8 + z.var(0)).sqrt()
    off = (S.T @ S)[~torch.eye(d, dtype=torch.bool)]
    return (off**2).mean() / N if code else ((off / (N - 1)) ** 2).sum() / d**2


def feddecorr(P: Problem, beta: float, code: bool = False) -> Models:
    """A FedDecorr."""
    w = [P.w0]
    for t, S in P.rounds():
        wk = {}
        for k in S:

            def d(v: Tensor, k: int = k) -> Tensor:
                g, v = P.g(k, v), v.detach().requires_grad_()
                return g + beta * torch.autograd.grad(decorr(hidden(P, k, v), code), v)[0]

            wk[k] = P.sgd(t, k, w[t], d)
        w.append(P.mean(wk))
    return w


def falling(P: Problem, t: int, k: int, v: Tensor, rho: float, d: Callable[[Tensor], Tensor]) -> Tensor:
    """The local loop with eta_b = eta ((1 - b/K) + (b/K) rho)."""
    m, K = P.zero, P.K[k]
    for b in range(K):
        u = d(v)
        if P.s.clip is not None:
            u = u * min(1.0, P.s.clip / (float(u.norm()) + 1e-6))
        m = P.s.momentum * m + u + P.s.weight_decay * v
        v = v - P.lr[t] * ((1 - b / K) + b / K * rho) * m
    return v


def fedswa(P: Problem, rho: float, alpha: float) -> Models:
    """B FedSWA."""
    w = [P.w0]
    for t, S in P.rounds():
        wk = {k: falling(P, t, k, w[t], rho, lambda v, k=k: P.g(k, v)) for k in S}
        w.append(w[t] + alpha * (P.mean(wk) - w[t]))
    return w


def fedmoswa(P: Problem, rho: float, alpha: float, gamma: float) -> Models:
    """B FedMoSWA."""
    w, c, ci = [P.w0], P.zero, P.zeros()
    for t, S in P.rounds():
        wk, moved = {}, {}
        for k in S:
            wk[k] = falling(P, t, k, w[t], rho, lambda v, k=k: P.g(k, v) - ci[k] + c)
            rates = sum(P.lr[t] * ((1 - b / P.K[k]) + b / P.K[k] * rho) for b in range(P.K[k]))
            ci[k] = ci[k] - c + (w[t] - wk[k]) / rates
            moved[k] = ci[k] - c
        c = c + gamma * plain_mean(moved)
        w.append(w[t] + alpha * (P.mean(wk) - w[t]))
    return w


def fedwmsam(
    P: Problem, rho: float, a: float = 0.1, lam: float = 0.01, sign: float = 1.0, trace: list[float] | None = None
) -> Models:
    """B FedWMSAM; ``trace`` gets a after each round."""
    w, D, c, ci = [P.w0], P.zero, P.zero, P.zeros()
    for t, S in P.rounds():
        u, new, s = {}, {}, []
        for k in S:
            Di, b = D + a / (1 - a) * (c - ci[k]), 0

            def d(v: Tensor, k: int = k, Di: Tensor = Di) -> Tensor:
                nonlocal b
                to = w[t] + b * Di - v
                b += 1
                return a * P.g(k, v + sign * rho * to / (to.norm() + 1e-7)) + (1 - a) * Di

            u[k] = P.sgd(t, k, w[t], d) - w[t]
            new[k] = ci[k] - c - u[k] / (P.K[k] * P.lr[t])
            s.append(1 + float(u[k] @ D / (u[k].norm() * D.norm())) if float(D.norm()) else 0.0)
        a = (1 - lam) * a + lam * min(max(sum(s) / len(s), 0.1), 0.9)
        c = c + sum(new[k] - ci[k] for k in S) / P.M
        D = -plain_mean({k: u[k] / (P.K[k] * P.lr[t]) for k in S})
        for k in S:
            ci[k] = new[k]
        w.append(w[t] + P.mean(u))
        if trace is not None:
            trace.append(a)
    return w


def fedsol(P: Problem, rho: float, tau: float = 3.0, fixed: bool = False) -> Models:
    """B FedSOL."""
    w = [P.w0]
    for t, S in P.rounds():
        wk = {}
        for k in S:
            zT = P.logits(k, w[t]).detach()

            def d(v: Tensor, k: int = k, zT: Tensor = zT) -> Tensor:
                away = (v - w[t]).abs()
                if not away.any():
                    return P.g(k, v)
                parts = [x / x.norm(dim=0).clamp(min=1e-12) for x in P.split(away).values()]
                u = torch.ones_like(v) if fixed else torch.cat([x.flatten() for x in parts])
                g_p = P.g(k, v, lambda z, y: kl(zT, z, tau))
                return P.g(k, v + rho * u * g_p / (g_p.norm() + 1e-12))

            wk[k] = P.sgd(t, k, w[t], d)
        w.append(P.mean(wk))
    return w
