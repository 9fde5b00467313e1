"""A run has its own precision of float32 products, whatever a program has set before, and by which interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import backends

from fl_lightning import FederatedTrainer

NEWER: Any = backends
"""The attributes ``fp32_precision``, from torch 2.9 on."""


def interface(set_it: Callable[[], None]) -> Any:
    has_it = hasattr(backends.cuda.matmul, "fp32_precision")
    return pytest.param(set_it, marks=pytest.mark.skipif(not has_it, reason="torch < 2.9"))


def _set(owner: Any, value: str) -> None:
    owner.fp32_precision = value


READ: dict[str, Callable[[], Any]] = {
    "precision": torch.get_float32_matmul_precision,
    "cudnn": lambda: backends.cudnn.allow_tf32,
    "matmul": lambda: NEWER.cuda.matmul.fp32_precision,
    "convolution": lambda: NEWER.cudnn.conv.fp32_precision,
    "recurrent": lambda: NEWER.cudnn.rnn.fp32_precision,
    "cpu": lambda: NEWER.mkldnn.matmul.fp32_precision,
}


def readings() -> dict[str, Any]:
    """What can be read; reading the older interface is an error after the newer one was used."""
    values: dict[str, Any] = {}
    for name, read in READ.items():
        with suppress(RuntimeError, AttributeError):
            values[name] = read()
    return values


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        _set(backends, "none")
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    "before",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        interface(lambda: _set(NEWER.cuda.matmul, "tf32")),
        interface(lambda: _set(NEWER, "tf32")),
        interface(lambda: _set(NEWER.cudnn.conv, "ieee")),
    ],
    ids=["nothing", "high", "medium", "new: products", "new: all", "new: convolutions"],
)
def test_a_run_has_its_own(before: Callable[[], None], tf32: bool) -> None:
    trainer = FederatedTrainer(tf32=tf32, accelerator="cpu")
    before()
    outside = readings()
    with trainer.environment(), trainer.environment():
        inside = readings()
        assert inside["precision"] == ("high" if tf32 else "highest")  # what Fabric reads on a GPU
        if "convolution" in inside:
            assert inside["convolution"] == inside["matmul"] == ("tf32" if tf32 else "ieee")
    assert {name: value for name, value in readings().items() if name in outside} == outside
