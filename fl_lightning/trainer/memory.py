"""The C library's allocator during a run on a CPU."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_MAX = 1, -1, -4
"""Parameters of glibc's mallopt(3)."""
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_MXFAST: 0}
"""Values during a run: nothing gets a mapping of its own, which would go back to the system when it is freed."""
DEFAULT = {M_MMAP_MAX: 2**16, M_TRIM_THRESHOLD: 128 * 2**10, M_MXFAST: 16 * ctypes.sizeof(ctypes.c_size_t)}
"""glibc's own values."""
_depth = 0


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Keeps freed memory for the next tensor, instead of returning it to the system, which would clear it page by page.

    Training on a CPU frees and allocates the same megabytes in every step. Without M_MXFAST, small free blocks next to
    a large one keep it from being reused. Only glibc has these parameters; elsewhere this does nothing.

    Args:
        device: Where the run trains; only the CPU needs it.
    """
    global _depth
    mallopt = None
    if device.type == "cpu" and sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    _depth += 1
    _set(mallopt, KEPT)
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _set(mallopt, DEFAULT)


def _set(mallopt: Any, values: dict[int, int]) -> None:
    for parameter, value in values.items():
        mallopt(parameter, value)
