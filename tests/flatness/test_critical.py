"""Critical sharpness: closed forms, published brackets, and directions along which a loss rises, or never does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    SGD,
    Checkpoints,
    CriticalSharpness,
    Digits,
    DigitsMLP,
    Dirichlet,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    UserError,
)
from fl_lightning.flatness import critical_rate, gradient, mean_loss
from fl_lightning.flatness.neighbourhood import search
from fl_lightning.results.metrics import read_metrics
from tests.problem import Golden, trajectory

CE = nn.CrossEntropyLoss(reduction="none")


class Quadratic(nn.Module):
    """1/2 sum h_i (w_i - c_i)^2, whatever the data."""

    def __init__(self, h: Tensor, c: Tensor) -> None:
        super().__init__()
        self.h, self.c, self.w = h, c, nn.Parameter(torch.zeros_like(c))

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.h * (self.w - self.c) ** 2).sum().expand(len(x))


def take(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs


@pytest.mark.parametrize("first", [1e-3, 0.7, 50.0])
def test_quadratics(first: float) -> None:
    """Along an eigenvector it is 2 / lambda, along the gradient the Rayleigh quotient; s D is s times as sharp."""
    draw = torch.Generator().manual_seed(0)
    h, c = torch.tensor([5.0, 2, 1, 0.1]).double(), torch.randn(4, generator=draw, dtype=torch.float64)
    model, data = Quadratic(h, c), [(torch.zeros(3, 1), torch.zeros(3))]
    options: dict[str, Any] = {"first": first, "tol": 1e-7}
    for i in range(4):
        e = torch.eye(4, dtype=torch.float64)[i] * -c[i] * h[i]  # a gradient
        crossing = critical_rate(model, take, data, e, **options)
        assert crossing.rate == pytest.approx(2 / float(h[i]), rel=1e-6)
        assert crossing.lo <= 2 / float(h[i]) * (1 + 1e-12) and 2 / float(h[i]) <= crossing.hi * (1 + 1e-12)
    g = gradient(model, take, data)
    rayleigh = float(g @ (h * g) / (g @ g))
    crossing = critical_rate(model, take, data, g, **options)
    assert crossing.sharpness == pytest.approx(rayleigh, rel=1e-6) and crossing.sharpness <= 5
    assert critical_rate(model, take, data, 3 * g, **options).sharpness == pytest.approx(3 * rayleigh, rel=1e-6)
    w = model.w.detach().clone()
    assert torch.equal(model.w, w)


@pytest.fixture
def problem(golden: Golden) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Returns net and data of the golden problem, the model of FedAvg after six rounds, and the gradient there."""
    net = golden.net().double()
    data = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in golden.arrays]
    w = torch.from_numpy(trajectory("fedsam__FedAvg")["global"][6])
    return net, data, w, gradient(net, CE, data, w)


@pytest.mark.parametrize(
    ("at", "first", "bracket", "evaluations", "exact"),
    [
        ("initial", 1e-3, (4.608, 4.864), 18, 4.70519754),
        ("initial", 0.1, (4.6, 4.8), 11, 4.70519754),
        ("initial", 1.0, (4.5, 4.75), 8, 4.70519754),
        ("initial", 30.0, (4.6875, 4.921875), 8, 4.70519754),
        ("fedavg", 1e-3, (0.352, 0.368), 14, 0.36429630),
        ("fedavg", 1.0, (0.359375, 0.375), 7, 0.36429630),
    ],
)
def test_brackets_of_the_spec(
    problem: Any, golden: Golden, at: str, first: float, bracket: Any, evaluations: int, exact: float
) -> None:
    """They are those of an independent implementation, with its numbers of evaluations."""
    net, data, w, g = problem
    if at == "initial":
        w = torch.cat([p.detach().double().flatten() for p in golden.net().parameters()])
        g = gradient(net, CE, data, w)
    crossing = critical_rate(net, CE, data, g, w, first=first)
    assert (crossing.lo, crossing.hi, crossing.evaluations) == (
        pytest.approx(bracket[0]),
        pytest.approx(bracket[1]),
        evaluations,
    )
    assert crossing.lo <= exact <= crossing.hi
    assert critical_rate(net, CE, data, g, w, tol=1e-9).rate == pytest.approx(exact, abs=1e-8)
    assert critical_rate(net, CE, data, g, w, first=crossing.rate).evaluations <= 7  # a warm start


def test_a_loss_that_rises_at_once(problem: Any) -> None:
    """Noise is no descent, in float64 and float32; a known slope saves all evaluations."""
    net, data, w, g = problem
    for dtype in (torch.float64, torch.float32):
        v, uphill = w.to(dtype), -g.to(dtype)
        batches = [(x.to(dtype), y) for x, y in data]
        for first in (1e-3, 1.0):
            crossing = critical_rate(net.to(dtype), CE, batches, uphill, v, first=first)
            assert (crossing.rate, crossing.sharpness) == (0.0, math.inf)
        known = critical_rate(net, CE, batches, uphill, v, slope=float(g @ -g))
        assert known.rate == known.evaluations == 0


CASES: list[tuple[Callable[[float], float], float, float]] = [
    (lambda e: -e, math.inf, math.inf),  # never rises
    (lambda e: 1.0, math.inf, math.inf),
    (lambda e: e, 0.0, 0.0),
    (lambda e: (e - 1) ** 2, 2.0, 2.0),
    (lambda e: -e if e < 3 else math.nan, 3.0, 3.0),  # what is not finite has risen
    (lambda e: 5 - 1e-18 * e, math.inf, math.inf),  # below rounding
]


@pytest.mark.parametrize("first", [1e-3, 0.5, 2.0, 7.0])
@pytest.mark.parametrize(("value", "lo", "hi"), CASES)
def test_functions_of_a_rate(value: Callable[[float], float], lo: float, hi: float, first: float) -> None:
    crossing = search(value, first, 1e-6)
    if math.isinf(hi):
        assert math.isinf(crossing.hi) and crossing.rate == crossing.lo > first
        assert search(value, first, 1e-6, highest=100 * first).lo < 300 * first
    else:
        assert (crossing.lo, crossing.hi) == (pytest.approx(lo, rel=2e-6), pytest.approx(hi, rel=2e-6))


# In runs


def digits(folder: Path, rounds: int = 4, measure: CriticalSharpness | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    data = Digits(num_clients=10, partition=Dirichlet(alpha=1.0), batch_size=16)
    monitor = FlatnessMonitor(every_n_rounds=2, metrics=[measure or CriticalSharpness(clients=2, tol=1e-6)])
    trainer = FederatedTrainer(
        max_rounds=rounds, clients_per_round=4, engine="sequential", precision="64-true", accelerator="cpu",
        enable_progress_bar=False, default_root_dir=str(folder), callbacks=[monitor, Checkpoints(every_n_rounds=2)],
        **options.pop("settings", {}),
    )  # fmt: skip
    return trainer.fit(FedAvg(net=DigitsMLP(), optimizer=SGD(0.2)), data, **options)


def test_along_the_updates_of_a_round(tmp_path: Path) -> None:
    """The loss is back at its value where the whole update has been made so many times."""
    run = digits(tmp_path, rounds=2)
    run_before = digits(tmp_path, rounds=1)
    before, after = run_before.server.w, run.server.w
    chosen = run.data.sample_indices(1000, run.seed)
    at = {"model": run.objective.net, "loss": CE, "batches": [*run.data.eval_batches(chosen, run.dtype)]}
    moves = run.metrics["flatness/critical_moves_server"]
    start = mean_loss(**at, at=before)
    assert mean_loss(**at, at=before + moves * (after - before)) == pytest.approx(start, abs=1e-5)
    assert mean_loss(**at, at=before + 0.5 * moves * (after - before)) < start
    g = gradient(**at, at=after)
    rate = 2 / run.metrics["flatness/critical_sharpness"]
    assert mean_loss(**at, at=after - rate * g) == pytest.approx(mean_loss(**at, at=after), abs=1e-5)
    assert {"flatness/critical_sharpness_own", "flatness/critical_ascending_clients"} <= {*run.metrics}


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    """It keeps the rates at which the searches begin."""
    uninterrupted = digits(tmp_path / "whole", rounds=6, measure=CriticalSharpness(clients=2))
    digits(tmp_path / "broken", rounds=4, measure=CriticalSharpness(clients=2))
    resumed = digits(tmp_path / "broken", rounds=6, measure=CriticalSharpness(clients=2), ckpt_path="last")
    a, b = (read_metrics(run.folder.metrics) for run in (uninterrupted, resumed))
    names = {name for name in a if "critical" in name}
    assert names and all(a[name] == b[name] for name in names)


def test_refused() -> None:
    with pytest.raises(UserError, match=r"CriticalSharpness\.along = \[\]: name gradient, server or clients"):
        CriticalSharpness(along=[])
    with pytest.raises(UserError, match=r"tol = 0.7"):
        CriticalSharpness(tol=0.7)
