"""The boxes of FedScar and its variants, transcribed as those of `boxes`: every client's bias decays in every round.

They are those of the fourth group of the spec.
"""
# ruff: noqa: B023  (a closure is called in its own round only)

from __future__ import annotations

from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d, relu

from tests.integration.boxes import Models, Problem


def along(x: Tensor) -> Tensor:
    """unit(d) = d / ||d||, and unit(0) = 0."""
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
                way = w[t] - z[i] - (m[i] if variant == "Scarl" else 0)
                b[i] = b[i] + (a[i] if variance else alpha) * along(way)
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
    """The outputs of the convolution and of the first linear layer after ReLU, pooling not counted."""
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
