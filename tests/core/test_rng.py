"""Torch's global generators, seeded for a while."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest
import torch

from fl_lightning.core import generator, generators, numpy_generator, seeded


def draws(draw: Callable[[], torch.Tensor], device: str) -> list[torch.Tensor]:
    """Returns numbers of a generator before, within and after `seeded`."""
    first = draw()
    with seeded(torch.device(device), 3, "net", 1):
        within = draw()
    return [first, within, draw()]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**70])
def test_streams_are_those_of_numpys_seed_sequence(seed: int) -> None:
    """Keys have any number of words."""
    for keys in ((), (0,), (7, 0, 55), (2**32 - 1,), (2**32, 3), (1, 2**80)):
        sequence = np.random.SeedSequence([seed, crc32(b"batches"), *keys])
        expected = int(sequence.generate_state(1, np.uint64)[0])
        assert generator(seed, "batches", *keys).initial_seed() == expected
        assert numpy_generator(seed, "batches", *keys).random() == np.random.default_rng(sequence).random()


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_many_generators_are_those_of_one_by_one(seed: int, length: int) -> None:
    drawn = np.random.default_rng(length)
    small = [tuple(map(int, key)) for key in drawn.integers(0, 2**32, (40, length))]
    for keys in (small, [*small, (2**40,) * length], small[:3]):
        for key, many in zip(keys, generators(seed, "batches", keys), strict=True):
            one = generator(seed, "batches", *key)
            assert many.initial_seed() == one.initial_seed()
            assert torch.equal(torch.randperm(30, generator=many), torch.randperm(30, generator=one))


def test_seeded_is_keyed_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    first, within, after = draws(lambda: torch.rand(4), "cpu")
    torch.manual_seed(0)
    assert torch.equal(torch.stack([first, after]), torch.rand(2, 4))
    assert torch.equal(within, torch.rand(4, generator=generator(3, "net", 1)))


def test_apples_generator_is_seeded_and_not_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another generator plays MPS's, which is there on a Mac only."""
    apples = torch.Generator().manual_seed(0)
    for name, method in (("get_rng_state", "get_state"), ("set_rng_state", "set_state"), ("manual_seed",) * 2):
        monkeypatch.setattr(torch.mps, name, getattr(apples, method))
    host = torch.get_rng_state()
    first, within, after = draws(lambda: torch.rand(4, generator=apples), "mps")
    expected = torch.rand(8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([first, after]), expected)
    assert torch.equal(within, torch.rand(4, generator=generator(3, "net", 1)))
    assert torch.equal(torch.get_rng_state(), host)
