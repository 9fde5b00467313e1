"""Which attributes of objects change, and would be lost when a run is resumed."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any
from warnings import warn

from torch import Tensor

MOST = 1000
"""Entries of a list or mapping that are compared, the first ones."""


class Watched:
    """Attributes of objects, as they are when this is made.

    Args:
        owners: The objects.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._before = [(owner, {name: _held(value) for name, value in vars(owner).items()}) for owner in owners]

    def changed(self) -> Iterator[tuple[object, str, bool]]:
        """Yields each object with an attribute that is not what it was, and whether the attribute is new."""
        for owner, before in self._before:
            for name, value in vars(owner).items():
                if name not in before or not _same(before[name], _held(value)):
                    yield owner, name, name not in before

    def warn_of_server(self, numbers: bool) -> None:
        """Warns of what the server's step has changed.

        Args:
            numbers: Whether plain numbers and text count, because no checkpoint has those of these objects.
        """
        for owner, name, new in self.changed():
            plain = isinstance(vars(owner)[name], bool | int | float | str)
            known = plain and not (numbers or new or name[0] == "_")
            if not known and not isinstance(getattr(type(owner), name, None), cached_property):
                warn(
                    f"{type(owner).__name__} sets self.{name} in the server's step: a resumed run lacks it; declare it "
                    "in server_state",
                    stacklevel=3,
                )


def _held(value: Any, depth: int = 2) -> list[Any]:
    """Returns a value, and what differs after it has been changed in place."""
    if isinstance(value, Tensor):
        return [value, None if value.is_inference() else value._version]
    if isinstance(value, dict | list) and depth:
        entries = islice(value.values() if isinstance(value, dict) else value, MOST)
        return [value, len(value), *(_held(entry, depth - 1) for entry in entries)]
    return [value]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Returns whether `_held` has found the same objects."""
    (a, *inside), (b, *within) = one, other
    alike = (_same(x, y) if isinstance(x, list) else x == y for x, y in zip(inside, within, strict=True))
    return a is b and len(inside) == len(within) and all(alike)
