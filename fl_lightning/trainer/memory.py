"""How the C library hands out memory."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# parameters of glibc's mallopt(3)
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3
LARGEST = 32 * 2**20
"""Largest value that glibc takes as M_MMAP_THRESHOLD, in bytes."""


@cache
def reuse_freed_memory() -> None:
    """Keep freed memory for the next tensor, which the system would otherwise have to clear page by page.

    It holds for the process, once, and only with glibc. Training on a CPU frees and asks for the same megabytes in
    every step. Without M_MXFAST, splinters beside a freed block keep it from being handed out again.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, 2**31 - 1), (M_MXFAST, 0)):
            mallopt(parameter, value)
