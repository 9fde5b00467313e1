"""The output of a run: without Lightning's messages, and silent once the output is closed."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import lightning as L

from fl_lightning.results.terminal import wrapped


class Fabric(L.Fabric):
    """Lightning's Fabric; it prints once in a run, and not once on each node; a terminal breaks no word."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*map(wrapped, map(str, args)), **kwargs)


LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Hides Lightning's warnings, and messages below ERROR; this package handles what they are about.

    Args:
        *names: Names of the loggers whose messages are hidden; by default those of Lightning.
    """
    loggers = [logging.getLogger(name) for name in names or LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Unbroken:
    """A stream that drops everything once it cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, if that still can be done."""
        try:
            self._stream.write(text)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if that still can be done."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Sends what is buffered, and all that follows, nowhere: at its end Python flushes the stream, too."""
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
            self._stream.flush()


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Within it, a closed pipe, a closed terminal or a full disk behind stdout ends the output, and nothing else."""
    if sys.stdout is None or isinstance(sys.stdout, _Unbroken):
        yield
        return
    stream: Any = _Unbroken(sys.stdout)
    with redirect_stdout(stream):
        try:
            yield
        finally:
            stream.flush()
