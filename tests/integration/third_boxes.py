"""The boxes of FedTOGA, Local Muon, FedMuon and FedAdamW, transcribed as those of `boxes`; A-FedPD's rule is there.

They are those of the third group of the spec, part A.
"""
# ruff: noqa: B023  (a closure is called in its own round only)

from __future__ import annotations

import torch
from torch import Tensor

from tests.integration.boxes import Models, Problem, plain_mean, total, virtual


def clipped(P: Problem, u: Tensor) -> Tensor:
    return u if P.s.clip is None else u * min(1.0, P.s.clip / (float(u.norm()) + 1e-6))


def fedtoga(
    P: Problem, rho: float, b1: float, kappa: float, beta: float, last_g: str = "perturbed", absent: bool = False
) -> Models:
    """FedTOGA."""
    w, lam_i, lam, Delta = [P.w0], P.zeros(), P.zero, P.zero
    for t, S in P.rounds():
        wk = {}
        for k in S:
            r = P.zero

            def d(v: Tensor, k: int = k) -> Tensor:
                nonlocal r
                g = P.g(k, v)
                a = g + kappa * Delta + (g if last_g == "present" else r)  # 2
                u = P.g(k, v + rho * a / (a.norm() + 1e-7))  # 3
                if last_g == "perturbed":  # 4
                    r = u
                elif last_g == "corrected":
                    r = clipped(P, u - lam_i[k] - w[t] / beta + b1 * Delta)
                return u - lam_i[k] + (v - w[t]) / beta + b1 * Delta  # 5

            wk[k] = P.sgd(t, k, w[t], d)
            lam_i[k] = lam_i[k] - (wk[k] - w[t]) / beta  # 6
        lam = lam - total({k: wk[k] - w[t] for k in S}) / (beta * P.M)  # 7
        if absent:
            lam = virtual(P, lam_i, wk, w[t], beta)
        Delta = -(plain_mean(wk) - w[t]) / (sum(P.K[k] for k in S) / len(S))
        w.append(P.mean(wk) - beta * lam)
    return w


def newton(u: Tensor) -> Tensor:
    """Muon, lines 2 and 3, of one matrix."""
    X = u / ((u**2).sum().sqrt() + 1e-7)
    if tall := u.shape[0] > u.shape[1]:
        X = X.T
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if tall else X


def muon(P: Problem, eta: float, f: float, b: float, gamma: float | None = None) -> Models:
    """Local Muon; with gamma FedMuon."""
    w, G, B, share = [P.w0], P.zero, P.split(P.zero), gamma or 0.0
    for t, S in P.rounds():
        rate, wk, Bk = eta * P.s.lr_decay**t, {}, {}
        for k in S:
            v, buffer = w[t], dict(B) if gamma is not None else P.split(P.zero)
            m, s = P.split(P.zero), P.split(P.zero)
            for n in range(1, P.K[k] + 1):
                g, new = P.split(clipped(P, P.g(k, v))), []
                for name, p in P.split(v).items():
                    d = g[name]
                    if p.ndim >= 2:
                        buffer[name] = b * buffer[name] + (1 - b) * d
                        u = (1 - b) * d + b * buffer[name]
                        o = newton(u.reshape(p.shape[0], -1)).reshape(p.shape)
                        o, e = o * max(1, p.shape[-2] / p.shape[-1]) ** 0.5, rate * f * (1 - share)
                    else:
                        m[name], s[name] = 0.9 * m[name] + 0.1 * d, 0.95 * s[name] + 0.05 * d**2
                        o = m[name] / (1 - 0.9**n) / ((s[name] / (1 - 0.95**n)).sqrt() + 1e-10)
                        e = rate * (1 - share)
                    new.append(((1 - 0.01 * e) * p - e * o).flatten())
                v = torch.cat(new) - rate * share * G
            wk[k], Bk[k] = v, buffer
        G = -(plain_mean(wk) - w[t]) / (rate * sum(P.K[k] for k in S) / len(S))
        B = {name: plain_mean({k: Bk[k][name] for k in S}) for name in B}
        w.append(P.mean(wk))
    return w


def fedadamw(P: Problem, eta: float, gamma: float, running: bool = False) -> Models:
    """FedAdamW; running: the code's count of the first moment."""
    w, G, vbar, n = [P.w0], P.zero, P.zero, 0.0
    for t, S in P.rounds():
        rate, wk, s_i = eta * P.s.lr_decay**t, {}, {}
        for i in S:
            v, m, s = w[t], P.zero, vbar
            for k in range(1, P.K[i] + 1):
                g = clipped(P, P.g(i, v))
                m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
                m_hat, s_hat = m / (1 - 0.9 ** (k + (n if running else 0))), s / (1 - 0.999 ** (n + k))
                v = (1 - 0.01 * rate) * v - rate * m_hat / (s_hat.sqrt() + 1e-8)
                v = v - rate * gamma * G
            wk[i], s_i[i] = v, s
        K = sum(P.K[i] for i in S) / len(S)
        G, vbar, n = -(plain_mean(wk) - w[t]) / (rate * K), plain_mean(s_i), n + K
        w.append(P.mean(wk))
    return w
