"""Averages of the uploads, for any cohort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning import DigitsMLP
from fl_lightning.core import ClientContext, FlatSpec, Uploads

FLAT = FlatSpec(DigitsMLP(1))
cohorts = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


def averages(vectors: Tensor, samples: list[int], weighting: str) -> tuple[Tensor, Tensor]:
    contexts = [ClientContext(0, 1, len(samples), FLAT, n_k=n) for n in samples]
    uploads = Uploads(["w"], weighting, contexts, vectors)  # type: ignore[arg-type]
    for vector, n in zip(vectors, samples, strict=True):
        uploads.add({"w": vector}, n)
    return uploads.mean("w"), uploads.weighted("w")


@settings(max_examples=60, deadline=None)
@given(cohorts, st.sampled_from(["samples", "uniform"]), st.integers(0, 99), st.randoms(use_true_random=False))
def test_averages(samples: list[int], weighting: str, seed: int, order: object) -> None:
    """They are those by hand in any order, linear, the vector itself for equal vectors, and within their range."""
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, len(samples), 5, generator=draw, dtype=torch.float64)
    weights = torch.tensor(samples if weighting == "samples" else [1] * len(samples), dtype=torch.float64)
    mean, weighted = averages(a, samples, weighting)
    torch.testing.assert_close(mean, a.mean(0))
    torch.testing.assert_close(weighted, weights @ a / weights.sum())

    places = list(range(len(samples)))
    order.shuffle(places)  # type: ignore[attr-defined]
    for one, other in zip(averages(a[places], [samples[i] for i in places], weighting), (mean, weighted), strict=True):
        torch.testing.assert_close(one, other)
    for one, x, y in zip(
        averages(2 * a - 3 * b, samples, weighting), (mean, weighted), averages(b, samples, weighting), strict=True
    ):
        torch.testing.assert_close(one, 2 * x - 3 * y)
    for one in averages(a[:1].expand_as(a), samples, weighting):
        torch.testing.assert_close(one, a[0])
    assert bool(((weighted >= a.amin(0) - 1e-12) & (weighted <= a.amax(0) + 1e-12)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [1, 2, 7, 100])
@pytest.mark.parametrize("padding", [0, 3])
def test_those_of_rows_have_the_same_bits(clients: int, padding: int, dtype: torch.dtype) -> None:
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        vectors = torch.randn(clients, 33, generator=draw, dtype=dtype)
        samples = torch.randint(1, 100_000, (clients,), generator=draw).tolist()
        counts, k_lr = torch.tensor(samples, dtype=dtype)[:, None], torch.zeros(2, 1, dtype=dtype)
        total, n = torch.tensor(float(sum(samples))), torch.tensor(clients, dtype=torch.float64) if padding else clients
        padded, counts = (torch.cat([v, torch.zeros(padding, v.shape[1], dtype=dtype)]) for v in (vectors, counts))
        for weighting in ("samples", "uniform"):
            rows = Uploads.of_rows(weighting, {"w": padded}, counts, n, total, k_lr)  # type: ignore[arg-type]
            means = averages(vectors, samples, weighting)
            assert torch.equal(rows.mean("w"), means[0]) and torch.equal(rows.weighted("w"), means[1])
