"""Randomness by name: every draw comes from a generator keyed by (seed, purpose, keys), never from global state."""

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch

from fl_lightning.core.errors import UserError


def _sequence(seed: int, purpose: str, keys: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise UserError(f"seed = {seed} is negative; use 0 or a positive integer")
    return np.random.SeedSequence([seed, crc32(purpose.encode()), *keys])


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator; the same arguments give the same stream.

    Args:
        seed: Seed of the run, 0 or more.
        purpose: What the numbers are for, such as ``"batches"``; purposes never share a stream.
        *keys: Further keys, such as round and client, each 0 or more. Give one purpose always the same number of keys:
            numpy pads with zeros, so ``(1,)`` and ``(1, 0)`` are one stream.
        device: Where the generator lives.

    Raises:
        UserError: If the seed is negative.
    """
    state = int(_sequence(seed, purpose, keys).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(state)


def numpy_generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """As :func:`generator`, for numpy."""
    return np.random.default_rng(_sequence(seed, purpose, keys))


def global_generator(device: torch.device) -> torch.Generator:
    """Torch's global generator of a device, from which a net draws by itself."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Torch's global generator of a device as :func:`generator` would make it, and as it was afterwards.

    For what a network draws itself, such as dropout. ``torch.manual_seed`` would do, but takes 0.7 ms.
    """
    state = int(_sequence(seed, purpose, keys).generate_state(1, np.uint64)[0])
    mine = global_generator(device)
    before = mine.get_state()
    mine.manual_seed(state)
    try:
        yield
    finally:
        mine.set_state(before)
