"""Compressors of vectors ``(..., d)``: a short code, and what it decodes to."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.core import ClientContext, norm

Code = tuple[Tensor, ...]
"""The code of a vector: tensors ``(..., n)``, of as many values as `Compressor.widths` says."""
Widths = Sequence[tuple[int, int]]
"""For each tensor of a code the number of its values, and the bits of each."""
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Compressor(Protocol):
    """Server and client know d and what is drawn; only the code travels."""

    def widths(self, d: int, bits: int) -> Widths:
        """Returns the form of the code of ``d`` numbers of 32 or 64 bits."""

    def draw(self, x: Tensor, ctx: ClientContext) -> Tensor:
        """Returns the random numbers of one code; by default, none are needed."""
        return x

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        """Returns the code of a vector."""

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        """Returns the vector ``(..., d)`` of a code."""


class TopK(Compressor):
    """The ``k = max(1, round(rate d))`` largest magnitudes and their places; of equal ones the first."""

    def __init__(self, rate: float, scaled: bool = False) -> None:
        self.rate, self.scaled = rate, scaled

    def k(self, d: int) -> int:
        """Returns how many of ``d`` numbers travel."""
        return max(1, round(self.rate * d))

    def widths(self, d: int, bits: int) -> Widths:
        return [(self.k(d), bits), (self.k(d), (d - 1).bit_length())]

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        places = x.abs().sort(dim=-1, descending=True, stable=True).indices[..., : self.k(x.shape[-1])]
        return x.gather(-1, places), places

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        return code[0].new_zeros(*code[0].shape[:-1], d).scatter(-1, code[1], code[0])


class RandK(TopK):
    """k numbers at places without replacement, which server and client draw; ``scaled``: times d/k, so unbiased."""

    def widths(self, d: int, bits: int) -> Widths:
        return [(self.k(d), bits)]

    def draw(self, x: Tensor, ctx: ClientContext) -> Tensor:
        return ctx.draw(lambda generator: torch.randperm(d := x.shape[-1], generator=generator)[: self.k(d)], "randk")

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        one = 0 * x.abs().amax(-1, keepdim=True)  # NaN if some number is not finite, which is refused though it stays
        return (x.gather(-1, drawn) * (x.shape[-1] / drawn.shape[-1] if self.scaled else 1) + one,)

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        return super().decode((*code, drawn), d, drawn)


class QSGD(Compressor):
    """The norm of each bucket, and of each number its sign and one of ``levels`` magnitudes above 0, drawn unbiased.

    Args:
        levels: s.
        bucket: Numbers of a bucket; None: all.
        shrink: Divisor of the decoded vector.
    """

    def __init__(self, levels: int, bucket: int | None, shrink: float) -> None:
        self.levels, self.bucket, self.shrink = levels, bucket, shrink

    def widths(self, d: int, bits: int) -> Widths:
        return [(-(-d // (self.bucket or d)), bits), (d, (2 * self.levels).bit_length())]

    def draw(self, x: Tensor, ctx: ClientContext) -> Tensor:
        return ctx.draw(lambda generator: torch.rand(x.shape[-1], generator=generator, dtype=x.dtype), "qsgd")

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        each, s = self._buckets(x), self.levels
        norms = norm(each)
        a = (s * each.abs() / norms.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=s)  # the norm may be rounded down
        levels = each.sign() * (a.floor() + (self._buckets(drawn) < a - a.floor()))
        return norms.squeeze(-1), levels.flatten(-2)[..., : x.shape[-1]] + s

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        y = code[0].unsqueeze(-1) * self._buckets(code[1] - self.levels) / self.levels
        return y.flatten(-2)[..., :d] / self.shrink

    def _buckets(self, v: Tensor) -> Tensor:
        """Returns a vector ``(..., d)`` as ``(..., buckets, size)``, with zeros at its end."""
        size = self.bucket or v.shape[-1]
        return torch.unflatten(pad(v, (0, -v.shape[-1] % size)), -1, (-1, size))


class Sign(Compressor):
    """The mean magnitude, and the sign of each number; that of 0 is +."""

    def widths(self, d: int, bits: int) -> Widths:
        return [(1, bits), (d, 1)]

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        return x.abs().mean(-1, keepdim=True), (x >= 0).to(x)

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        return code[0] * (2 * code[1] - 1)


def pack(code: Code, widths: Widths) -> Tensor:
    """Returns the code of one client's vector as bytes; zeros fill the last one."""
    each = [(v.cpu(), width) for v, (_, width) in zip(code, widths, strict=True)]
    integers = [(v.view(INTEGERS[v.dtype]) if width >= 32 else v.long(), np.arange(width)) for v, width in each]
    bits = [(v.numpy()[:, None] >> shifts & 1).ravel() for v, shifts in integers]
    return torch.from_numpy(np.packbits(np.concatenate(bits).astype(np.uint8)))


def unpack(data: Tensor, widths: Widths, like: Tensor) -> Code:
    """Returns the code that `pack` made bytes of; numbers have the dtype of ``like``."""
    pieces = np.split(np.unpackbits(data.cpu().numpy()), np.cumsum([n * width for n, width in widths]))
    bits = [piece.reshape(n, width).astype(np.int64) for piece, (n, width) in zip(pieces, widths, strict=False)]
    integers = [torch.from_numpy((b << np.arange(b.shape[1])).sum(1)).to(like.device) for b in bits]
    numbers = INTEGERS[like.dtype]
    return tuple(v.to(numbers).view(like.dtype) if b.shape[1] >= 32 else v for v, b in zip(integers, bits, strict=True))
