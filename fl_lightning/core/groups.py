"""Values by key, and keys that are there several times."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns the values of each key of pairs (key, value), both in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def earlier(names: Sequence[str]) -> list[int]:
    """Returns how often each name stands before its place, to number those that are equal."""
    return [names[:place].count(name) for place, name in enumerate(names)]
