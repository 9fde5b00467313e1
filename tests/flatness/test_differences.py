"""The Hessian by differences of gradients: against double backward, on kinks, and without second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fl_lightning import SGD, Digits, Dirichlet, FedAvg, FederatedTrainer, FlatnessMonitor, LambdaMax, UserError
from fl_lightning.flatness import finite_differences, hessian, lambda_max, trace
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
    """Products, the largest eigenvalue and the trace, with the step that the weights give."""
    net, data = smooth_net().to(dtype), [(torch.from_numpy(x).to(dtype), torch.from_numpy(y)) for x, y in golden.arrays]
    exact, found = hessian(net, CE, data), finite_differences(net, CE, data)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        v = torch.randn(exact.shape[0], generator=draw).to(dtype)
        assert float((found @ v - exact @ v).norm() / (exact @ v).norm()) < rtol
    assert found.halving(v) < max(rtol, 1e-7) and found.kept_bytes == 0
    assert lambda_max(found).value == pytest.approx(lambda_max(exact).value, rel=rtol)
    assert trace(found, samples=8).value == pytest.approx(trace(exact, samples=8).value, rel=10 * rtol)
    assert not (found @ torch.zeros_like(v)).any()
    few = {"parameters": ["0.*"]}
    u = v[: hessian(net, CE, data, **few).shape[0]]
    block = hessian(net, CE, data, **few) @ u
    assert float((finite_differences(net, CE, data, **few) @ u - block).norm() / block.norm()) < rtol


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
    """In a run: lambda_max is refused by double backward, and that of the same net with them by differences."""
    found = []
    for once, operator in ((True, "finite_differences"), (False, "hessian")):
        data = Digits(num_clients=10, partition=Dirichlet(alpha=1.0), batch_size=16)
        monitor = FlatnessMonitor(1, [LambdaMax(operator=operator)])
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=4, engine="sequential", accelerator="cpu", callbacks=[monitor],
            enable_progress_bar=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        run = trainer.fit(FedAvg(net=OnceNet(once), optimizer=SGD(0.1)), data)
        found.append(run.metrics)
    assert found[0]["flatness/finite_differences_lambda_max"] == pytest.approx(
        found[1]["flatness/lambda_max"], rel=1e-2
    )
    assert found[0]["flatness/finite_differences_halving"] < 0.05
    assert '"curvature": "of the loss"' in (tmp_path / "FedAvg-Digits/version_0/flatness.jsonl").read_text()
    trainer.callbacks[-1] = FlatnessMonitor(1, [LambdaMax()])
    with pytest.raises(UserError, match=r"second derivative"):
        trainer.fit(FedAvg(net=OnceNet(True), optimizer=SGD(0.1)), data)
