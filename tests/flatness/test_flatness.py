"""Flatness measures against dense Hessians, closed forms and an independent library."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.core.errors import UserError
from fl_lightning.core.flat import FlatNet, FlatSpec
from fl_lightning.flatness import (
    Eigenpair,
    Reduce,
    flatness_discrepancy,
    gradient,
    hessian,
    lambda_max,
    layers,
    mean_loss,
    measure_discrepancy,
    sharpness,
)

CE = nn.CrossEntropyLoss(reduction="none")
Data = Callable[[], Iterable[tuple[Tensor, Tensor]]]
T = TypeVar("T")


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).to(dtype)


def cnn(norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(2, 4)) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 2), norm(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def data(sizes: tuple[int, ...] = (12,), dtype: torch.dtype = torch.float64) -> Data:
    g = torch.Generator().manual_seed(1)
    n = sum(sizes)
    x, y = torch.randn(n, 3, 3, 3, generator=g).to(dtype), torch.randint(3, (n,), generator=g)
    return lambda: list(zip(torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True))


def dense_hessian(net: nn.Module, batches: Data) -> Tensor:
    spec = FlatSpec(net)
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))

    def f(w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(net.eval(), spec.split(w), (x,)), y)

    matrix: Tensor = torch.func.hessian(f)(spec.vector(net))
    return matrix


class Quadratic(nn.Module):
    """F(w) = c + bᵀw + wᵀAw/2 for every sample, as output and loss at once."""

    def __init__(self, a: Tensor, b: Tensor | None = None, w: Tensor | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(a), dtype=a.dtype) if w is None else w)
        self.a, self.b = a, torch.zeros_like(a[0]) if b is None else b

    def forward(self, x: Tensor) -> Tensor:
        return (3 + self.b @ self.w + self.w @ self.a @ self.w / 2).expand(len(x))


def output(logits: Tensor, target: Tensor) -> Tensor:
    return logits


def symmetric(eigenvalues: list[float]) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))
    a: Tensor = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    return a


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("keep", [True, False])
def test_dense_hessian(make: Callable[[], nn.Module], keep: bool) -> None:
    net, batches = make(), data((5, 7))
    h = dense_hessian(net, batches)
    product = hessian(net, CE, batches, keep_graph=keep)
    rows = torch.stack([product @ e for e in torch.eye(len(h), dtype=h.dtype)])
    torch.testing.assert_close(rows, h, rtol=1e-9, atol=1e-12)

    top = lambda_max(hessian(net, CE, batches, keep_graph=keep), tol=1e-9)
    values, vectors = torch.linalg.eigh(h)
    assert top.converged and top.residual <= 1e-9
    assert top.value == pytest.approx(values[-1].item(), rel=1e-10)
    assert abs(vectors[:, -1] @ top.vector).item() == pytest.approx(1, rel=1e-10)


def test_curvlinops_agrees() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    net, batches = cnn(nn.Identity).eval(), data((5, 7))  # its forward mode has no rule for GroupNorm
    oracle = curvlinops.HessianLinearOperator(net, nn.CrossEntropyLoss(), list(net.parameters()), batches())
    v = torch.randn(FlatSpec(net).d, dtype=torch.float64)
    torch.testing.assert_close(hessian(net, CE, batches) @ v, oracle @ v, rtol=1e-10, atol=1e-12)


def test_every_sample_counts_the_same() -> None:
    net, one, many = mlp(), data((12,)), data((1, 9, 2))
    v = torch.randn(FlatSpec(net).d, dtype=torch.float64)
    assert mean_loss(net, CE, many) == pytest.approx(mean_loss(net, CE, one), rel=1e-12)
    torch.testing.assert_close(gradient(net, CE, many), gradient(net, CE, one), rtol=1e-10, atol=1e-13)
    for keep in (True, False):
        torch.testing.assert_close(
            hessian(net, CE, many, keep_graph=keep) @ v, hessian(net, CE, one) @ v, rtol=1e-10, atol=1e-13
        )
    assert sharpness(net, CE, many) == pytest.approx(sharpness(net, CE, one), rel=1e-10)


def on_each(processes: int, measure: Callable[[nn.Module, int, Reduce], T]) -> list[T]:
    """Calls ``measure(mlp(), rank, reduce)`` in threads for processes; out of step in ``reduce`` they break off."""
    barrier, nets = threading.Barrier(processes, timeout=600), [mlp() for _ in range(processes)]
    contributions: list[Tensor] = [torch.empty(0)] * processes

    def process(rank: int) -> T:
        def reduce(mine: Tensor) -> Tensor:
            contributions[rank] = mine
            barrier.wait()
            total = torch.stack(contributions).sum(0)
            barrier.wait()
            return total

        return measure(nets[rank], rank, reduce)

    # what a measurement sets and restores for its process alone is not for each thread alone
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), ThreadPoolExecutor(processes) as pool:
        return list(pool.map(process, range(processes)))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("keep", [True, False, None])
def test_processes_share_the_samples(keep: bool | None) -> None:
    """Each has some batches, the last one none; all get what a lone process gets."""
    batches, v = data((5, 3, 4)), torch.randn(FlatSpec(mlp()).d, dtype=torch.float64)

    def measure(net: nn.Module, batches: Data, reduce: Reduce | None) -> list[Tensor]:
        top = lambda_max(hessian(net, CE, batches, keep_graph=keep, reduce=reduce), tol=1e-9)
        power = lambda_max(hessian(net, CE, batches, keep_graph=keep, reduce=reduce), method="power")
        numbers = [
            mean_loss(net, CE, batches, reduce=reduce),
            sharpness(net, CE, batches, 0.1, 3, reduce=reduce),
            *(x for pair in (top, power) for x in (pair.value, pair.iterations)),
        ]
        product = hessian(net, CE, batches, keep_graph=keep, reduce=reduce)
        sums = gradient(net, CE, batches, reduce=reduce), product @ v, product @ v
        return [torch.tensor(numbers, dtype=torch.float64), *sums, top.vector]

    parts = [lambda: list(batches())[::2], lambda: list(batches())[1:2], list]
    shared, alone = on_each(3, lambda net, rank, reduce: measure(net, parts[rank], reduce)), mlp()
    for mine in shared:
        for theirs, expected, first in zip(mine, measure(alone, batches, None), shared[0], strict=True):
            torch.testing.assert_close(theirs, expected, rtol=1e-9, atol=1e-12)
            assert torch.equal(theirs, first)


def test_processes_stop_together() -> None:
    """They do also where one sees another residual than the others, as between machines that round differently."""
    for method in ("lanczos", "power"):

        def measure(net: nn.Module, rank: int, reduce: Reduce, method: str = method) -> Eigenpair:
            tol = (1e-3, 1e-9)[rank]
            return lambda_max(hessian(net, CE, data(), reduce=reduce), method=method, tol=tol)  # type: ignore[arg-type]

        loose, strict = on_each(2, measure)
        assert loose.converged and loose.iterations == strict.iterations < 20


def test_no_process_has_a_sample() -> None:
    with pytest.raises(ValueError, match="batches: no sample"):
        on_each(2, lambda net, rank, reduce: gradient(net, CE, list, reduce=reduce))


def test_gradient_and_loss_are_those_of_eval_mode() -> None:
    net, batches = mlp().train(), data()
    (x, y) = next(iter(batches()))
    loss = nn.functional.cross_entropy(net.eval()(x), y)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))])
    net.train()
    assert mean_loss(net, CE, batches) == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient(net, CE, batches), expected, rtol=1e-12, atol=1e-14)


def test_measured_at_another_point() -> None:
    net, copy, batches = mlp(), mlp(), data((5, 7))
    spec, v = FlatSpec(net), torch.randn(FlatSpec(net).d, dtype=torch.float64)
    w = spec.vector(net) + 0.3
    spec.load(copy, w)
    assert mean_loss(net, CE, batches, w) == mean_loss(copy, CE, batches) != mean_loss(net, CE, batches)
    assert sharpness(net, CE, batches, at=w) == sharpness(copy, CE, batches)
    actual, expected = lambda_max(hessian(net, CE, batches, at=w)), lambda_max(hessian(copy, CE, batches))
    assert actual.value == expected.value != lambda_max(hessian(net, CE, batches)).value
    assert torch.equal(gradient(net, CE, batches, w), gradient(copy, CE, batches))
    assert torch.equal(hessian(net, CE, batches, w) @ v, hessian(copy, CE, batches) @ v)


def test_frozen_parameters_are_left_out() -> None:
    net, batches = mlp(), data()
    full = dense_hessian(net, batches)
    first = net[1]  # type: ignore[index]
    first.requires_grad_(False)
    n = sum(p.numel() for p in first.parameters())
    assert lambda_max(hessian(net, CE, batches), tol=1e-9).value == pytest.approx(
        torch.linalg.eigvalsh(full[n:, n:])[-1].item(), rel=1e-9
    )


@pytest.mark.parametrize(
    "eigenvalues",
    [
        [-9.0, -1.0, 0.5, 2.0],
        [-3.0, -2.0, -1.0],
        [5.0, 5.0, 5.0, 1.0],
        [4.0],
        [1.0, 0.0, 0.0, 0.0, 0.0],
        list(torch.linspace(-2, 1, 60).tolist()),
    ],
)
def test_known_spectra(eigenvalues: list[float]) -> None:
    torch.manual_seed(3)
    net = Quadratic(symmetric(eigenvalues))
    top = lambda_max(hessian(net, output, data()), tol=1e-10)
    assert top.value == pytest.approx(max(eigenvalues), rel=1e-9)
    assert top.converged and top.iterations <= len(eigenvalues)
    power = lambda_max(hessian(net, output, data()), method="power", iterations=3000, tol=1e-13)
    assert power.value == pytest.approx(max(eigenvalues, key=abs), rel=1e-5)


def test_invariant_subspace_ends_the_recurrence() -> None:
    top = lambda_max(hessian(Quadratic(symmetric([5.0] * 6 + [1.0] * 6)), output, data()), tol=1e-10)
    assert (top.iterations, top.converged) == (2, True)


def test_zero_and_linear() -> None:
    a = torch.zeros(4, 4, dtype=torch.float64)
    for method in ("lanczos", "power"):
        flat = lambda_max(hessian(Quadratic(a, torch.ones_like(a[0])), output, data()), method=method)
        assert (flat.value, flat.residual, flat.converged) == (0, 0, True)

    class Linear(Quadratic):
        def forward(self, x: Tensor) -> Tensor:
            return self.w.sum().expand(len(x))

    assert lambda_max(hessian(Linear(a), output, data())).value == 0


def test_largest_eigenvalue_zero() -> None:
    torch.manual_seed(0)
    top = lambda_max(hessian(Quadratic(symmetric([-3.0, -2.0, 0.0, 0.0])), output, data()))
    assert abs(top.value) < 1e-14 and top.converged


def test_too_few_iterations_are_confessed() -> None:
    torch.manual_seed(0)
    a = symmetric(torch.linspace(0.01, 1, 200).tolist())
    top = lambda_max(hessian(Quadratic(a), output, data()), iterations=5)
    v = top.vector
    assert not top.converged and top.value < 0.99
    assert top.residual == pytest.approx(((a @ v - top.value * v).norm() / top.value).item(), rel=1e-9)
    assert top.residual > 1e-2
    power = lambda_max(hessian(Quadratic(a), output, data()), method="power", iterations=5)
    v = power.vector
    assert power.residual == pytest.approx(((a @ v - power.value * v).norm() / power.value).item(), rel=1e-9)
    assert (power.iterations, power.converged) == (5, False)


def test_diverged_weights_give_nan() -> None:
    net = mlp()
    next(iter(net.parameters())).data[0, 0] = math.nan
    for method in ("lanczos", "power"):
        top = lambda_max(hessian(net, CE, data()), method=method)
        assert math.isnan(top.value) and not top.converged
    assert math.isnan(sharpness(net, CE, data()))


def test_float32_and_seed() -> None:
    exact = lambda_max(hessian(mlp(), CE, data()), tol=1e-9).value
    net, batches = mlp(torch.float32), data(dtype=torch.float32)
    assert (hessian(net, CE, batches) @ torch.ones(FlatSpec(net).d)).dtype == torch.float32
    a, b, c = (lambda_max(hessian(net, CE, batches), seed=seed) for seed in (0, 0, 1))
    assert a.converged and a.value == pytest.approx(exact, rel=1e-3)
    assert a.value == b.value and torch.equal(a.vector, b.vector)
    assert not torch.equal(a.vector, c.vector)


def test_autocast_and_inference_mode_change_nothing() -> None:
    net, batches = mlp(torch.float32), data((5, 7), torch.float32)
    v = torch.ones(FlatSpec(net).d)

    def measure(keep: bool) -> tuple[Tensor, float, float]:
        product = hessian(net, CE, batches, keep_graph=keep)
        return product @ v, sharpness(net, CE, batches), lambda_max(hessian(net, CE, batches, keep_graph=keep)).value

    for keep in (True, False):
        expected = measure(keep)
        for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.no_grad()):
            with context:
                measured = measure(keep)
            assert torch.equal(measured[0], expected[0]) and measured[1:] == expected[1:]


@pytest.mark.parametrize("flat", [True, False])
def test_nothing_is_touched(flat: bool) -> None:
    net = nn.Sequential(mlp(), nn.BatchNorm1d(3).double())
    net[0][3].eval()  # type: ignore[index]
    views = FlatNet(net) if flat else None
    for p in net.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.normal_()
    x, y = next(iter(data((40,))()))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)  # draws from the global state in every pass

    def state() -> list[object]:
        tensors = [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)]
        return [[t.clone().numpy().tobytes() for t in tensors], [m.training for m in net.modules()]]

    def addresses() -> list[int]:
        return [p.data_ptr() for p in net.parameters()] + [
            p.grad.data_ptr() for p in net.parameters() if p.grad is not None
        ]

    before, pointers, rng = state(), addresses(), torch.get_rng_state()
    for keep in (True, False):
        lambda_max(hessian(net, CE, lambda: loader, keep_graph=keep))
    lambda_max(hessian(net, CE, lambda: loader), method="power")
    sharpness(net, CE, lambda: loader, steps=3)
    measure_discrepancy(net, CE, [(FlatSpec(net).vector(net) + 1, lambda: loader)])

    def interrupted() -> Iterable[tuple[Tensor, Tensor]]:
        yield x, y
        raise KeyboardInterrupt

    for measure in (mean_loss, gradient, hessian, sharpness):
        with pytest.raises(KeyboardInterrupt):
            measure(net, CE, interrupted)
    assert torch.equal(rng, torch.get_rng_state())
    assert state() == before and addresses() == pointers
    if views is not None:
        assert torch.equal(views.w, FlatSpec(net).vector(net))


def test_products_stay_at_the_point_they_were_made_for() -> None:
    batches = data((5, 7))
    for keep, wrapped in itertools.product((True, False), repeat=2):
        net = mlp()
        flat = FlatNet(net) if wrapped else None
        v = torch.ones(FlatSpec(net).d, dtype=torch.float64)
        product = hessian(net, CE, batches, keep_graph=keep)
        expected = product @ v
        if flat is None:
            FlatSpec(net).load(net, v)
        else:
            flat.w.add_(1)
        assert torch.equal(product @ v, expected)


def test_graph_is_kept_for_small_data_only() -> None:
    net, batches, passes = mlp(), data((5, 7)), 0

    def counted() -> Iterable[tuple[Tensor, Tensor]]:
        nonlocal passes
        passes += 1
        return batches()

    for keep, expected in ((None, 2), (True, 2), (False, 4)):
        passes = 0
        product = hessian(net, CE, counted, keep_graph=keep)
        for _ in range(3):
            product @ torch.ones(FlatSpec(net).d)
        assert passes == expected


def test_attention_has_second_derivatives() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x, y = torch.randn(3, 5, 4), torch.zeros(3)
    top = lambda_max(hessian(net, lambda out, _: out.square().mean((1, 2)), lambda: [(x, y)]))
    assert top.converged


def test_sharpness_of_a_quadratic() -> None:
    torch.manual_seed(0)
    a, b = symmetric([-1.0, 0.5, 4.0]), torch.randn(3, dtype=torch.float64)
    w, rho = torch.randn(3, dtype=torch.float64), 0.3
    g = b + a @ w
    u = g / g.norm()
    expected = rho * g.norm() + rho**2 / 2 * (u @ a @ u)
    assert sharpness(Quadratic(a, b, w), output, data((2, 5)), rho) == pytest.approx(expected.item(), rel=1e-9)
    assert sharpness(Quadratic(a, b, w), output, data(), 0.0) == 0


def test_more_steps_reach_the_maximum() -> None:
    a, w, rho = torch.diag(torch.tensor([1.0, 9.0]).double()), torch.tensor([1.0, 0.05]).double(), 0.5
    angle = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)
    ball = w + rho * torch.stack([angle.cos(), angle.sin()], -1)
    best = ((ball @ a * ball).sum(-1) / 2).max().item() - (w @ a @ w / 2).item()
    net = Quadratic(a, w=w)
    one, many = sharpness(net, output, data(), rho), sharpness(net, output, data(), rho, steps=50)
    assert one < 0.9 * best
    assert many == pytest.approx(best, rel=1e-6)


def test_sharpness_at_a_stationary_point_is_zero() -> None:
    assert sharpness(Quadratic(torch.eye(3)), output, data()) == 0


def test_discrepancy_by_hand() -> None:
    assert flatness_discrepancy(1.0, [2.0, 5.0], [30, 10]) == pytest.approx(abs(1 - (0.75 * 2 + 0.25 * 5)))
    net, d1, d2 = mlp(), data((4,)), data((5, 3))
    w1, w2 = FlatSpec(net).vector(net) + 0.1, FlatSpec(net).vector(net) - 0.1
    union = sharpness(net, CE, lambda: [*d1(), *d2()], 0.1)
    s1, s2 = sharpness(net, CE, d1, 0.1, at=w1), sharpness(net, CE, d2, 0.1, at=w2)
    expected = abs(union - (4 * s1 + 8 * s2) / 12)
    assert measure_discrepancy(net, CE, [(w1, d1), (w2, d2)], 0.1) == pytest.approx(expected, rel=1e-9)
    assert expected > 1e-4


def test_identical_clients_have_no_discrepancy() -> None:
    net, batches = mlp(), data((5, 7))
    w = FlatSpec(net).vector(net)
    assert measure_discrepancy(net, CE, [(w, batches)] * 3) == pytest.approx(0, abs=1e-13)
    assert measure_discrepancy(net, CE, [(w, batches), (w * 3, batches)]) > 1e-3


def test_errors() -> None:
    net, batches = mlp(), data()
    with pytest.raises(ValueError, match="batches: no sample"):
        mean_loss(net, CE, lambda: [])
    with pytest.raises(ValueError, match="batches: no sample"):
        lambda_max(hessian(net, CE, lambda: []))
    with pytest.raises(ValueError, match="one value per sample"):
        gradient(net, nn.CrossEntropyLoss(), batches)
    with pytest.raises(ValueError, match="method"):
        lambda_max(hessian(net, CE, batches), method="qr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="iterations"):
        lambda_max(hessian(net, CE, batches), iterations=0)
    with pytest.raises(ValueError, match="rho"):
        sharpness(net, CE, batches, rho=-1)
    with pytest.raises(ValueError, match="client"):
        flatness_discrepancy(1.0, [1.0], [1, 2])


@pytest.mark.parametrize("names", [nn.Linear(1, 1), nn.Sequential(nn.Flatten()), 3])
def test_layers_takes_names(names: object) -> None:
    with pytest.raises(UserError, match=r"^names = an? \w+: give names, as net\.named_parameters\(\) has them$"):
        layers(names)  # type: ignore[arg-type]
