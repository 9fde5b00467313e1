"""The Hessian by differences of gradients: against double backward, on kinks, and without second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fl_lightning import (
    SGD,
    Digits,
    Dirichlet,
    FastText,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    LambdaMax,
    UserError,
)
from fl_lightning.core import FlatSpec
from fl_lightning.flatness import LossAt, finite_differences, gradient, hessian, lambda_max, trace
from tests.problem import Golden

CE = nn.CrossEntropyLoss(reduction="none")


def smooth_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.GELU(),
        nn.Linear(16, 4),
    )


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-8), (torch.float32, 1e-2)])
def test_smooth_nets_agree_with_double_backward(golden: Golden, dtype: torch.dtype, rtol: float) -> None:
    """Products, the largest eigenvalue and the trace do, with the step that the weights give."""
    net, data = smooth_net().to(dtype), [(torch.from_numpy(x).to(dtype), torch.from_numpy(y)) for x, y in golden.arrays]
    exact, differences = hessian(net, CE, data), finite_differences(net, CE, data)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        v = torch.randn(exact.shape[0], generator=draw).to(dtype)
        assert float((differences @ v - exact @ v).norm() / (exact @ v).norm()) < rtol
    assert differences.halving(v) < max(rtol, 1e-7) and differences.kept_bytes == 0
    assert lambda_max(differences).value == pytest.approx(lambda_max(exact).value, rel=rtol)
    assert trace(differences, samples=8).value == pytest.approx(trace(exact, samples=8).value, rel=10 * rtol)
    assert not (differences @ torch.zeros_like(v)).any()
    group = {"parameters": ["0.*"]}
    u = v[: hessian(net, CE, data, **group).shape[0]]
    block = hessian(net, CE, data, **group) @ u
    assert float((finite_differences(net, CE, data, **group) @ u - block).norm() / block.norm()) < rtol


def test_padding_does_not_move() -> None:
    """Its embedding has no gradient: the matrix is that of double backward, and symmetric; not where it is shared."""
    torch.manual_seed(0)
    net, w = FastText(vocabulary=6, dim=3).double(), nn.Embedding(6, 3, padding_idx=0)
    data = [(torch.randint(6, (9, 4)) * torch.tensor([1, 1, 0, 0]), torch.randint(4, (9,)))]
    eye = torch.eye(FlatSpec(net).d, dtype=torch.float64)
    torch.testing.assert_close(finite_differences(net, CE, data) @ eye, hessian(net, CE, data) @ eye, atol=1e-8, rtol=0)
    head = nn.Linear(3, 6)
    head.weight = w.weight
    shared = LossAt(nn.Sequential(w, nn.Flatten(), head), CE, data)
    assert not shared.padding().any() and LossAt(w, CE, data).padding().sum() == 3


def test_kinks_are_found_by_halving(golden: Golden) -> None:
    """With a step that crosses none it is the Hessian of double backward; with the usual one a smoothed curvature."""
    net = golden.net().double()
    data = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in golden.arrays]
    v = torch.randn(1220, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = hessian(net, CE, data) @ v
    fine, coarse = (finite_differences(net, CE, data, step=e) for e in (1e-6, 1e-2))
    assert float((fine @ v - exact).norm() / exact.norm()) < 1e-7 and fine.halving(v) < 1e-6
    assert float((coarse @ v - exact).norm() / exact.norm()) > 0.5 and coarse.halving(v) > 0.05


class Once(torch.autograd.Function):
    """A square that is differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class OnceNet(nn.Module):
    def __init__(self, once: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.once = nn.Linear(64, 8), nn.Linear(8, 10), once

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x.flatten(1)))
        return self.two(Once.apply(h) if self.once else h**2)


def test_a_net_without_second_derivatives(tmp_path: Any) -> None:
    """In a run lambda_max is refused by double backward; by differences it is that of the same net with them."""
    metrics = []
    for once, operator in ((True, "finite_differences"), (False, "hessian")):
        data = Digits(num_clients=10, partition=Dirichlet(alpha=1.0), batch_size=16)
        monitor = FlatnessMonitor(1, [LambdaMax(operator=operator)])
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=4, engine="sequential", accelerator="cpu", callbacks=[monitor],
            enable_progress_bar=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        run = trainer.fit(FedAvg(net=OnceNet(once), optimizer=SGD(0.1)), data)
        metrics.append(run.metrics)
    assert metrics[0]["flatness/finite_differences_lambda_max"] == pytest.approx(
        metrics[1]["flatness/lambda_max"], rel=1e-2
    )
    assert metrics[0]["flatness/finite_differences_halving"] < 0.05
    assert '"curvature": "of the loss"' in (tmp_path / "FedAvg-Digits/version_0/flatness.jsonl").read_text()
    trainer.callbacks[-1] = FlatnessMonitor(1, [LambdaMax()])
    with pytest.raises(UserError, match=r"second derivative"):
        trainer.fit(FedAvg(net=OnceNet(True), optimizer=SGD(0.1)), data)


class Attention(nn.Module):
    """A block of attention, whose activations a checkpoint may compute again."""

    def __init__(self, again: str = "no") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.again = nn.Linear(16, 48), nn.Linear(16, 4), again

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.again == "no":
            return self.out(self.block(x).mean(1))
        reentrant = self.again == "reentrant"
        h = checkpoint(self.block, x.clone().requires_grad_() if reentrant else x, use_reentrant=reentrant)
        return self.out(h.mean(1))


class Operations(TorchDispatchMode):
    """Names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("again", ["no", "plain", "reentrant"])
@pytest.mark.parametrize("away", [0.0, 0.3])
def test_fused_attention_and_checkpoints(again: str, away: float) -> None:
    """They are fused in float32, and computed again at the weights of the measurement, not at those of the net."""
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(10, 5, 16, generator=draw), torch.arange(10) % 4) for _ in range(2)]
    plain, net = Attention(), Attention(again)
    w = FlatSpec(plain).vector(plain).detach()
    at = w + away * torch.randn(len(w), generator=draw)
    exact = hessian(plain, CE, data, at)
    with Operations() as fused:
        differences = finite_differences(net, CE, data, at)
        products = [(differences @ v, exact @ v) for v in torch.randn(3, len(w), generator=draw)]
    assert any("flash_attention_for_cpu_backward" in name for name in fused.names)
    assert all(float((one - other).norm() / other.norm()) < 1e-2 for one, other in products)
    assert lambda_max(differences).value == pytest.approx(lambda_max(exact).value, rel=1e-2)
    torch.testing.assert_close(gradient(net, CE, data, at), gradient(plain, CE, data, at))
    torch.testing.assert_close(FlatSpec(net).vector(net).detach(), w, rtol=0, atol=0)
    with Operations() as twice:
        if again != "reentrant":  # which has no gradient of given tensors, and so no second derivative
            torch.testing.assert_close(hessian(net, CE, data, at) @ w, exact @ w)
    assert not any("flash_attention" in name for name in twice.names)


class Int8(torch.autograd.Function):
    """A product with weights of 8 bits and a scale a row, whose gradient is in the inputs alone, and once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return torch.nn.functional.linear(x, weight.to(x.dtype)) * scale

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return (g * scale) @ weight.to(g.dtype), None, None


class QuantisedLinear(nn.Module):
    """A linear layer with weights of 8 bits, which do not train."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return Int8.apply(x, self.weight, self.scale)  # type: ignore[no-any-return]

    def dequantised(self) -> nn.Linear:
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False).requires_grad_(False)
        linear.weight.copy_(self.weight * self.scale[:, None])
        return linear


def test_a_frozen_body_of_8_bits(tmp_path: Any) -> None:
    """The layers before and after it train, as with the weights that the 8 bits stand for."""
    torch.manual_seed(0)
    body = QuantisedLinear(nn.Linear(16, 16, bias=False))
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    net, plain = (nn.Sequential(first, nn.GELU(), middle, nn.GELU(), last) for middle in (body, body.dequantised()))
    data = [(torch.randn(40, 8), torch.arange(40) % 4) for _ in range(2)]
    names = ["0.*", "4.*"]
    exact, differences = hessian(plain, CE, data, parameters=names), finite_differences(net, CE, data, parameters=names)
    assert lambda_max(differences).value == pytest.approx(lambda_max(exact).value, rel=1e-2)
    v = torch.randn(exact.shape[0])
    assert float((differences @ v - exact @ v).norm() / (exact @ v).norm()) < 1e-2
    digits = Digits(num_clients=10, partition=Dirichlet(alpha=1.0), batch_size=16)
    of_digits = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), body, nn.GELU(), nn.Linear(16, 10))
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=4, accelerator="cpu", default_root_dir=str(tmp_path))
    trainer.callbacks = [FlatnessMonitor(1, [LambdaMax()])]
    with pytest.raises(UserError, match=r"second derivatives"):  # which torch leaves out without a word
        trainer.fit(FedAvg(net=of_digits, optimizer=SGD(0.1), buffers="reset"), digits)
