"""Exceptions with a message for the user."""

from importlib import import_module
from typing import Any


class UserError(ValueError):
    """A mistake in config, data or checkpoint: one line with its remedy.

    Attributes:
        exit_code: Exit code of a command that it ends.
    """

    exit_code = 1


class DivergenceError(UserError):
    """Training has diverged."""

    exit_code = 3


class UnwrittenError(UserError):
    """A file cannot be written: the disk is full or fails, or the folder refuses."""


class NoStateError(UserError, AttributeError):
    """A hook reads a state that is not there."""


def ensure(ok: bool, problem: str) -> None:
    """Raises ``UserError(problem)`` unless ``ok``."""
    if not ok:
        raise UserError(problem)


def folded(text: object, most: int | None = None) -> str:
    """Returns a text, such as that of another package's error, on one line; what exceeds ``most`` letters is cut."""
    line = " ".join(str(text).split())
    return line if most is None or len(line) <= most else f"{line[:most]}…"


def imported(module: str, needs: str) -> Any:
    """Returns a module of a package that is not always installed.

    Args:
        module: Its name.
        needs: Who needs what: "data = HuggingFace: needs datasets; pip install ...".

    Raises:
        UserError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise UserError(needs) from None


def require(ok: bool, key: str, value: object, remedy: str) -> None:
    """Checks a setting.

    Args:
        ok: Whether it is right.
        key: Its full name in a config.
        value: Its value.
        remedy: What it may be.

    Raises:
        UserError: If it is not.
    """
    ensure(ok, f"{key} = {value}: {remedy}")
