"""The secret key of privacy's noise, and the grid that uploads and noise lie on."""

import hashlib
import math
import secrets
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BYTES = 32
"""Length of a key."""
BLOCK = 1 << 18
"""Numbers that are drawn at once; part of the stream's definition."""
FINENESS = 32
"""The grid's step is between 2^-33 and 2^-32 standard deviations, a power of two."""


@dataclass(frozen=True)
class NoiseKey:
    """The key of a run's noise. Who does not know it cannot tell the noise from independent normal numbers.

    SHAKE-256 (FIPS 202) of the key and the names of a draw gives the bits of this draw, so that no two draws of other
    names, or of another key, share any.

    Args:
        secret: The key, ``BYTES`` bytes; `repr` does not show it.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "NoiseKey":
        """Returns a new key from the entropy of the operating system."""
        return cls(secrets.token_bytes(BYTES))

    @classmethod
    def of_seed(cls, seed: int) -> "NoiseKey":
        """Returns the key of a public seed, for tests and repeats: it protects nobody."""
        return cls(hashlib.shake_256(f"public seed {seed}".encode()).digest(BYTES))

    def bits(self, n: int, *names: int | str) -> bytes:
        """Returns ``n`` secret bytes, a function of key and names."""
        return hashlib.shake_256(self.secret + repr(names).encode()).digest(n)

    def integer(self, *names: int | str) -> int:
        """Returns a secret integer of 128 bits, a function of key and names."""
        return int.from_bytes(self.bits(16, *names), "little")

    def normal(self, n: int, *names: int | str) -> Tensor:
        """Returns independent standard normal numbers, ``(n,)``, float64 on the CPU: a function of key and names.

        Each is the cosine half of a Box-Muller pair and uses 128 bits of its own. The sine half, from which an attacker
        could compute these bits, is never released.
        """
        blocks = [box_muller(self.bits(16 * min(BLOCK, n - i), *names, i)) for i in range(0, n, BLOCK)]
        return torch.from_numpy(np.concatenate([np.zeros(0), *blocks]))


def box_muller(bits: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns a standard normal number for each 16 bytes, float64."""
    words = np.frombuffer(bits, dtype="<u8").astype(np.float64).reshape(2, -1)
    radius, angle = (words[0] + 0.5) * 2.0**-64, words[1] * (2 * math.pi * 2.0**-64)
    # astype rounds the largest words to 2^64: the logarithm is then 0 as it should be, never above
    normal: np.ndarray[tuple[int], np.dtype[np.float64]] = np.sqrt(-2 * np.log(radius)) * np.cos(angle)
    return normal


def grid(std: float) -> float:
    """Returns the step of the grid for noise of this standard deviation: a power of two.

    A clipped upload, cut off to multiples of the step towards 0, is no longer than before. Sums of multiples, and of
    the noise's multiples, are exact in float64 up to 2^20 standard deviations. So the values that a release may take
    are the same for all data, and the low bits of a sum say nothing (Mironov, CCS 2012; "Secure Noise Generation" of
    Google's differential privacy library, to which dp-accounting belongs).
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - FINENESS)


def cut(values: Tensor, step: float) -> Tensor:
    """Returns values cut off to multiples of a grid's step, towards 0."""
    return (values / step).trunc() * step


def rounded(values: Tensor, step: float) -> Tensor:
    """Returns values rounded to multiples of a grid's step."""
    return (values / step).round() * step
