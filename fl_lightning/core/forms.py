"""Annotations of options, and forms of files: what values fit them, and their words in messages."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np


@dataclass(frozen=True, repr=False)
class Interval:
    """The numbers that an option may be, as an annotation: ``Annotated[float, Interval("[0, 1)")]``.

    Args:
        text: Bounds in mathematical notation: a square bracket includes its bound, a round one does not.
    """

    text: str

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        low, high = self.text[1:-1].split(",")
        return float(low), float(high)

    def __contains__(self, value: Any) -> bool:
        low, high = self.bounds
        above = value >= low if self.text[0] == "[" else value > low
        return bool(above and (value <= high if self.text[-1] == "]" else value < high))

    def __repr__(self) -> str:
        low, high = (f"{bound:,.12g}" for bound in self.bounds)
        if self.text[0] == "(":
            end = "at most" if self.text[-1] == "]" else "below"
            return f"above {low}" + ("" if high == "inf" else f" and {end} {high}")
        if high == "inf":
            return "of 0 or more" if low == "0" else f"of at least {low}"
        return f"from {low} to {'' if self.text[-1] == ']' else 'below '}{high}"


Positive = Annotated[float, Interval("(0, inf)")]
NonNegative = Annotated[float, Interval("[0, inf)")]
UnitInterval = Annotated[float, Interval("[0, 1]")]
Fraction = Annotated[float, Interval("[0, 1)")]
Probability = Annotated[float, Interval("(0, 1)")]
PositiveInt = Annotated[int, Interval("[1, inf)")]
NonNegativeInt = Annotated[int, Interval("[0, inf)")]
Size = Annotated[int, Interval("[1, 1e6]")]
"""A number of units of a net, or of pixels: what is larger is a slip, and would fill the memory."""
Divisor = Annotated[float, Interval("[1e-12, inf)")]
WeightDecay = Annotated[float, Interval("[0, 1e30]")]
"""What is larger overflows in float32, before training can diverge."""
Threads = Annotated[int, Interval("[1, 1024]")]
LATER = "checked later"
"""As an annotation: the class checks this itself, with a better message."""
UNIONS = (Union, UnionType)
LISTS = (list, tuple, Sequence)
PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    float: ("a finite number", lambda v: not isinstance(v, bool) and isinstance(v, Real) and _is_finite(v)),
    int: ("a whole number", lambda v: not isinstance(v, bool) and isinstance(v, Integral)),
    bool: ("true or false", lambda v: isinstance(v, bool | np.bool_)),
    str: ("text", lambda v: isinstance(v, str | os.PathLike)),
    dict: ("a mapping", lambda v: isinstance(v, Mapping)),
    Any: ("anything", lambda v: True),
    NoneType: ("null", lambda v: v is None),
}
"""Types in words, and their checks."""


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is described by an annotation or a form; True for annotations that it does not know.

    A form describes what a file contains: a dict has the form of the value of each key, where a key that ends in ``?``
    may be missing, and other keys are free; a list with one form describes lists of that form; a function decides.
    """
    match hint:
        case dict():
            keys = {name.removesuffix("?"): name for name in hint}
            return isinstance(value, Mapping) and all(
                fits(value[key], hint[name]) if key in value else key != name for key, name in keys.items()
            )
        case list():
            return isinstance(value, list) and all(fits(entry, hint[0]) for entry in value)
        case FunctionType():
            return bool(hint(value))
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is dict and isinstance(value, Mapping) and args:
        return all(fits(key, args[0]) and fits(entry, args[1]) for key, entry in value.items())
    if kind in PLAIN:
        return PLAIN[kind][1](value)
    if kind is Annotated:
        limits = [limit for limit in args[1:] if isinstance(limit, Interval)]
        return LATER in args or (fits(value, args[0]) and all(value in limit for limit in limits))
    if kind in UNIONS:
        return any(fits(value, arg) for arg in args)
    if kind is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in args)
    if kind is type and args:
        return isinstance(value, type) and isinstance(args[0], type) and issubclass(value, args[0])
    if kind in LISTS:
        return isinstance(value, np.ndarray) or (
            isinstance(value, Sequence) and not isinstance(value, str) and _items_fit(value, kind, args)
        )
    return args != () or not isinstance(kind, type) or isinstance(value, kind)


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond all floats
        return False


def _items_fit(items: Sequence[Any], kind: Any, args: tuple[Any, ...]) -> bool:
    if kind is tuple and Ellipsis not in args:
        return len(items) == len(args) and all(map(fits, items, args))
    return all(fits(item, args[0]) for item in items) if args else True


def in_words(hint: Any) -> str:
    """Returns what an annotation describes, in words."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind in PLAIN:
        return PLAIN[kind][0]
    if kind is Annotated:
        return " ".join([in_words(args[0]), *(str(limit) for limit in args[1:] if isinstance(limit, Interval))])
    if kind in UNIONS:
        types = {arg: get_args(get_args(arg)[0]) for arg in args if get_origin(arg) in LISTS and get_args(arg)}
        several = [arg for arg in types if types[arg] and {*types[arg]} <= {*args}]  # of what is taken alone, too
        words = " or ".join(in_words(arg) for arg in args if arg not in several)
        return words + ", or a list of them" * bool(several)
    if kind is Literal:
        return f"one of {', '.join(map(str, args))}"
    if kind is type and args:
        return f"a subclass of {in_words(args[0])}"
    if kind in LISTS:
        return "a list" + (f", each {in_words(args[0]).rstrip(',')}," if args else "")
    package = "torch.nn." if getattr(kind, "__module__", "").startswith("torch.nn.") else ""
    return package + str(getattr(kind, "__name__", kind))


def is_limited(hint: Any) -> bool:
    """Returns whether an annotation limits the values, not only their type."""
    kind = get_origin(hint)
    return kind in (Annotated, Literal) or (kind in UNIONS and any(map(is_limited, get_args(hint))))
