"""Compressed uploads with error feedback, and compressors of vectors ``(..., d)``."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import ClientContext, FlatSpec, Init, Interval, PositiveInt, State, Upload, ensure, norm, require

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
        guard = 0 * x.abs().amax(-1, keepdim=True)  # NaN if some number is not finite, which is refused though it stays
        return (x.gather(-1, drawn) * (x.shape[-1] / drawn.shape[-1] if self.scaled else 1) + guard,)

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        return super().decode((*code, drawn), d, drawn)


class QSGD(Compressor):
    """The norm of each bucket, and of each number its sign and one of ``levels`` magnitudes above 0, drawn unbiased.

    Args:
        levels: s.
        bucket: Numbers of a bucket; None: all.
        shrinks: Whether the decoded vector is divided by 1 + omega.
    """

    def __init__(self, levels: int, bucket: int | None, shrinks: bool = False) -> None:
        self.levels, self.bucket, self.shrinks = levels, bucket, shrinks

    def omega(self, d: int) -> float:
        """Returns the bound on the variance of ``d`` numbers, over their square norm."""
        B = min(self.bucket or d, d)
        return float(min(B / self.levels**2, B**0.5 / self.levels))

    def widths(self, d: int, bits: int) -> Widths:
        return [(-(-d // (self.bucket or d)), bits), (d, (2 * self.levels).bit_length())]

    def draw(self, x: Tensor, ctx: ClientContext) -> Tensor:
        return ctx.draw(lambda generator: torch.rand(x.shape[-1], generator=generator, dtype=x.dtype), "qsgd")

    def encode(self, x: Tensor, drawn: Tensor) -> Code:
        rows, s = self._buckets(x), self.levels
        norms = norm(rows)
        a = (s * rows.abs() / norms.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=s)  # the norm may be rounded down
        levels = rows.sign() * (a.floor() + (self._buckets(drawn) < a - a.floor()))
        return norms.squeeze(-1), levels.flatten(-2)[..., : x.shape[-1]] + s

    def decode(self, code: Code, d: int, drawn: Tensor) -> Tensor:
        y = code[0].unsqueeze(-1) * self._buckets(code[1] - self.levels) / self.levels
        return y.flatten(-2)[..., :d] / (1 + self.omega(d) if self.shrinks else 1.0)

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
    pairs = [(v.cpu(), width) for v, (_, width) in zip(code, widths, strict=True)]
    integers = [(v.view(INTEGERS[v.dtype]) if width >= 32 else v.long(), np.arange(width)) for v, width in pairs]
    bits = [(v.numpy()[:, None] >> shifts & 1).ravel() for v, shifts in integers]
    return torch.from_numpy(np.packbits(np.concatenate(bits).astype(np.uint8)))


def unpack(data: Tensor, widths: Widths, like: Tensor) -> Code:
    """Returns the code that `pack` made bytes of; numbers have the dtype of ``like``."""
    pieces = np.split(np.unpackbits(data.cpu().numpy()), np.cumsum([n * width for n, width in widths]))
    bits = [piece.reshape(n, width).astype(np.int64) for piece, (n, width) in zip(pieces, widths, strict=False)]
    integers = [torch.from_numpy((b << np.arange(b.shape[1])).sum(1)).to(like.device) for b in bits]
    numbers = INTEGERS[like.dtype]
    return tuple(v.to(numbers).view(like.dtype) if b.shape[1] >= 32 else v for v, b in zip(integers, bits, strict=True))


KEY = "model.parts = Compress"
DEFAULTS = {"rate": 0.01, "levels": 15, "bucket": 512}
SETTINGS = {"topk": ("rate",), "randk": ("rate",), "qsgd": ("levels", "bucket"), "sign": ()}


class Compress(Part):
    """What a client uploads is compressed: its change, and what earlier rounds have left out of it.

    Of each upload with a reference r (`LocalObjective.references`) the client compresses ``x = e + (upload - r)``. What
    arrives is ``r + C(x)``, and the client keeps ``e = x - C(x)``. Scalars and buffers travel as they are. Whatever
    acts on uploads (faults, rules, clipping, noise) acts on what arrives. It stands last in the list.

    Args:
        method: C. topk: the largest magnitudes. randk: numbers at random places. qsgd: random rounding to levels
            (Alistarh et al., NeurIPS 2017). sign: signs times the mean magnitude (Karimireddy et al., ICML 2019).
        rate: Share of the numbers that topk and randk send; 1: the uploads as they are.
        levels: Levels s of qsgd.
        bucket: Numbers of qsgd that share a norm; null: all.
        error_feedback: Whether a client keeps what was left out (otherwise e is 0). With it qsgd is divided by
            1 + omega, where omega = min(B / s^2, sqrt(B) / s) for B numbers in a bucket; without it randk is multiplied
            by d/k. null: true, but for qsgd with omega up to 2 false.

    Raises:
        UserError: If a setting does not fit the method, or compression does not fit the algorithm.
    """

    def __init__(
        self,
        method: Literal["topk", "randk", "qsgd", "sign"] = "topk",
        rate: Annotated[float, Interval("(0, 1]")] = 0.01,
        levels: Annotated[int, Interval("[1, 32767]")] = 15,
        bucket: PositiveInt | None = 512,
        error_feedback: bool | None = None,
    ) -> None:
        self.method, self.rate, self.levels, self.bucket = method, rate, levels, bucket
        self.error_feedback = error_feedback
        for name in DEFAULTS.keys() - SETTINGS[method]:
            value = getattr(self, name)
            require(value == DEFAULTS[name], f"{KEY}: {name}", value, f"{method} has no such setting; leave it out")
        self.compressor: Compressor

    def bind(self, flat: FlatSpec) -> Part:
        """Returns a part for this layout; one that does nothing if all numbers travel."""
        bound, setting = copy(self), self.error_feedback
        omega = QSGD(self.levels, self.bucket).omega(flat.d) if self.method == "qsgd" else 0.0
        problem = f"qsgd's variance may be {omega:.3g} times the square; give true or false, or more levels"
        require(setting is not None or omega <= 2, f"{KEY}: error_feedback", "null", problem)
        bound.error_feedback = feedback = self.method != "qsgd" if setting is None else setting
        top = TopK(self.rate)
        methods = {"topk": top, "randk": RandK(self.rate, not feedback), "sign": Sign()}
        bound.compressor = methods.get(self.method) or QSGD(self.levels, self.bucket, feedback)
        return Part() if "rate" in SETTINGS[self.method] and top.k(flat.d) == flat.d else bound

    def attach(self, objective: Any) -> None:
        """Finds what is compressed.

        Raises:
            UserError: If server and clients both sum up what is compressed, or the server needs it exactly.
        """
        name, inits, references = type(objective).__name__, objective.server_inits(), objective.all_references
        both = ", ".join(sorted(({*objective.client_inits()} & {*inits}) - {*objective.sums.values()}))
        exact = ", ".join(upload for upload in objective.up if upload not in references)
        remedy = "leave it out, or choose another algorithm"
        for wrong, problem in (
            (both, f"{name} keeps {both} on server and clients, which would drift apart; {remedy}"),
            (exact, f"{name}'s server computes with the exact upload {exact}; {remedy}"),
            (objective.parts[-1] is not self, "a part after it would change what it has compressed; list it last"),
        ):
            ensure(not wrong, f"{KEY}: {problem}")
        shared, d = objective.encoded({"w": torch.arange(objective.flat.d)})["w"], objective.flat.d
        self.places = {d: shared} if len(shared) < d else {}
        vectors = [
            n
            for n in objective.up
            if n not in objective.dense
            and isinstance(references[n], str)
            and not isinstance(inits.get(references[n]), int | float)
        ]
        vectors = vectors if len(shared) else []  # otherwise nothing travels
        self.uploads = [(n, references[n], f"Compress.{n}", objective.sums.get(n)) for n in vectors]
        residuals = {
            e: inits.get(r, "zeros") for _, r, e, total in self.uploads if self.error_feedback and total is None
        }
        self.client_state = {e: partial(_zeros, init, self.places) for e, init in residuals.items()}

    def local_end(
        self, w: Tensor, upload: Upload, client: State, received: State, ctx: ClientContext
    ) -> tuple[Upload, State]:
        """Uploads ``r + C(x)`` and keeps ``x - C(x)``."""
        for name, reference, e, total in self.uploads:
            r = received.get(reference, torch.zeros_like(received.w))
            change = (upload[name] - r).expand(*w.shape[:-1], -1)
            places, y = self.places.get(r.shape[-1], slice(None)), torch.zeros_like(change)
            x = client[e] + change[..., places] if e in self.client_state else change[..., places]
            drawn = self.compressor.draw(x, ctx)
            code = self.compressor.encode(x, drawn)
            y[..., places] = decoded = self.compressor.decode(code, x.shape[-1], drawn)
            upload = {**upload, name: pack(code, self._widths(r)) if self.packs else r + y}
            if e in self.client_state:
                client = client.replace(**{e: x - decoded})
            if total is not None:  # what is left out is in the next change
                client = client.replace(**{total: client[total] + (y - change)})
        return upload, client

    def arrived(self, upload: Upload, received: State, ctx: ClientContext) -> Upload:
        """Decodes the bytes."""
        for name, reference, *_ in self.uploads:
            r = received.get(reference, torch.zeros_like(received.w))
            code, d = unpack(upload[name], self._widths(r), r), r.shape[-1]
            known = self.method != "topk" or int(code[1].max()) < d
            ensure(known, f"its upload {name} has a place beyond its {d} numbers")
            upload = {**upload, name: r + self.compressor.decode(code, d, self.compressor.draw(r, ctx))}
        return upload

    def bits(self, bits: Mapping[str, int], values: Mapping[str, Tensor], up: bool) -> Mapping[str, int]:
        """Returns the lengths of the codes."""
        lengths = {n: sum(k * width for k, width in self._widths(values[n])) for n, *_ in self.uploads if up}
        return {**bits, **lengths}

    def _widths(self, v: Tensor) -> Sequence[tuple[int, int]]:
        return self.compressor.widths(v.shape[-1], 8 * v.element_size())


def _zeros(init: Init, places: Mapping[int, Tensor], w0: Tensor) -> Tensor:
    """Returns zeros for what travels of a vector with this initial value."""
    v = torch.zeros_like(State.initial({"": init}, w0, w0)[""])
    return v[..., places.get(v.shape[-1], slice(None))]
