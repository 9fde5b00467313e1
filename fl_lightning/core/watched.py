"""Which attributes of objects have changed, also in place, and how they are put back."""

import pickle
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cached_property
from itertools import chain, islice
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn

COMPARED = 1000
"""Entries of a list or mapping that are compared, the first ones."""
CONTAINERS = (list, set, deque, dict)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
CHANGEABLE = (*CONTAINERS, tuple, *GENERATORS, Tensor)
"""What can change in place, a tuple by what it holds."""
NO_CACHES = (list, deque, tuple, *GENERATORS, Tensor)
"""What is no cache, even if it is private."""


LIBRARIES = {*sys.stdlib_module_names, "lightning", "numpy", "torch"}
"""Packages whose objects are not looked into."""


def own_objects(owners: Collection[object]) -> list[object]:
    """Returns objects and, besides nets, the objects of other packages than libraries that they hold, also in lists.

    The classes of the first that are not this package's follow: their attributes are those of each object, too.
    """
    objects = {id(owner): owner for owner in owners}
    seen, waiting = {*objects}, [*chain.from_iterable(vars(owner).values() for owner in objects.values())]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple | list | set | deque):
            waiting += value
        elif _is_own(value):
            objects[id(value)] = value
            waiting += vars(value).values()
    kinds = dict.fromkeys(kind for owner in owners for kind in type(owner).__mro__)
    return [*objects.values(), *(kind for kind in kinds if _package(kind) not in {*LIBRARIES, "fl_lightning"})]


def class_of(owner: object) -> type:
    """Returns the class of one of `own_objects`; of a class, itself."""
    return owner if isinstance(owner, type) else type(owner)


def _is_own(value: object) -> bool:
    is_net = isinstance(value, nn.Module | Tensor)
    return _package(type(value)) not in LIBRARIES and not is_net and hasattr(value, "__dict__")


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _own(owner: object) -> dict[str, Any]:
    """Returns the attributes of an object, or of a class, but for Python's own."""
    return {name: value for name, value in vars(owner).items() if name[:2] != "__"}


def _attributes(owner: object) -> dict[str, Any]:
    """Returns what `_own` returns; a module's buffers and parameters are attributes as well."""
    plain, groups = _own(owner), ("_buffers", "_parameters") if isinstance(owner, nn.Module) else ()
    return {**plain, **{name: v for group in groups for name, v in plain.get(group, {}).items()}}  # a script has none


def _set_back(owner: object, attributes: dict[str, Any]) -> None:
    """Makes attributes the only ones of an object, past a `__setattr__` of its class, or of a class."""
    current = _own(owner)
    is_class = isinstance(owner, type)
    for name in current.keys() - attributes.keys():
        delattr(owner, name) if is_class else vars(owner).pop(name)
    for name in (name for name, value in attributes.items() if current.get(name, owner) is not value):
        setattr(owner, name, attributes[name]) if is_class else vars(owner).update({name: attributes[name]})


@contextmanager
def contents_kept(owners: Collection[object]) -> Iterator[None]:
    """Puts back, on exit, attributes of `own_objects`, and what lists, mappings, tensors and generators in them hold.

    Within it the lists, mappings and generators are copies.
    """
    kept, copies = [(owner, _own(owner)) for owner in own_objects(owners)], dict[int, Any]()
    for owner, attributes in kept:
        _set_back(owner, {name: _apart(value, copies) for name, value in attributes.items()})
    tensors = [v for v in copies.values() if isinstance(v, Tensor) and not v.is_inference()]
    values = [(v, v._version, v.detach().clone()) for v in tensors]
    try:
        yield
    finally:
        for tensor, version, value in values:
            if tensor._version != version:
                tensor.detach().copy_(value)
        for owner, attributes in kept:
            _set_back(owner, attributes)


def _apart(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a copy of a list, set, mapping, tuple or generator with copies of those in it, each made once."""
    if id(value) in copies:
        return copies[id(value)]
    is_generator, is_container = isinstance(value, GENERATORS), isinstance(value, CONTAINERS)
    duplicate: Any = deepcopy(value) if is_generator else copy(value) if is_container else value
    copies[id(value)] = duplicate
    if isinstance(value, dict):
        duplicate.update({key: _apart(entry, copies) for key, entry in value.items()})
    elif isinstance(value, list | deque):
        for i, entry in enumerate(value):
            duplicate[i] = _apart(entry, copies)
    elif type(value) is tuple:
        duplicate = copies[id(value)] = tuple(_apart(entry, copies) for entry in value)
    return duplicate


class Watched:
    """Attributes of `own_objects`, as they are when this is made.

    Args:
        owners: The objects.
    """

    def __init__(self, owners: Collection[object]) -> None:
        self._given = {id(owner) for owner in owners}
        self._before = [(owner, _attributes(owner), _inside(owner)) for owner in own_objects(owners)]

    def changed(self) -> Iterator[tuple[object, str]]:
        """Yields each object with an attribute that is not what it was; what is new may be a cache."""
        for owner, before, inside in self._before:
            set_again = {name for name, value in _attributes(owner).items() if before.get(name, value) is not value}
            current = _inside(owner)
            altered = {name for name, held in inside.items() if name in current and not _same(held, current[name])}
            yield from ((owner, name) for name in sorted(set_again | altered))

    def added(self) -> Iterator[tuple[object, str]]:
        """Yields each object with an attribute that it did not have; a property that is cached does not count."""
        for owner, before, _ in self._before:
            for name in sorted(_attributes(owner).keys() - before.keys()):
                if not isinstance(getattr(class_of(owner), name, None), cached_property):
                    yield owner, name

    def warn_of_clients(self) -> None:
        """Warns of public attributes that local training has changed."""
        for owner, name in self.changed():
            if name[0] != "_":
                warn(
                    f"{class_of(owner).__name__} changes self.{name} while clients train: a resumed run, and each "
                    f"other process, lacks it; {_remedy(getattr(owner, name), 'client_state')}",
                    stacklevel=3,
                )

    def warn_of_server(self, numbers: bool) -> None:
        """Warns of what the server's step has changed.

        Args:
            numbers: Whether public numbers and text count, because no checkpoint has those of the given objects.
        """
        old = {id(owner): before for owner, before, _ in self._before}
        for owner, name in self.changed():
            values = (old[id(owner)][name], getattr(owner, name))
            plain = name[0] != "_" and all(isinstance(v, bool | int | float | str) for v in values)
            known = plain and not numbers and id(owner) in self._given
            if not known and not isinstance(getattr(class_of(owner), name, None), cached_property):
                warn(
                    f"{class_of(owner).__name__} sets self.{name} in the server's step: a resumed run lacks it; "
                    f"{_remedy(getattr(owner, name), 'server_state')}, unless each round sets it again",
                    stacklevel=3,
                )


def _remedy(value: object, state: str) -> str:
    drawn = "draw by ctx.randn_like(v) or ctx.draw(function), hooks of the server from a generator seeded with ctx.t"
    return drawn if isinstance(value, GENERATORS) else f"declare it in {state}"


def _inside(owner: object) -> dict[str, list[Any]]:
    """Returns what differs after attributes have been changed in place; private mappings and sets may be caches."""
    # a look at the class is faster than isinstance, which asks the class of tensors
    attributes = _attributes(owner).items()
    return {n: _held(v) for n, v in attributes if issubclass(type(v), NO_CACHES if n[0] == "_" else CHANGEABLE)}


def _held(value: Any, inside: bool = True) -> list[Any]:
    """Returns a value, and what differs after it has been changed in place."""
    match value:
        case torch.Generator():
            return [value, bytes(value.get_state().tolist())]
        case np.random.Generator() | np.random.RandomState() | random.Random():
            return [value, pickle.dumps(value)]
        case Tensor():
            return [value, None if value.is_inference() else value._version]
        case list() | set() | deque() | tuple():
            return [value, len(value), *(_held(entry, False) for entry in islice(value if inside else (), COMPARED))]
        case dict() if inside:
            return [value, {key: _held(entry, False) for key, entry in islice(value.items(), COMPARED)}]
    return [value]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Returns whether `_held` has found the same objects, and in a mapping those of before."""
    (a, *inside), (b, *within) = one, other
    return a is b and len(inside) == len(within) and all(map(_alike, inside, within))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(key in other and _same(held, other[key]) for key, held in one.items())
    return _same(one, other) if isinstance(one, list) else bool(one == other)
