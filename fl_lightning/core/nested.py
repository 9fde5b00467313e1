"""Nested dicts whose leaves are tensors, as samples of several inputs; values by key, and equal keys."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

Inputs: TypeAlias = Any
"""A tensor, or a dict of inputs: what a net's ``forward`` gets as its one argument."""


def map_tensors(function: Callable[[Any], Any], x: Inputs) -> Inputs:
    """Applies a function to a tensor, or to every tensor of a nested dict."""
    return {name: map_tensors(function, v) for name, v in x.items()} if isinstance(x, Mapping) else function(x)


def named_tensors(x: Inputs, name: str) -> dict[str, Any]:
    """Returns the tensors of a nested dict by dotted path, such as ``x.image``; a single tensor is ``x``.

    Args:
        x: A tensor or nested dict.
        name: First part of the paths.
    """
    if not isinstance(x, Mapping):
        return {name: x}
    return {path: v for key, entry in x.items() for path, v in named_tensors(entry, f"{name}.{key}").items()}


def nested(tensors: Mapping[str, Any], name: str) -> Inputs:
    """Returns the nested dict that `named_tensors` flattened; paths that do not start with ``name`` are ignored."""
    if name in tensors:
        return tensors[name]
    inner = [path.removeprefix(f"{name}.") for path in tensors if path.startswith(f"{name}.")]
    return {key: nested(tensors, f"{name}.{key}") for key in dict.fromkeys(path.partition(".")[0] for path in inner)}


K = TypeVar("K")
V = TypeVar("V")


def prefixed(prefix: str, values: Mapping[str, V]) -> dict[str, V]:
    """Returns values by names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def below(prefix: str, named: Mapping[str, V]) -> dict[str, V]:
    """Returns the values whose names have a prefix, without it."""
    return {name.removeprefix(f"{prefix}."): v for name, v in named.items() if name.startswith(f"{prefix}.")}


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns the values of each key of pairs (key, value), both in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def earlier(names: Sequence[str]) -> list[int]:
    """Returns how often each name stands before its place, to number those that are equal."""
    return [names[:place].count(name) for place, name in enumerate(names)]
