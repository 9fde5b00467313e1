"""TFLOP/s of one convolution of several clients, each with its own weights, in forms that an engine could use."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.legs.items import synchronize
from fl_lightning.trainer.runtime.environment import float32_products, repeatable_convolutions

LAST = torch.channels_last
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}
LAYERS = ((3, 32), (64, 14))
"""Channels and size of the images: the two convolutions of HsuCNN, 5x5 with 64 channels, without padding."""
SECONDS = 10.0
"""After which no form is measured."""
EACH = 0.03
"""Seconds of a repeated measurement, about."""
LIMIT = 0.02
"""Largest relative difference between two forms."""
Step = Callable[[], list[Tensor]]


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """One group a client: what vmap gives cuDNN."""
    y = F.conv2d(x.transpose(0, 1).flatten(1, 2), w.flatten(0, 1), groups=len(w))
    return y.unflatten(1, (len(w), -1)).transpose(0, 1)


def grouped_last(x: Tensor, w: Tensor) -> Tensor:
    images = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=LAST)
    y = F.conv2d(images, w.flatten(0, 1).contiguous(memory_format=LAST), groups=len(w))
    return y.unflatten(1, (len(w), -1)).transpose(0, 1)


def alone_last(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=LAST), w.contiguous(memory_format=LAST))


def unfolded(x: Tensor, w: Tensor) -> Tensor:
    """The patches as a matrix, and a product for each client."""
    clients, images, kernel = len(x), x.shape[1], w.shape[-1]
    size = x.shape[-1] - kernel + 1
    patches = F.unfold(x.flatten(0, 1), kernel).unflatten(0, (clients, images)).transpose(1, 2).flatten(2)
    return torch.bmm(w.flatten(2), patches).unflatten(-1, (images, size, size)).transpose(1, 2)


class Form(NamedTuple):
    """A convolution of all clients' images ``(clients, n, c, h, w)``, or of one client's if ``one_by_one``."""

    convolution: Callable[[Tensor, Tensor], Tensor]
    one_by_one: bool = False
    deterministic: bool = False


FORMS = {
    "groups": Form(grouped),
    "groups, deterministic": Form(grouped, deterministic=True),
    "groups, channels_last": Form(grouped_last),
    "one by one": Form(F.conv2d, one_by_one=True),
    "one by one, channels_last": Form(alone_last, one_by_one=True),
    "unfold and bmm": Form(unfolded),
}


def conv_forms(device: str) -> dict[str, Any]:
    """Forward and backward of each form, in a CUDA graph; a form that fails has 0, and its error is in ``failed``.

    The first layer's images need no gradient. The first form's numbers are those that others are compared with.
    """
    cuda, end = device == "cuda", time.perf_counter() + SECONDS
    found: dict[str, Any] = {}
    failed: list[str] = []
    for clients, (channels, size), (label, dtype) in product((5, 50) if cuda else (2,), LAYERS, DTYPES.items()):
        shapes = Shapes(clients, 64 if cuda else 4, channels, size)
        x, w, g = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes.tensors)
        first: Tensor | None = None
        for name, form in FORMS.items():
            if time.perf_counter() > end:
                break
            key = f"{name}; {clients} clients, {channels} channels, {label}"
            step = both_ways(form, x, w, g, of_images=channels > 3)
            try:
                with float32_products(label == "tf32"), repeatable_convolutions(form.deterministic):
                    out = torch.cat([v.flatten() for v in step()])
                    first = out if first is None else first
                    compare(out, first)
                    del out
                    found[key] = shapes.flops(of_images=channels > 3) / seconds(step, device) / 1e12
            except RuntimeError as error:
                found[key] = 0.0
                failed.append(f"{key}: {str(error)[:200]}")
    return {**found, **({"failed": "; ".join(failed)} if failed else {})}


class Shapes(NamedTuple):
    """Those of a layer with 64 kernels of 5x5."""

    clients: int
    images: int
    channels: int
    size: int

    @property
    def tensors(self) -> list[tuple[int, ...]]:
        """Images, weights, and the gradient that arrives."""
        out = self.size - 4
        return [
            (self.clients, self.images, self.channels, self.size, self.size),
            (self.clients, 64, self.channels, 5, 5),
            (self.clients, self.images, 64, out, out),
        ]

    def flops(self, of_images: bool) -> float:
        """FLOPs forward and backward; with the images' gradient or without."""
        pixels = self.clients * self.images * (self.size - 4) ** 2
        return 2.0 * pixels * 64 * self.channels * 25 * (2 + of_images)


def both_ways(form: Form, x: Tensor, w: Tensor, g: Tensor, of_images: bool) -> Step:
    """Returns a function for the outputs, the gradients of the weights, and those of the images if asked for."""
    xs, ws, gs = (list(v.unbind()) if form.one_by_one else [v] for v in (x, w, g))
    if form.convolution is alone_last:  # images arrive like this
        xs = [v.contiguous(memory_format=LAST) for v in xs]
    xs = [v.detach().requires_grad_(of_images) for v in xs]
    ws = [v.detach().requires_grad_() for v in ws]
    leaves = [*ws, *(xs if of_images else [])]

    def step() -> list[Tensor]:
        ys = [form.convolution(a, b) for a, b in zip(xs, ws, strict=True)]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, gs)]

    return step


def compare(out: Tensor, first: Tensor) -> None:
    """Raises a RuntimeError if two forms do not find the same."""
    difference = float((out - first).float().norm() / first.float().norm())
    if not difference < LIMIT:
        raise RuntimeError(f"its numbers differ by {difference:.2g}")


def seconds(step: Step, device: str) -> float:
    """Seconds of a step, the best of three measurements; on a GPU as a CUDA graph."""
    if device != "cuda":
        return best(step, device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # cuDNN chooses its kernels before the capture
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    taken = best(graph.replay, device)
    del results  # till now, as the graph only knows where they lie; `step` holds what it reads
    return taken


def best(run: Callable[[], object], device: str) -> float:
    """Seconds of a run, repeated as often as there is time for."""
    once = repeated(run, 1, device)
    times = max(1, min(20, int(EACH / once)))
    return min(once, *(repeated(run, times, device) for _ in range(3 if once < 10 * EACH else 1)))


def repeated(run: Callable[[], object], times: int, device: str) -> float:
    """Seconds of one of several runs."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / times
