"""The boxes of the methods beyond the five papers, transcribed as those of `boxes`; A-FedPD's rule is there.

In FedScar and its variants every client's bias decays in every round.
"""
# ruff: noqa: B023  (a closure is called in its own round only)

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d, relu

from tests.integration.boxes import Loss, Models, Problem, kl, plain_mean, total, virtual


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
    """Runs FedAvg with a loss of round, client and received model."""
    w = P.w0
    yield w
    for t, S in P.rounds():
        wk = {}
        for k in S:
            client_loss = loss(t, k, w)
            wk[k] = P.sgd(t, k, w, lambda v, k=k, client_loss=client_loss: P.g(k, v, client_loss))
        w = P.mean(wk)
        yield w


def hidden(P: Problem, k: int, v: Tensor) -> Tensor:
    """Returns what the last linear layer of the golden net sees."""
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
                cosines = torch.stack([cos(z, z_glob), cos(z, z_prev)], 1) / tau
                term = cross_entropy(cosines, torch.zeros(len(z), dtype=torch.int64))
                return g + mu * torch.autograd.grad(term, v)[0]

            wk[k] = P.sgd(t, k, w[t], d)
        last |= wk
        w.append(P.mean(wk))
    return w


def decorr(z: Tensor, code: bool) -> Tensor:
    """Returns the term of A FedDecorr."""
    N, d = z.shape
    S = (z - z.mean(0)) / (1e-8 + z.var(0)).sqrt()
    off_diagonal = (S.T @ S)[~torch.eye(d, dtype=torch.bool)]
    return (off_diagonal**2).mean() / N if code else ((off_diagonal / (N - 1)) ** 2).sum() / d**2


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
    """Runs the local loop with eta_b = eta ((1 - b/K) + (b/K) rho)."""
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
                direction = w[t] + b * Di - v
                b += 1
                return a * P.g(k, v + sign * rho * direction / (direction.norm() + 1e-7)) + (1 - a) * Di

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


def along(x: Tensor) -> Tensor:
    """Returns unit(d) = d / ||d||, where unit(0) = 0."""
    return x / x.norm() if x.norm() > 0 else x


def fedscar(
    P: Problem,
    alpha: float = 0.1,
    gama: float = 0.9,
    beta: float = 0.06,
    rho: float = 0.1,
    variant: str = "FedScar",
    variance: bool = False,
    tau: float = 0.1,
    trace: list[float] | None = None,
) -> Models:
    """FedScar, Scars, Scarl, Scarle, Scar2; ``trace`` gets the strength that each round forms."""
    w, M = [P.w0], range(P.M)
    h, b, a = P.zeros(), P.zeros(), [0.0] * P.M
    z: dict[int, Tensor] = {}
    m: dict[int, Tensor] = {}
    for t, S in P.rounds():
        b = [gama * x for x in b]  # 1
        v0 = {}
        for i in S:  # 2
            if i in z:
                direction = w[t] - z[i] - (m[i] if variant == "Scarl" else 0)
                b[i] = b[i] + (a[i] if variance else alpha) * along(direction)
                v0[i] = w[t] + b[i]
            else:
                v0[i] = w[t]
        bbar = sum(b, P.zero) / P.M  # 3
        D = P.zero if t == 0 else w[t - 1] - w[t]
        wk = {}
        for i in S:
            p = z.get(i, v0[i])  # 4
            c = beta * (h[i] + b[i]) + (bbar - b[i])
            if variant == "Scars":
                c = beta * (h[i] + b[i])
            elif variant == "Scarl":
                c = tau * (bbar - b[i])
            elif variant == "Scar2":
                c, p = beta * h[i], v0[i]

            def d(v: Tensor, i: int = i, p: Tensor = p, c: Tensor = c) -> Tensor:
                if variant == "Scarle":
                    u = P.g(i, v + rho * D / (D.norm() + 1e-7))
                elif rho:
                    g = P.g(i, v)
                    u = P.g(i, v + rho * g / (g.norm() + 1e-7))
                else:
                    u = P.g(i, v)
                force = beta / 2 * along(v - p)
                if variant == "Scars":
                    force = -beta / 2 * along(v - v0[i])
                elif variant == "Scarl":
                    force = P.zero
                return u + force + c

            wk[i] = P.sgd(t, i, v0[i], d)  # 5
            m[i] = wk[i] - v0[i]
            h[i] = h[i] + m[i]  # 6
            z[i] = wk[i]
        mean = P.mean(wk)
        strength = alpha / P.M * sum(float((m[j] - (mean - w[t])).norm()) for j in m)
        for i in S:
            a[i] = strength
        if trace is not None:
            trace.append(strength)
        if variant == "Scarl":
            w.append(mean - bbar)
        else:
            w.append(mean + beta / P.M * sum((h[j] - b[j] for j in M), P.zero))  # 7
    return w


def fedscar4(P: Problem, alpha: float, beta: float) -> Models:
    """Scar4."""
    w, lam, z = [P.w0], P.zeros(), dict[int, Tensor]()
    for t, S in P.rounds():
        wk = {}
        for i in S:
            v0 = w[t] + beta * (w[t] - z[i]) if i in z else w[t]
            wk[i] = P.sgd(t, i, v0, lambda v, i=i: P.g(i, v) + alpha / 2 * along(v - v0) + alpha * lam[i])
            lam[i] = lam[i] + (wk[i] - v0)
            z[i] = wk[i]
        w.append(P.mean(wk) + sum(lam, P.zero) / P.M)
    return w


def activations(P: Problem, k: int, v: Tensor) -> list[Tensor]:
    """Returns the outputs of the convolution and of the first linear layer after ReLU, before pooling."""
    p, (x, _) = P.split(v), P.data[k]
    conv = relu(conv2d(x, p["conv.weight"], p["conv.bias"], padding=1))
    fc1 = relu(linear(max_pool2d(conv, 2).flatten(1), p["fc1.weight"], p["fc1.bias"]))
    return [conv, fc1]


def man(P: Problem, zeta: float, rho: float = 0.0) -> Models:
    """MAN with FedAvg; with rho FedSAM: the term is in both passes."""
    w = [P.w0]

    def g(k: int, v: Tensor) -> Tensor:
        v = v.detach().requires_grad_()
        term = sum((a**2).mean() for a in activations(P, k, v))
        return grad(cross_entropy(P.logits(k, v), P.data[k][1]) + zeta / 2 * term, v)[0]

    def d(k: int, v: Tensor) -> Tensor:
        ascent = rho * along(g(k, v)) if rho else 0
        return g(k, v + ascent)

    for t, S in P.rounds():
        w.append(P.mean({k: P.sgd(t, k, w[t], lambda v, k=k: d(k, v)) for k in S}))
    return w
