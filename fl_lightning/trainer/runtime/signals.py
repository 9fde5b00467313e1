"""Signals that end a run: the first one breaks it off, and no later one disturbs the saving."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
"""Ctrl-C, kill and a cluster's time limit, a closed terminal, SLURM's warning."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2) that says which signal this process gets when its parent ends; 0: none."""
STARTER = "FL_LIGHTNING_STARTER"
"""Environment variable with the process that starts others, which inherit it."""
_active: "Interruption | None" = None


class Interruption:
    """Within its context the first of `SIGNALS` raises KeyboardInterrupt, and later ones are ignored.

    Handlers other than Python's own stay, and so do ignored signals (``nohup``). It acts in the main thread only.

    Args:
        ends_process: Signals stay ignored after an interruption, until the process ends.

    Attributes:
        received: Number of the first signal.
        holding: Whether a signal is noted only; see `undisturbed`.
    """

    def __init__(self, ends_process: bool = False) -> None:
        self.ends_process = ends_process
        self.received: int | None = None
        self.holding = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        global _active
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._receive)
        if self._before:
            _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if self.received is not None and self.ends_process:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            _active = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if not self.holding:
                raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within it no signal breaks anything off: a run that ends by an error is saved before the process ends."""
    if _active is not None:
        _active.holding = True
    try:
        yield
    finally:
        if _active is not None:
            _active.holding = False


@contextmanager
def default_actions() -> Iterator[None]:
    """Within it, a signal that an `Interruption` would receive ends the process at once."""
    is_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as restored:
        for number in _active._before if _active is not None and is_main else ():
            restored.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        yield


@contextmanager
def with_starter() -> Iterator[None]:
    """Within it, a process that was started in this context ends when the one that has started it ends.

    Later a lost connection ends it. Outside Linux it ends if the other one has ended before the context begins.
    """
    starter = os.environ.get(STARTER)
    os.environ[STARTER] = str(os.getpid())
    prctl = ctypes.CDLL(None).prctl if starter and sys.platform == "linux" else lambda *_: None
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if starter and os.getppid() != int(starter):
            raise KeyboardInterrupt
        yield
    finally:
        prctl(PR_SET_PDEATHSIG, 0)
        del os.environ[STARTER]


def check_interruption() -> None:
    """Raises the KeyboardInterrupt that was lost, if a signal came where Python drops exceptions, as in a finalizer."""
    if _active is not None and _active.received is not None:
        raise KeyboardInterrupt


def rank_and_first() -> tuple[int, bool]:
    """Returns this process's rank, and whether it is the first one of its node, which reports an error."""
    known = [os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ]
    local = [os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ]
    return int((known or ["0"])[0]), (local or known or ["0"])[0] == "0"
