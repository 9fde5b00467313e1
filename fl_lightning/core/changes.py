"""Which attributes of objects change, and would be lost when a run is resumed."""

from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar
from warnings import warn

from torch import Tensor

T = TypeVar("T")
MOST = 1000
"""Entries of a list or mapping that are compared, the first ones."""
CHANGEABLE = (list, set, deque, dict, Tensor)
"""What can change in place."""


def with_own_attributes(owner: T) -> T:
    """Returns a shallow copy of an object, with copies of the attributes that can change in place."""
    it = copy(owner)
    for name in _inside(owner):
        object.__setattr__(it, name, deepcopy(vars(owner)[name]))
    return it


class Watched:
    """Attributes of objects, as they are when this is made.

    Args:
        owners: The objects.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._before = [(owner, {**vars(owner)}, _inside(owner)) for owner in owners]

    def changed(self) -> Iterator[tuple[object, str]]:
        """Yields each object with an attribute that is not what it was; what is new may be a cache."""
        for owner, before, inside in self._before:
            set_again = {name for name, value in vars(owner).items() if before.get(name, value) is not value}
            now = _inside(owner)
            within = {name for name, held in inside.items() if name in now and not _same(held, now[name])}
            yield from ((owner, name) for name in sorted(set_again | within))

    def warn_of_clients(self) -> None:
        """Warns of public attributes that local training has changed."""
        for owner, name in self.changed():
            if name[0] != "_":
                warn(
                    f"{type(owner).__name__} changes self.{name} while clients train: a resumed run, and each other "
                    "process, lacks it; declare it in client_state",
                    stacklevel=3,
                )

    def warn_of_server(self, numbers: bool) -> None:
        """Warns of what the server's step has changed.

        Args:
            numbers: Whether public numbers and text count, because no checkpoint has those of these objects.
        """
        old = {id(owner): before for owner, before, _ in self._before}
        for owner, name in self.changed():
            values = (old[id(owner)][name], vars(owner)[name])
            known = not numbers and name[0] != "_" and all(isinstance(v, bool | int | float | str) for v in values)
            if not known and not isinstance(getattr(type(owner), name, None), cached_property):
                warn(
                    f"{type(owner).__name__} sets self.{name} in the server's step: a resumed run lacks it; declare it "
                    "in server_state, unless each round sets it again",
                    stacklevel=3,
                )


def _inside(owner: object) -> dict[str, list[Any]]:
    """Returns what differs after attributes have been changed in place: tensors, and public lists and mappings."""
    items = vars(owner).items()
    # a look at the class is faster than isinstance, which asks the class of tensors
    return {n: _held(v) for n, v in items if issubclass(type(v), Tensor if n[0] == "_" else CHANGEABLE)}


def _held(value: Any, inside: bool = True) -> list[Any]:
    """Returns a value, and what differs after it has been changed in place."""
    if isinstance(value, Tensor):
        return [value, None if value.is_inference() else value._version]
    if isinstance(value, list | set | deque):
        return [value, len(value), *(_held(entry, False) for entry in islice(value if inside else (), MOST))]
    if isinstance(value, dict) and inside:
        return [value, {key: _held(entry, False) for key, entry in islice(value.items(), MOST)}]
    return [value]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Returns whether `_held` has found the same objects, and in a mapping those of before."""
    (a, *inside), (b, *within) = one, other
    return a is b and len(inside) == len(within) and all(map(_alike, inside, within))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(key in other and _same(held, other[key]) for key, held in one.items())
    return _same(one, other) if isinstance(one, list) else bool(one == other)
