"""Hessian, Gauss-Newton and Fisher matrices against explicit matrices, closed forms and an independent library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import UserError
from fl_lightning.core.flat import FlatSpec
from fl_lightning.flatness import (
    Operator,
    Reduce,
    density,
    fisher,
    gauss_newton,
    gradient,
    hessian,
    lambda_max,
    mean_loss,
    measure_discrepancy,
    sharpness,
    spectrum,
    trace,
)
from fl_lightning.flatness.functional import LossAt
from tests.devices import Device
from tests.flatness.test_curvature import TinyViT
from tests.flatness.test_flatness import CE, Data, Quadratic, cnn, data, mlp, on_each, output, symmetric

KINDS = [hessian, gauss_newton, fisher]
Make = Callable[..., Operator]


def mse(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - torch.nn.functional.one_hot(target, outputs.shape[1])).square().sum(1)


def of_tanh(outputs: Tensor, target: Tensor) -> Tensor:
    """Returns a loss that is not convex."""
    return outputs.tanh().prod(1) + target


def matrix(a: Operator) -> Tensor:
    return a @ torch.eye(a.shape[0], dtype=a.dtype)


def explicit(kind: Make, net: nn.Module, loss: Any, batches: Data) -> Tensor:
    """Computes the matrix by Jacobians and loops over samples."""
    spec = FlatSpec(net.eval())
    w = spec.vector(net)
    total, n = torch.zeros(spec.d, spec.d, dtype=w.dtype), 0
    for xs, ys in batches():
        for x, y in zip(xs, ys, strict=True):

            def z(w: Tensor, x: Tensor = x) -> Tensor:
                return torch.func.functional_call(net, spec.split(w), (x[None],))

            def of_outputs(z: Tensor, y: Tensor = y) -> Tensor:
                return loss(z, y[None])[0]

            jacobian = torch.func.jacrev(z)(w).reshape(-1, spec.d)
            if kind is gauss_newton:
                middle = torch.func.hessian(of_outputs)(z(w)).reshape(len(jacobian), len(jacobian))
                total += jacobian.T @ middle @ jacobian
            else:
                g = torch.func.grad(of_outputs)(z(w)).reshape(-1) @ jacobian
                total += torch.outer(g, g)
            n += 1
    return total / n


def softmax_regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 3)).double()


@pytest.mark.slow
@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize("loss", [CE, mse, of_tanh])
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("kind", [gauss_newton, fisher])
def test_explicit_sums(kind: Make, make: Callable[[], nn.Module], loss: Any) -> None:
    net, batches = make(), data((2, 3))
    expected = explicit(kind, net, loss, batches)
    for keep in (True, False):
        actual = matrix(kind(net, loss, batches, keep_graph=keep))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)
    if loss is not of_tanh or kind is fisher:
        assert torch.linalg.eigvalsh(actual).min() > -1e-12
    assert (actual - matrix(hessian(net, loss, batches))).abs().max() > 1e-3


@pytest.mark.parametrize("loss", [CE, mse, of_tanh])
def test_gauss_newton_of_a_linear_net_is_its_hessian(loss: Any) -> None:
    net, batches = softmax_regression(), data((5, 7))
    actual, exact = matrix(gauss_newton(net, loss, batches)), matrix(hessian(net, loss, batches))
    torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-13)


def test_closed_forms() -> None:
    """1/n Σ M ⊗ xxᵀ: softmax regression has M = diag p - ppᵀ, or (p - e_y)(p - e_y)ᵀ for E; least squares M = 2 I."""
    net, batches = softmax_regression(), data((12,))
    ((x, y),) = batches()
    p, x = net(x).detach().softmax(1), torch.cat([x.flatten(1), torch.ones(12, 1, dtype=x.dtype)], 1)
    order = torch.arange(84).view(3, 28)
    order = torch.cat([order[:, :27].flatten(), order[:, 27]])  # the biases come last
    slopes = p - nn.functional.one_hot(y, 3)
    eye = torch.eye(3, dtype=x.dtype).expand(12, 3, 3)
    for kind, loss, middle in (
        (gauss_newton, CE, torch.diag_embed(p) - p[:, :, None] * p[:, None]),
        (fisher, CE, slopes[:, :, None] * slopes[:, None]),
        (gauss_newton, mse, 2 * eye),
    ):
        expected = torch.einsum("nij,na,nb->iajb", middle, x, x).reshape(84, 84)[order][:, order] / 12
        torch.testing.assert_close(matrix(kind(net, loss, batches)), expected, rtol=1e-10, atol=1e-14)


def test_quadratic() -> None:
    """The loss is linear in the outputs: G = 0; each sample has the gradient b + Aw: E is its outer product."""
    torch.manual_seed(0)
    a, b, w = symmetric([-1.0, 0.5, 4.0]), torch.randn(3).double(), torch.randn(3).double()
    net, g = Quadratic(a, b, w), b + a @ w
    assert matrix(gauss_newton(net, output, data())).abs().max() == 0
    torch.testing.assert_close(matrix(hessian(net, output, data((3, 4)))), a)
    torch.testing.assert_close(matrix(fisher(net, output, data((3, 4)))), torch.outer(g, g))
    top = lambda_max(fisher(net, output, data()))
    assert top.value == pytest.approx((g @ g).item()) and trace(fisher(net, output, data())).value == pytest.approx(
        (g @ g).item()
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("normalized", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(6, 7), lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3))]
)
def test_weight_normalisation(layer: Callable[[], nn.Module], normalized: Any) -> None:
    """torch's own second derivative of it is wrong; the matrix agrees with differences of gradients."""
    torch.manual_seed(0)
    first = layer()
    normalized(first[-1] if isinstance(first, nn.Sequential) else first)
    net = nn.Sequential(first, nn.Flatten(), nn.Tanh(), nn.LazyLinear(4)).double()
    batches = [(torch.randn(20, 6).double(), torch.arange(20) % 4)]
    net(batches[0][0])
    w = FlatSpec(net).vector(net)
    steps = 1e-5 * torch.eye(len(w), dtype=w.dtype)
    differences = [gradient(net, CE, batches, w + s) - gradient(net, CE, batches, w - s) for s in steps]
    actual = matrix(hessian(net, CE, batches))
    torch.testing.assert_close(actual, torch.stack(differences) / 2e-5, rtol=0, atol=1e-8)
    torch.testing.assert_close(actual, actual.T, rtol=0, atol=1e-14)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("make", [mlp, lambda: cnn(nn.Identity)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(hessian, "HessianLinearOperator"), (gauss_newton, "GGNLinearOperator"), (fisher, "EFLinearOperator")],
)
def test_curvlinops_agrees(kind: Make, name: str, make: Callable[[], nn.Module]) -> None:
    """Products agree, and so do the measures of its operators."""
    curvlinops = pytest.importorskip("curvlinops")
    net, batches = make().eval(), data((5, 7))
    oracle = getattr(curvlinops, name)(net, nn.CrossEntropyLoss(), list(net.parameters()), batches())
    operator, v = kind(net, CE, batches), torch.randn(FlatSpec(net).d, 3, dtype=torch.float64)
    torch.testing.assert_close(operator @ v, oracle @ v, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(
        spectrum(operator, k=4, tol=1e-8).values, spectrum(oracle, k=4, tol=1e-8).values, rtol=1e-10, atol=1e-13
    )
    assert trace(operator, samples=12).value == pytest.approx(trace(oracle, samples=12).value, rel=1e-8)


# Groups of parameters


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", KINDS)
def test_block_of_a_group(kind: Make) -> None:
    net, batches = cnn(), data((2, 3))
    full = matrix(kind(net, CE, batches))
    places = dict(zip(FlatSpec(net).names, torch.arange(len(full)).split(FlatSpec(net).numels), strict=True))
    for patterns, names in (
        (["5.*"], ["5.weight", "5.bias"]),
        (["*.bias", "0.weight"], ["0.weight", "0.bias", "1.bias", "5.bias"]),
        (["[01].weight"], ["0.weight", "1.weight"]),
        (["*"], FlatSpec(net).names),
    ):
        block = kind(net, CE, batches, parameters=patterns)
        index = torch.cat([places[name] for name in names])
        assert block.f.names == names and block.shape == (len(index), len(index))
        torch.testing.assert_close(matrix(block), full[index][:, index], rtol=1e-10, atol=1e-14)
        top = torch.linalg.eigvalsh(full[index][:, index])[-1].item()
        assert lambda_max(block, tol=1e-9).value == pytest.approx(top, rel=1e-9)


def test_group_at_another_point_and_group_without_influence() -> None:
    net, batches = mlp(), data()
    w = FlatSpec(net).vector(net) + 0.3
    full = matrix(hessian(net, CE, batches, w))
    torch.testing.assert_close(matrix(hessian(net, CE, batches, w, parameters=["4.*"])), full[-21:, -21:])
    net.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    for kind in KINDS:
        assert matrix(kind(net, CE, batches, parameters=["idle"])).tolist() == [[0, 0], [0, 0]]


def test_group_that_matches_nothing() -> None:
    with pytest.raises(UserError, match=r"^parameters = head.\*: matches none of 1.weight, 1.bias"):
        hessian(mlp(), CE, data(), parameters=["4.*", "head.*"])
    with pytest.raises(UserError, match="at least one pattern"):
        hessian(mlp(), CE, data(), parameters=[])


# One kind of object


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_linear_operator(kind: Make) -> None:
    net = mlp(torch.float32)
    a = kind(net, CE, data((5, 7), torch.float32))
    d = FlatSpec(net).d
    assert (tuple(a.shape), a.dtype, a.device) == ((d, d), torch.float32, torch.device("cpu"))
    v = torch.randn(d, 3)
    assert torch.equal(a @ v, torch.stack([a @ column for column in v.T], 1)) and not (a @ v).requires_grad
    for wrong in (torch.ones(d + 1), torch.ones(3, d)):
        with pytest.raises(UserError, match="does not fit"):
            a @ wrong


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", KINDS)
def test_measures_take_any_matrix(kind: Make) -> None:
    """It may be an operator, its dense matrix, or what only has shape, dtype, device and products."""
    a = kind(mlp(), CE, data((5, 7)))
    full = matrix(a)

    class Bare:
        shape, dtype, device = a.shape, a.dtype, a.device

        def __matmul__(self, v: Tensor) -> Tensor:
            return full @ v

    for b in (full, Bare()):
        actual, expected = spectrum(b, k=3, tol=1e-9), spectrum(a, k=3, tol=1e-9)
        torch.testing.assert_close(actual.values, expected.values, rtol=1e-11, atol=1e-13)
        assert lambda_max(b).iterations == lambda_max(a).iterations
        assert trace(b, samples=12).value == pytest.approx(trace(a, samples=12).value, rel=1e-9)
        assert density(b, steps=8).moment(2).value == pytest.approx(density(a, steps=8).moment(2).value, rel=1e-8)
    for measure in (lambda_max, spectrum, trace, density):
        with pytest.raises(UserError, match=r"\(d, d\)"):
            measure(torch.ones(3, 4))  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_data_as_a_list_or_a_loader(kind: Make) -> None:
    net, batches = mlp(), data((5, 7))
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    expected = kind(net, CE, batches) @ torch.ones(FlatSpec(net).d, dtype=torch.float64)
    for source in (batches(), tuple(batches()), DataLoader(TensorDataset(x, y), batch_size=5)):
        for keep in (True, False):
            actual = kind(net, CE, source, keep_graph=keep) @ torch.ones_like(expected)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)
    with pytest.raises(UserError, match="read only once"):
        kind(net, CE, iter(batches()))


def test_losses_of_a_list() -> None:
    net, batches = mlp(), data((5, 7))
    w = FlatSpec(net).vector(net)
    for measure in (mean_loss, sharpness):
        assert measure(net, CE, list(batches())) == measure(net, CE, batches)
    assert torch.equal(gradient(net, CE, list(batches())), gradient(net, CE, batches))
    as_lists, as_functions = ([(w + 1, source), (w, source)] for source in (list(batches()), batches))
    assert measure_discrepancy(net, CE, as_lists) == measure_discrepancy(net, CE, as_functions)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_the_samples(kind: Make, keep: bool) -> None:
    batches = data((5, 3, 4))
    parts: list[Data] = [lambda: list(batches())[::2], lambda: list(batches())[1:2], list]
    options: dict[str, Any] = {"keep_graph": keep, "parameters": ["4.*"]}
    alone = matrix(kind(mlp(), CE, batches, **options))
    top = lambda_max(kind(mlp(), CE, batches, **options), tol=1e-8)

    def measure(net: nn.Module, rank: int, reduce: Reduce) -> tuple[Tensor, float]:
        a = kind(net, CE, parts[rank], reduce=reduce, **options)
        return matrix(a), lambda_max(a, tol=1e-8).value

    for mine, value in on_each(3, measure):
        torch.testing.assert_close(mine, alone, rtol=1e-10, atol=1e-14)
        assert value == pytest.approx(top.value, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_inference_mode_change_nothing(kind: Make) -> None:
    net, batches = mlp(torch.float32), data((5, 7), torch.float32)
    v = torch.ones(FlatSpec(net).d)
    for keep in (True, False):
        expected = kind(net, CE, batches, keep_graph=keep) @ v, lambda_max(kind(net, CE, batches)).value
        for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.no_grad()):
            with context:
                actual = kind(net, CE, batches, keep_graph=keep) @ v, lambda_max(kind(net, CE, batches)).value
            assert torch.equal(actual[0], expected[0]) and actual[1] == expected[1]


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("place", ["cuda", "mps"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_device(kind: Make, place: str) -> None:
    """On MPS there is no float64."""
    batches = data((5, 7), torch.float32)
    on_host = kind(mlp(torch.float32), CE, batches, parameters=["4.*"])
    expected = lambda_max(on_host).value, trace(on_host, samples=12).value, density(on_host, steps=5).moment(2).value
    with Device(place) as device:
        net = mlp(torch.float32).to(device.device)
        a = kind(net, CE, batches, parameters=["4.*"])
        assert a.device.type == place
        actual = lambda_max(a).value, trace(a, samples=12).value, density(a, steps=5).moment(2).value
    assert actual == pytest.approx(expected, rel=1e-4)


def test_attention_and_batch_norm() -> None:
    """Fused attention has no second derivative; in eval mode samples do not mix."""
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(27), nn.Linear(27, 3)).double()
    for net in (TinyViT().double(), normed.train()):
        ((x, y),) = data((4,))()
        g = torch.stack([gradient(net, CE, [(x[i : i + 1], y[i : i + 1])]) for i in range(4)])
        v = torch.randn(g.shape[1], dtype=torch.float64)
        torch.testing.assert_close(fisher(net, CE, [(x, y)]) @ v, g.T @ (g @ v) / 4, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(v @ (gauss_newton(net, CE, [(x, y)]) @ v), curvature_along(net, x, v))


def curvature_along(net: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Returns 1/n Σ_i (J_i v)ᵀ (diag p_i - p_i p_iᵀ) J_i v, by central differences."""
    spec, h = FlatSpec(net.eval()), 1e-6
    w = spec.vector(net)
    up, down = (torch.func.functional_call(net, spec.split(w + s * h * v), (x,)).detach() for s in (1, -1))
    p, z = net(x).detach().softmax(1), (up - down) / (2 * h)
    return ((p * z * z).sum(1) - (p * z).sum(1) ** 2).mean()


def test_loss_of_a_group_is_a_function_of_its_weights() -> None:
    net, ((x, y),) = mlp().eval(), data()()
    f = LossAt(net, CE, [(x, y)], parameters=["4.bias"])
    losses, outputs = f.scores(x, y)
    (g,) = torch.autograd.grad(losses.mean(), f.w)
    assert f.names == ["4.bias"] and torch.equal(outputs, net(x))
    torch.testing.assert_close(g, gradient(net, CE, [(x, y)])[-3:])
