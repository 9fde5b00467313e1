"""Theory beside runs of FedAvg, FedDyn, A-FedPD, FedSMOO and FedSAM, on quadratic and logistic clients.

``python examples/theory.py OUT`` trains, and writes ``theory.csv`` and a figure for each theorem into the folder OUT;
docs/theory.md states and derives the theorems.
"""

import csv
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from math import exp, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import matrix_power, solve

from fl_lightning import (
    SGD,
    AFedPD,
    Arrays,
    FedAvg,
    FedDyn,
    FederatedTrainer,
    FedSAM,
    FedSMOO,
    FlatnessMonitor,
    LambdaMax,
    LocalObjective,
    ReplaySampler,
    Trajectory,
)
from fl_lightning.core.figures import COLORS, COLUMN, MARKERS, PAGE, new_figure, place_legend


class Row(NamedTuple):
    """A number of a theorem beside that of a run; ``error`` is their distance, relative to the first."""

    theorem: int
    clients: str
    quantity: str
    predicted: float
    seen: float
    error: float

    @classmethod
    def of(cls, theorem: int, clients: str, quantity: str, predicted: Tensor, seen: Tensor) -> "Row":
        """Makes the row of two numbers, or of the norms of two vectors."""
        norm = torch.linalg.vector_norm(predicted - seen) / torch.linalg.vector_norm(predicted)
        a, b = (float(x if x.ndim == 0 else torch.linalg.vector_norm(x)) for x in (predicted, seen))
        return cls(theorem, clients, quantity, a, b, float(norm))


class Problem:
    """Clients with the same number of samples, a linear net and a smooth convex loss.

    Args:
        kind: ``quadratic``: squared loss; ``logistic``: logistic loss of labels that the net cannot separate.
        clients: Their number M.
        d: Number of weights.

    Attributes:
        w: The optimum of the mean loss, ``(d,)``.
        g: The clients' gradients there, ``(M, d)``, whose mean is 0.
        A: Their Hessians there, ``(M, d, d)``; those of quadratic clients are the same everywhere.
    """

    def __init__(self, kind: str, clients: int = 4, d: int = 3) -> None:
        draw = torch.Generator().manual_seed(0)
        self.kind, self.d, samples = kind, d, 40
        x = torch.randn(clients + 1, samples, d, generator=draw, dtype=torch.float64)
        x = x * torch.linspace(1, 0.6, d, dtype=torch.float64)
        outputs = x @ torch.randn(clients + 1, d, 1, generator=draw, dtype=torch.float64)
        noise = torch.rand(outputs.shape, generator=draw, dtype=torch.float64)
        y = outputs if kind == "quadratic" else (noise < outputs.sigmoid()).double()
        *self.data, self.test = zip(x, y, strict=True)
        self.loss = nn.MSELoss() if kind == "quadratic" else nn.BCEWithLogitsLoss()
        self.w = torch.zeros(d, dtype=torch.float64)
        for _ in range(20):  # Newton's method
            self.g, self.A = (
                torch.stack(
                    [derivative(lambda w, x=x, y=y: self.loss(x @ w[:, None], y))(self.w) for x, y in self.data]
                )
                for derivative in (torch.func.grad, torch.func.hessian)
            )
            self.w = self.w - solve(self.A.mean(0), self.g.mean(0))

    def train(self, algorithm: type[LocalObjective], lr: float, rounds: int, K: int, **settings: Any) -> Trajectory:
        """Trains from zero with ``K`` full-batch steps of length ``lr`` a round; returns all vectors, ``(d,)`` each.

        ``cohorts`` among the settings says who takes part, again and again; the others are those of the algorithm.
        """
        net = nn.Linear(self.d, 1, bias=False)
        nn.init.zeros_(net.weight)
        cohorts = settings.pop("cohorts", [[*range(len(self.data))]])
        task = "regression" if self.kind == "quadratic" else "multilabel"
        data = Arrays(client_arrays=self.data, test=self.test, batch_size=None, task=task)
        record, model = Trajectory(), algorithm(net, loss=self.loss, optimizer=SGD(lr), **settings)
        fit(model, data, [cohorts[t % len(cohorts)] for t in range(rounds)], [record], K)
        return record


def fit(model: LocalObjective, data: Arrays, cohorts: list[list[int]], callbacks: list[Any], K: int) -> Any:
    """Trains a round for each cohort, in float64; nothing is kept but what the callbacks keep."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        trainer = FederatedTrainer(
            max_rounds=len(cohorts),
            sampler=ReplaySampler(cohorts),
            local_steps=K,
            precision="64-true",
            accelerator="cpu",
            engine="sequential",
            threads=1,
            eval_every=len(cohorts),
            loggers=[],
            callbacks=callbacks,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        return trainer.fit(model, data)


# Theorem 1: where FedAvg ends


def drift(out: Path) -> list[Row]:
    """Compares FedAvg's fixed point on quadratics, and its distance from the optimum to first order on any clients."""
    problem, lr, rows, points = Problem("quadratic"), 0.1, list[Row](), list[Point]()
    for K in (2, 4, 8, 16, 32):
        Q = identity(problem.d) - matrix_power(identity(problem.d) - lr * problem.A, K)
        predicted = -solve(Q.mean(0), (Q @ solve(problem.A, problem.g)[..., None]).mean(0))[:, 0]
        seen = problem.train(FedAvg, lr, 10 + 360 // K, K).server[-1].w - problem.w
        rows.append(Row.of(1, "quadratic", f"‖w − w*‖, K = {K}", predicted, seen))
        points.append((K, predicted, seen))
    with new_figure(PAGE, 2.2) as figure:
        left, right = figure.subplots(1, 2)
        draw(left, points, title="quadratic clients", xlabel="local steps K", ylabel="‖w − w*‖")
        problem, K, points = Problem("logistic"), 3, []
        for lr in (0.8, 0.4, 0.2, 0.1):
            bias = solve(problem.A.mean(0), (problem.A @ problem.g[..., None]).mean(0))[:, 0]
            predicted = lr * (K - 1) / 2 * bias
            seen = problem.train(FedAvg, lr, round(60 / lr), K).server[-1].w - problem.w
            rows.append(Row.of(1, "logistic", f"‖w − w*‖ to first order, K = {K}, η = {lr}", predicted, seen))
            points.append((lr, predicted, seen))
        draw(right, points, title=f"logistic clients, K = {K}", xlabel="step η", ylabel="‖w − w*‖")
        figure.savefig(out / "drift.png", dpi=150)
    return rows


# Theorem 2: how fast the clients of FedDyn and A-FedPD agree, and their duals find the gradients

ALL, HALF = [[0, 1, 2, 3]], [[0, 1], [2, 3], [0, 2], [1, 3]]
METHODS = (("FedDyn, all", FedDyn, ALL), ("FedDyn, half", FedDyn, HALF), ("A-FedPD, half", AFedPD, HALF))


def dual_map(
    problem: Problem, cohort: list[int], lr: float, K: int, beta: float, virtual: bool
) -> tuple[Tensor, Tensor]:
    """Returns what a round does to ``e = (w - w*, lam_1 - g_1, ..., lam_M - g_M)``.

    The first matrix maps ``e`` to that after the round, ``(n, n)``; the others, ``(M, d, n)``, to ``w_k - w^t``.
    """
    M, d = problem.g.shape
    eye, E = identity(d), identity((M + 1) * d).view(M + 1, d, -1)
    B = problem.A + eye / beta
    P = (eye - matrix_power(eye - lr * B, K)) @ torch.linalg.inv(B)
    moves = P @ (E[1:] - problem.A @ E[0])
    mean = moves[cohort].mean(0)
    duals = torch.stack([E[k + 1] - (moves[k] if k in cohort else virtual * mean) / beta for k in range(M)])
    return torch.cat([E[0] + mean - beta * duals.mean(0), *duals]), moves


def dual_errors(
    problem: Problem, algorithm: type[FedDyn], cohorts: list[list[int]], rounds: int
) -> tuple[float, Tensor, Tensor]:
    """Returns the rate of a round, and by round the norms of two errors, computed and of a run, ``(rounds, 2)``.

    The errors are those of consensus, ``w_k - mean w_j``, and of the duals, ``lam_k - g_k``, over the cohort.
    """
    lr, K, beta, d = 0.2, 5, 1.0, problem.d
    run = problem.train(algorithm, lr, rounds, K, cohorts=cohorts, beta=beta)
    maps = [dual_map(problem, cohort, lr, K, beta, algorithm is AFedPD) for cohort in cohorts]
    period = identity(problem.g.numel() + d)
    for step, _ in maps:
        period = step @ period
    rate = float(torch.linalg.eigvals(period).abs().max()) ** (1 / len(maps))
    e, errors = torch.cat([-problem.w, *-problem.g]), list[float]()
    for t in range(rounds):
        cohort, (step, moves) = cohorts[t % len(maps)], maps[t % len(maps)]
        local, e = (moves @ e)[cohort], step @ e
        seen = torch.stack([run.local[t][k].w for k in cohort])
        duals = torch.stack([run.client[t][k].lam for k in cohort]) - problem.g[cohort]
        pairs = local - local.mean(0), seen - seen.mean(0), e.view(-1, d)[1:][cohort], duals
        errors += [float(torch.linalg.norm(error)) for error in pairs]
    predicted, measured = torch.tensor(errors, dtype=torch.float64).view(rounds, 2, 2).unbind(2)
    return rate, predicted, measured


def duals(out: Path) -> list[Row]:
    """Compares consensus and duals, with all clients in every round and with two of four."""
    rows = list[Row]()
    with new_figure(PAGE, 2.3) as figure:
        for axes, kind, rounds in zip(figure.subplots(1, 2), ("quadratic", "logistic"), (120, 400), strict=True):
            for i, (name, algorithm, cohorts) in enumerate(METHODS):
                rate, predicted, seen = dual_errors(Problem(kind), algorithm, cohorts, rounds)
                if kind == "quadratic":
                    for j, error in enumerate(("consensus", "duals")):
                        text = f"error of {error} after 20 rounds: {name}"
                        rows.append(Row.of(2, kind, text, predicted[19, j], seen[19, j]))
                rows.append(Row.of(2, kind, f"rate: {name}", torch.tensor(rate), slope(seen[:, 1])))
                style = {"color": COLORS[i], "markersize": 3}
                axes.plot(predicted[:, 1], linewidth=0.8, label=f"{name}: theorem", **style)
                axes.plot(seen[:, 1], MARKERS[i], markevery=rounds // 24, label=f"{name}: run", **style)
            axes.set(title=f"{kind} clients", xlabel="round", ylabel="‖λ − ∇f(w*)‖", yscale="log", ylim=(1e-14, 10))
        place_legend(figure)
        figure.savefig(out / "duals.png", dpi=150)
    return rows


def slope(errors: Tensor) -> Tensor:
    """Returns by what errors are multiplied each round, between a thousandth of the first one and 1e-11."""
    t = torch.nonzero((errors < errors[0] * 1e-3) & (errors > 1e-11))[:, 0]
    x, y = t - t.double().mean(), errors[t].log()
    return ((x * y).sum() / (x * x).sum()).exp()


# Theorem 3: FedSMOO's perturbation


def perturbation(out: Path) -> list[Row]:
    """Runs FedSMOO with a single weight: its perturbation changes its sign each round, and weights and duals follow."""
    problem, lr, K, beta, rho = Problem("quadratic", d=1), 0.02, 5, 1.0, 0.01
    run = problem.train(FedSMOO, lr, 260, K, beta=beta, rho=rho)
    h = problem.A[:, 0, 0]
    c = 1 - lr * (h + 1 / beta)
    P = (1 - c**K) / (h + 1 / beta)
    r = lr * h * (c ** (K - 1) + c ** (K - 2) - sum(c**j for j in range(K - 2)))
    a = (r / (2 * beta - P)).mean() / ((P * h / (2 * beta - P)).mean() - 2 / (3 * beta))
    lam = (r - P * h * a) / (2 * beta - P)
    s = torch.cat([state.s for state in run.server[1:]])
    w = torch.cat([state.w for state in run.server[1:]]) - problem.w
    local = torch.cat([run.local[-1][k].w for k in range(4)])
    errors = torch.stack([torch.cat([clients[k].lam for k in range(4)]) for clients in run.client]) - problem.g[:, 0]
    with new_figure(COLUMN, 2.2) as figure:
        axes, t = figure.subplots(), torch.arange(len(w))[-12:]
        axes.plot(t, w[-12:], "o", color=COLORS[0], label="w − w*")
        axes.plot(t, a * s[-12:], color="0.6", linewidth=0.8, label="theorem")
        axes.plot(t, errors[-12:, 0], "s", color=COLORS[1], label="λ₁ − ∇f₁(w*)")
        axes.plot(t, lam[0] * s[-12:], color="0.6", linewidth=0.8)
        axes.set(xlabel="round")
        place_legend(figure)
        figure.savefig(out / "perturbation.png", dpi=150)
    return [
        Row.of(3, "quadratic", "perturbation over that of the round before", torch.tensor(-1.0), s[-1] / s[-2]),
        Row.of(3, "quadratic", "(w − w*) / s", a, w[-1] / s[-1]),
        Row.of(3, "quadratic", "errors of the duals / s", lam, errors[-1] / s[-1]),
        Row.of(
            3, "quadratic", "errors of consensus / s", 2 * beta * (lam - lam.mean()), (local - local.mean()) / s[-2]
        ),
    ]


# Theorem 4: where SAM stays, and where FedSAM does


def radius(out: Path) -> list[Row]:
    """SAM on one quadratic client jumps to and fro across the optimum; FedSAM on several stays beside it."""
    single, several, rows, jumps, biases = Problem("quadratic", clients=1), Problem("quadratic"), list[Row](), [], []
    lr, (values, vectors) = 0.4, torch.linalg.eigh(single.A[0])
    units = several.g / torch.linalg.vector_norm(several.g, dim=1, keepdim=True)
    bias = -solve(several.A.mean(0), (several.A @ units[..., None]).mean(0))[:, 0]
    for rho in (0.08, 0.04, 0.02, 0.01):
        w = single.train(FedSAM, lr, 60, 5, rho=rho).server[-1].w - single.w
        predicted = lr * rho * values[-1] / (2 - lr * values[-1]) * vectors[:, -1] * (w @ vectors[:, -1]).sign()
        rows.append(Row.of(4, "one quadratic", f"‖w − w*‖, ρ = {rho}", predicted, w))
        jumps.append((rho, predicted, w))
        seen = several.train(FedSAM, lr, 100, 1, rho=rho).server[-1].w - several.w
        rows.append(Row.of(4, "four quadratic", f"‖w − w*‖ to first order, ρ = {rho}", rho * bias, seen))
        biases.append((rho, rho * bias, seen))
    norm = torch.linalg.vector_norm(single.A[0] @ w)
    edge = norm / (2 * rho) * (torch.sqrt(1 + 8 * rho / (lr * norm)) - 1)
    rows.append(Row.of(4, "one quadratic", "SAM-edge at this gradient, and λ_max", edge, values[-1]))
    with new_figure(PAGE, 2.2) as figure:
        left, right = figure.subplots(1, 2)
        draw(left, jumps, title="one quadratic client", xlabel="radius ρ", ylabel="‖w − w*‖")
        draw(right, biases, title="four quadratic clients, K = 1", xlabel="radius ρ", ylabel="‖w − w*‖")
        figure.savefig(out / "radius.png", dpi=150)
    return rows


# Theorem 5: how SAM finds flat minima


class Valley(nn.Module):
    """``exp(theta / 2) z``: half its square has a minimum at ``z = 0`` for each theta, of curvature ``exp(theta)``."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.theta = (nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in (1e-3, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x exp(theta / 2) z``."""
        return x * torch.exp(self.theta / 2) * self.z


def valley(out: Path) -> list[Row]:
    """SAM drifts along a valley to where it is flat, at a speed that is known; gradient descent stays where it is."""
    lr, K, rows = 0.4, 20, list[Row]()
    half = torch.full((4, 1), sqrt(0.5), dtype=torch.float64)
    curvature = torch.linspace(exp(1), 0.3, 100_000, dtype=torch.float64)
    data = Arrays(client_arrays=[(half, 0 * half)], test=(2 * half, 0 * half), batch_size=None, task="regression")
    clock = 2 / curvature + 2 * lr * curvature.log() - lr**2 / 2 * curvature  # lr rho^2 t, up to a constant
    clock = clock - clock[0]
    with new_figure(COLUMN, 2.2) as figure:
        axes = figure.subplots()
        axes.plot(clock, curvature, color="0.5", label="theorem")
        for i, (rho, rounds) in enumerate(((0.2, 10), (0.1, 40), (0.05, 160))):
            record, monitor = Trajectory(), FlatnessMonitor(rounds, [LambdaMax()])
            model = FedSAM(Valley(), rho=rho, loss=nn.MSELoss(), optimizer=SGD(lr))
            run = fit(model, data, [[0]] * rounds, [record, monitor], K)
            times = lr * rho**2 * K * torch.arange(rounds + 1)
            predicted = curvature[torch.searchsorted(clock, times[-1])]
            seen = torch.tensor(run.metrics["flatness/lambda_max"])
            rows.append(Row.of(5, "a valley", f"λ_max after ηρ²t = {times[-1]:.1f}, ρ = {rho}", predicted, seen))
            flat = torch.stack([state.w[1] for state in record.server]).exp()
            axes.plot(times, flat, MARKERS[i], color=COLORS[i], markevery=rounds // 10, label=f"SAM, ρ = {rho}")
        axes.set(xlabel="ηρ²t", ylabel="λ_max")
        axes.legend(frameon=False)
        figure.savefig(out / "valley.png", dpi=150)
    return rows


Point = tuple[float, Tensor, Tensor]
"""A setting, and two vectors: that of a theorem, and that of a run."""


def draw(axes: Any, points: list[Point], **labels: str) -> None:
    """Draws the norms of both vectors over the setting."""
    x, predicted, seen = zip(*points, strict=True)
    axes.plot(x, [torch.linalg.vector_norm(v) for v in predicted], color=COLORS[0], label="theorem")
    axes.plot(x, [torch.linalg.vector_norm(v) for v in seen], "o", color=COLORS[1], label="run")
    axes.set(xscale="log", yscale="log", **labels)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)


def identity(n: int) -> Tensor:
    """Returns the unit matrix ``(n, n)``."""
    return torch.eye(n, dtype=torch.float64)


THEOREMS = (drift, duals, perturbation, radius, valley)


def main(out: Path) -> list[Row]:
    """Trains, and writes the table and the figures into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for theorem in THEOREMS for row in theorem(out)]
    with (out / "theory.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows((*row[:3], *(f"{x:.6g}" for x in row[3:5]), f"{row[5]:.1e}") for row in rows)
    return rows


if __name__ == "__main__":
    for row in main(Path(*sys.argv[1:2] or ["theory"])):
        print(*row, sep="; ")
