"""MAN: which activations count, what the term is, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fl_lightning import (
    MAN,
    SGD,
    SWA,
    Digits,
    DigitsMLP,
    Dirichlet,
    FedAvg,
    FederatedTrainer,
    FedGMT,
    FedSOL,
    FlatnessMonitor,
    LambdaMax,
    LocalObjective,
    UserError,
)
from fl_lightning.core import norm
from tests.integration.test_identities import close, path
from tests.problem import Golden


def term(net: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """Returns the sum of the layers' mean squares, by sample."""
    with MAN(2.0, **options).further(net) as values:
        net(x)
    return values(len(x))


class Net(nn.Module):
    """Activations of many kinds, in modules and functions; their mean squares, collected by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.by_hand = []

        def kept(a: Tensor) -> Tensor:
            self.by_hand.append(a.square().flatten(1).mean(1))
            return a

        x = kept(self.act(self.one(x)))  # a module
        x = kept(functional.gelu(self.one(x[:, :3])))  # a function, on a module that is called twice
        x = kept(x.relu()).mean((2, 3))
        x = kept(self.act(self.two(x)))  # the same module once more
        x = kept(functional.silu(self.two(x), inplace=True))
        return self.out(torch.tanh(x))


def test_every_activation_counts_as_often_as_it_is_called() -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    values = term(net, x)
    assert len(net.by_hand) == 5
    close(values, sum(net.by_hand))
    twice = term(net, torch.cat([x, x]))
    close(twice.mean(), values.mean())


@pytest.mark.parametrize(
    "act", [nn.ReLU6, nn.PReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish]
)
def test_modules_of_activations_count(act: type[nn.Module]) -> None:
    """``nn.ReLU6``, as in MobileNetV2, calls another function than ``functional.relu6``."""
    net, x = nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 2)), torch.randn(5, 3)
    close(term(net, x), net[:2](x).square().mean(1))


def test_an_activation_after_pooling_counts_as_before() -> None:
    """The two commute, and the published nets have the other order."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(5, 3, 8, 8)
    relu_first = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    pool_first = nn.Sequential(conv, nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.Flatten())
    assert torch.equal(relu_first(x), pool_first(x))
    assert torch.equal(term(relu_first, x), term(pool_first, x))
    assert term(pool_first, x, before_pooling=False).mean() > 1.2 * term(pool_first, x).mean()


@pytest.mark.parametrize("act", [torch.relu_, Tensor.relu_, torch.celu_, functional.elu_, functional.leaky_relu_])
def test_functions_that_work_in_place_count(act: Any) -> None:
    """With the weights' gradients: what a pooling keeps for its backward pass stays as it is."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3).double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)

    class Pooled(nn.Module):
        def __init__(self, act: Any, adaptive: bool) -> None:
            super().__init__()
            self.act, self.pool = act, nn.AdaptiveMaxPool2d(3) if adaptive else nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.act(self.pool(conv(x)))
            return y

    expected = act(conv(x).clone()).square().flatten(1).mean(1)
    gradient = torch.autograd.grad(expected.mean(), [*conv.parameters()])
    for adaptive in (False, True):
        values = term(Pooled(act, adaptive), x)
        close(values, expected)
        for g, right in zip(torch.autograd.grad(values.mean(), [*conv.parameters()]), gradient, strict=True):
            close(g, right)


@pytest.mark.parametrize("layers", [None, ["1"]])
def test_what_the_net_adds_in_place_later_does_not_count(layers: Any) -> None:
    torch.manual_seed(0)

    class Skipping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self[1](self[0](x))
            y += x
            return y

    net, x = Skipping(nn.Linear(4, 4), nn.GELU()).double(), torch.randn(5, 4, dtype=torch.float64)
    values, expected = term(net, x, layers=layers), functional.gelu(net[0](x)).square().mean(1)
    close(values, expected)
    gradients = (torch.autograd.grad(v.mean(), [*net.parameters()]) for v in (values, expected))
    for g, right in zip(*gradients, strict=True):
        close(g, right)


def test_named_layers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(7, 6)
    outputs = [net[: i + 1](x).square().mean(1) for i in range(5)]
    assert torch.equal(term(net, x), outputs[3])
    close(term(net, x, layers=["1", "2"]), outputs[1] + outputs[2])
    close(term(net, x, layers=["[13]"]), outputs[1] + outputs[3])


def test_a_dead_layer_adds_nothing() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].bias.fill_(-100)
    values = term(net, torch.randn(5, 3))
    values.sum().backward()
    assert not values.any() and not any(p.grad.any() for p in net[0].parameters() if p.grad is not None)


def test_units_that_are_folded_with_samples_and_low_precision() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.flatten(0, 1)).view(x.shape).sum((1, 2))

    x = torch.randn(4, 3, 5)
    close(term(Tokens(), x), x.relu().square().mean((1, 2)))
    big = term(nn.ReLU(), torch.full((2, 3), 300.0, dtype=torch.float16))
    assert big.dtype == torch.float32 and big.tolist() == [9e4, 9e4]  # beyond float16


def test_checkpointed_layers_count_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).double()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net[4](checkpoint(self.net[:4], x, use_reentrant=False))

    x, gradients = torch.randn(6, 3, dtype=torch.float64), []
    for module in (net, Checkpointed()):
        values = term(module, x)
        gradients.append(torch.autograd.grad(values.mean(), list(net[:4].parameters())))
    for plain, again in zip(*gradients, strict=True):
        close(plain, again)


# In training


def test_neutral_and_at_work(golden: Golden) -> None:
    plain = path(golden, FedAvg)
    assert torch.equal(path(golden, FedAvg, parts=[MAN(0.0)]), plain)
    assert norm(path(golden, FedAvg, parts=[MAN(1.0)])[-1] - plain[-1]) > 0.5


def test_values_of_the_spec(golden: Golden) -> None:
    """Mean squares are as published for the problem; evaluation is of the loss alone."""
    net = golden.net().double()
    conv = 0.1816841194, 0.1812597481, 0.1718551208, 0.1827844824
    fc1 = 0.1343944718, 0.1098427747, 0.1007134019, 0.1326453826
    means = [term(net, torch.from_numpy(x).double()).mean().item() for x, _ in golden.arrays]
    assert means == pytest.approx([a + b for a, b in zip(conv, fc1, strict=True)], abs=1e-9)
    run, _ = golden.run(FedAvg(golden.net(), optimizer=SGD(0.1, weight_decay=1e-3), parts=[MAN(1.0)]), max_rounds=1)
    x, y = (torch.from_numpy(a) for a in golden.test)
    run.objective.flat.load(run.objective.net, run.server.w)
    loss = nn.functional.cross_entropy(run.objective.net(x.double()), y)
    assert run.metrics["server/test/loss"] == pytest.approx(float(loss), abs=1e-12)


@pytest.mark.slow
def test_flatness_of_the_spec(golden: Golden) -> None:
    eigenvalues = []
    for zeta in (0.0, 0.15, 1.0):
        monitor = FlatnessMonitor(every_n_rounds=6, metrics=[LambdaMax()])
        objective = FedAvg(golden.net(), optimizer=SGD(0.1, weight_decay=1e-3), parts=[MAN(zeta)])
        eigenvalues.append(golden.run(objective, callbacks=[monitor])[0].metrics["flatness/lambda_max"])
    assert eigenvalues == pytest.approx([7.5718, 5.4299, 1.8679], rel=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("method", [FedAvg, FedGMT, FedSOL])
def test_engines_agree_where_minibatches_are_padded(tmp_path: Path, method: type[LocalObjective]) -> None:
    """They do with teachers, which do not count, and with other losses than the objective's, too."""
    runs = []
    for engine in ("sequential", "batched", "graphed"):
        torch.manual_seed(0)
        data = Digits(num_clients=8, partition=Dirichlet(0.3), batch_size=16)
        objective = method(net=DigitsMLP(), optimizer=SGD(0.1), parts=[MAN(0.5)], averaging=SWA(start=0.5))
        trainer = FederatedTrainer(
            max_rounds=2, clients_per_round=4, engine=engine, precision="64-true", accelerator="cpu",
            enable_progress_bar=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        runs.append(trainer.fit(objective, data))
    for run in runs[1:]:
        close(run.server.w, runs[0].server.w)


class Own(FedAvg):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(DigitsMLP(), parts=[MAN(layers=["nothing"])]), r"model\.parts: MAN: layers"),
        (lambda: Own(DigitsMLP(), parts=[MAN()]), r"MAN: Own has a training_step of its own, .* define losses$"),
        (lambda: term(nn.Linear(2, 2), torch.ones(1, 2)), r"Linear calls no activation function; name its layers"),
        (
            lambda: term(nn.Sequential(nn.LSTM(2, 2)), torch.ones(1, 2), layers=["0"]),
            r"MAN: layers: LSTM returns a tuple; name modules that return one tensor$",
        ),
        (lambda: MAN(-1.0), r"zeta = -1"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
