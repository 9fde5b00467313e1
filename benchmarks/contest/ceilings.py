"""The floor of a workload: its FLOPs, and the best rates that this machine reaches on the kernels it needs.

``python -m contest.ceilings '{"work": "W1"}'`` prints one line of JSON. A convolution's rate is that of its own shapes
in channels-last layout; all linear layers get the rate of a large matrix product. Nothing but these is in the floor: no
pooling, no ReLU, no update.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from contest import workloads
from contest.workloads import Work

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


def flops(f: Callable[[], Any]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        f()
    return counter.get_total_flops()


def seconds(f: Callable[[], Any], budget: float = 0.5) -> float:
    """The shortest of the runs that fit into ``budget`` seconds, three at least."""
    f()
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        started = time.perf_counter()
        f()
        times.append(time.perf_counter() - started)
    return min(times)


class Floor:
    """FLOPs and least seconds of one batch, forward alone and forward with backward."""

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        self.work, self.dtype = work, dtype
        a, b = torch.randn(2, 2048, 2048).to(dtype)
        self.rates = {"matmul 2048": 2 * 2048**3 / seconds(lambda: a @ b)}
        net = work.net()
        size = (work.batch, 3, 32, 32) if work.augment else (work.batch, 1, 8, 8)
        x, y = torch.randn(size), torch.zeros(work.batch, dtype=torch.int64)
        self.forward = self.training = 0.0  # seconds in convolutions, then in all
        conv_forward = conv_training = 0
        if work.augment:  # the convolutions of W3 are too small for their time to be that of their arithmetic
            h = x
            for i, layer in enumerate(net):
                if isinstance(layer, nn.Conv2d):
                    one, both = self._convolution(layer, h.detach(), f"conv{1 + bool(i)}", needs_grad=i > 0)
                    conv_forward, conv_training = conv_forward + one, conv_training + both
                h = layer(h)
        with torch.no_grad():
            self.forward_flops = flops(lambda: net(x))
        self.training_flops = flops(lambda: F.cross_entropy(net(x), y).backward())
        self.forward += (self.forward_flops - conv_forward) / self.rates["matmul 2048"]
        self.training += (self.training_flops - conv_training) / self.rates["matmul 2048"]

    def _convolution(self, layer: nn.Conv2d, x: Tensor, name: str, needs_grad: bool) -> tuple[int, int]:
        """Measure one; return its FLOPs, forward and in training."""
        layer = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, padding=layer.padding)
        layer = layer.to(self.dtype, memory_format=torch.channels_last)
        x = x.to(self.dtype, memory_format=torch.channels_last).requires_grad_(needs_grad)
        g = torch.ones_like(layer(x))
        wanted = [*layer.parameters(), *([x] if needs_grad else [])]

        @torch.no_grad()
        def forward() -> Tensor:
            return layer(x)

        def both() -> None:
            for v in wanted:
                v.grad = None
            layer(x).backward(g)

        counts, times = (flops(forward), flops(both)), (seconds(forward), seconds(both))
        self.rates[f"{name} forward"] = counts[0] / times[0]
        self.rates[f"{name} forward + backward"] = counts[1] / times[1]
        self.forward += times[0]
        self.training += times[1]
        return counts

    def round(self, method: str) -> dict[str, float]:
        """FLOPs and least seconds of a round."""
        batches = self.work.round_samples / self.work.batch
        training, forward = workloads.PASSES[method]
        return {
            "flops": batches * (training * self.training_flops + forward * self.forward_flops),
            "floor_s": batches * (training * self.training + forward * self.forward),
        }


def main() -> None:
    work = workloads.work(json.loads(sys.argv[1]))
    torch.set_num_threads(work.threads)
    floors = {precision: Floor(work, dtype) for precision, dtype in DTYPES.items()}
    print(json.dumps({
        precision: {"rates": floor.rates, "rounds": {method: floor.round(method) for method in workloads.METHODS}}
        for precision, floor in floors.items()
    }))  # fmt: skip


if __name__ == "__main__":
    main()
