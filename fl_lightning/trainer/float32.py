"""How an Nvidia GPU multiplies float32 numbers during a run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import backends


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Sets whether TF32 may be used in products and convolutions, and restores what was set before.

    torch has two interfaces, and reading the older one is an error if a program has used the newer one, the attributes
    ``fp32_precision``, which torch has from 2.9 on.

    Args:
        tf32: Whether the factors may be rounded to 10 bits of mantissa.
    """
    older: dict[str, Any] = {}
    with suppress(RuntimeError):
        older["matmul"] = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        older["cudnn"] = backends.cudnn.allow_tf32
    owners: list[Any] = [
        backends.cuda.matmul,
        backends.mkldnn.matmul if hasattr(backends.mkldnn, "matmul") else None,
        getattr(backends.cudnn, "conv", None),
        getattr(backends.cudnn, "rnn", None),
    ]
    newer = [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32
    for owner, _ in newer[2:]:
        owner.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if "matmul" in older:
            torch.set_float32_matmul_precision(older["matmul"])
        if "cudnn" in older:
            backends.cudnn.allow_tf32 = older["cudnn"]
        for owner, value in newer:
            owner.fp32_precision = value
