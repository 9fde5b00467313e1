"""Which samples a client trains on, step by step: drawn at once, gathered and augmented when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fl_lightning.data.module import Batch, FederatedDataModule

CHUNK = 64 * 2**20
"""Bytes of samples that are gathered and augmented in one go."""


@dataclass(frozen=True)
class Minibatches:
    """A client's minibatches of one phase; iterated, they give ``(x, y)`` of each step.

    Attributes:
        source: The data module that they are taken from.
        indices: Samples in the order of use, ``(n,)``, on the CPU.
        sizes: Samples of each step; their sum is n.
        draws: What the augmentation drew, ``(n, ...)`` by name, on the CPU.
        dtype: Floating dtype of the samples.
    """

    source: FederatedDataModule
    indices: Tensor
    sizes: list[int]
    draws: dict[str, Tensor]
    dtype: torch.dtype

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        at = 0
        with self.source.reading([self]):
            for sizes in self._chunks(self.sizes):
                n = sum(sizes)
                x, y = self.source.samples(
                    self.indices[at : at + n], {k: v[at : at + n] for k, v in self.draws.items()}, self.dtype
                )
                yield from zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)
                at += n

    def head(self, steps: int) -> Minibatches:
        """The first few steps alone."""
        n = sum(self.sizes[:steps])
        draws = {name: v[:n] for name, v in self.draws.items()}
        return Minibatches(self.source, self.indices[:n], self.sizes[:steps], draws, self.dtype)

    def _chunks(self, sizes: list[int], width: int = 1) -> Iterator[list[int]]:
        """Consecutive steps whose samples, ``width`` times as many, take about `CHUNK` bytes."""
        limit = max(1, CHUNK // (self.source.sample_bytes(self.dtype) * width))
        chunk: list[int] = []
        for size in sizes:
            if chunk and sum(chunk) + size > limit:
                yield chunk
                chunk = []
            chunk.append(size)
        yield chunk


@dataclass(frozen=True)
class Block:
    """Some steps of several clients, padded to one shape.

    Attributes:
        x: Samples, ``(steps, clients, batch, ...)``.
        y: Labels, ``(steps, clients, batch)``, or with Mixup ``(steps, clients, batch, classes)``.
        weight: Weight of each sample in its minibatch's mean, 0 for padding, ``(steps, clients, batch)``.
        active: Whether a client makes that step at all, ``(steps, clients, 1)``.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    active: Tensor


def blocks(clients: Sequence[Minibatches], width: int, batch: int) -> Iterator[Block]:
    """The minibatches of several clients side by side.

    Args:
        clients: Their minibatches, of one source.
        width: Clients of a block; places beyond those given are padding and never active.
        batch: Samples of a minibatch, padding included.
    """
    first, steps = clients[0], max(map(len, clients))
    sizes = torch.zeros(width, steps, dtype=torch.int64)
    base = torch.zeros(width, 1, dtype=torch.int64)
    for i, client in enumerate(clients):
        sizes[i, : len(client)] = torch.tensor(client.sizes)
        base[i] = sum(len(c.indices) for c in clients[:i])
    # position of every place in the concatenation of all clients' samples; padding repeats a minibatch's last sample
    offsets = base + sizes.cumsum(1) - sizes
    place = torch.arange(batch)
    position = offsets[..., None] + torch.minimum(place, (sizes - 1).clamp(min=0)[..., None])
    position = torch.where(sizes[..., None] > 0, position, 0).transpose(0, 1)  # (steps, clients, batch)
    weight = ((place < sizes[..., None]).double() / sizes.clamp(min=1)[..., None]).transpose(0, 1)
    active = (sizes > 0).T[..., None]
    indices = torch.cat([c.indices for c in clients])
    draws = {name: torch.cat([c.draws[name] for c in clients]) for name in first.draws}

    at, device = 0, first.source.device
    with first.source.reading(clients):
        for chunk in first._chunks([batch] * steps, width):
            span = slice(at, at + len(chunk))
            flat = position[span].reshape(-1)
            x, y = first.source.samples(indices[flat], {name: v[flat] for name, v in draws.items()}, first.dtype)
            shape = (len(chunk), width, batch)
            yield Block(
                torch.unflatten(x, 0, shape),
                torch.unflatten(y, 0, shape),
                weight[span].to(device, first.dtype),
                active[span].to(device),
            )
            at += len(chunk)
