"""Randomness by name: every draw comes from a generator keyed by (seed, purpose, keys), never from global state."""

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.core.errors import ensure

MANY = 32
"""Minimum number of generators that are seeded at once."""


def _sequence(seed: int, purpose: str, keys: tuple[int, ...]) -> np.random.SeedSequence:
    ensure(seed >= 0, f"seed = {seed} is negative; use 0 or a positive integer")
    words = [seed, crc32(purpose.encode()), *keys]
    # numpy reads an array of words in half the time of a list; it splits larger numbers into words
    return np.random.SeedSequence(np.array(words, np.uint32) if max(words) < 2**32 else words)


def generator(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """Returns a new torch generator on the CPU; the same arguments give the same stream.

    Args:
        seed: Seed of the run, 0 or more.
        purpose: What the numbers are for, such as ``"batches"``; purposes never share a stream.
        *keys: Further keys, such as round and client, each 0 or more. Always give one purpose the same number of keys:
            numpy pads with zeros, so ``(1,)`` and ``(1, 0)`` are one stream.

    Raises:
        UserError: If the seed is negative.
    """
    state = int(_sequence(seed, purpose, keys).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state)


def generators(seed: int, purpose: str, keys: Sequence[tuple[int, ...]]) -> Iterator[torch.Generator]:
    """Yields what :func:`generator` returns for some keys of one length, one after another: take no two at once."""
    if len(keys) < MANY or not 0 <= seed < 2**32 or max(map(max, keys)) >= 2**32:
        yield from (generator(seed, purpose, *key) for key in keys)
        return
    words, reused = np.array([(seed, crc32(purpose.encode()), *key) for key in keys], np.uint32), torch.Generator()
    for state in _states(words.T).tolist():
        yield reused.manual_seed(state)


def _states(words: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Returns the first 64 bits of the state of numpy's ``SeedSequence`` for each column of ``words``, ``(words, n)``.

    It is the algorithm of numpy, which never changes it (NEP 19), for all columns at once: that of a single one takes
    5 microseconds, a third of what a client's minibatches take.
    """
    constant = 0x43B0D7E5

    def hashed(values: NDArray[np.uint32], multiplier: int = 0x931E8875) -> NDArray[np.uint32]:
        nonlocal constant
        values = values ^ np.uint32(constant)
        constant = constant * multiplier & 0xFFFFFFFF
        values = values * np.uint32(constant)
        values ^= values >> np.uint32(16)
        return values

    def mixed(x: NDArray[np.uint32], y: NDArray[np.uint32]) -> NDArray[np.uint32]:
        values: NDArray[np.uint32] = np.uint32(0xCA01F9DD) * x - np.uint32(0x4973F715) * y
        values ^= values >> np.uint32(16)
        return values

    zeros = np.zeros((4, words.shape[1]), np.uint32)
    pool = [hashed(word) for word in np.concatenate([words, zeros])[:4]]
    for source, target in permutations(range(4), 2):
        pool[target] = mixed(pool[target], hashed(pool[source]))
    for word in words[4:]:
        pool = [mixed(entry, hashed(word)) for entry in pool]
    constant = 0x8B51F9DD
    low, high = (hashed(entry, 0x58F38DED).astype(np.uint64) for entry in pool[:2])
    states: NDArray[np.uint64] = low | high << np.uint64(32)
    return states


def numpy_generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Returns a new generator of numpy, keyed as that of `generator`."""
    return np.random.default_rng(_sequence(seed, purpose, keys))


def global_generator(device: torch.device) -> Any:
    """Returns torch's global generator of a device, from which a net draws by itself.

    torch does not give out the one of Apple's MPS; what stands for it has only ``get_state``, ``set_state`` and
    ``manual_seed``.
    """
    if device.type == "mps":
        return SimpleNamespace(
            get_state=torch.mps.get_rng_state,
            set_state=torch.mps.set_rng_state,
            manual_seed=torch.mps.manual_seed,
        )
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Puts torch's global generator of a device into the state of :func:`generator`, and restores it on exit.

    It serves random numbers that a network draws itself, such as those of dropout. ``torch.manual_seed`` would do, but
    takes 0.7 ms.
    """
    rng = global_generator(device)
    before = rng.get_state()
    rng.manual_seed(generator(seed, purpose, *keys).initial_seed())
    try:
        yield
    finally:
        rng.set_state(before)


@cache
def processor() -> str:
    """Returns the processor's name, generation and instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    generation = re.findall(r"^(?:cpu family|model)\s*:\s*(\d+)$", text, re.MULTILINE)[:2]
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name} ({'.'.join([*generation, torch.backends.cpu.get_cpu_capability()])})"
