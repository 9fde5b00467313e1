"""Reads YAML, but refuses a key that is given twice and aliases that unfold without end."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

DEPTH, SIZE = 50, 100_000
"""Largest depth, and number of values with aliases unfolded."""
FLOAT, DATE = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader of plain values, to which 1e-2 is a number, and a date text: as to the command line."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag not in (FLOAT, DATE)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


NUMBER = re.compile(
    r"([-+]?[0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+|(:[0-5]?[0-9])+\.[0-9_]*)"
    r"|\.[0-9_]+([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
Loader.add_implicit_resolver(FLOAT, NUMBER, [*"-+0123456789."])


class NoValueError(yaml.YAMLError):  # type: ignore[misc]
    """A text is YAML, but one of its values cannot be made."""


@dataclass
class _Open:
    """A mapping or sequence that is being read: its anchor, keys (of a mapping), children and values below it."""

    anchor: str | None = None
    keys: set[str] | None = None
    children: int = 0
    size: int = 1


def load_yaml(text: str, load: Callable[[str], Any] | None = None) -> Any:
    """Returns the content of a YAML text of plain values.

    Args:
        text: The text.
        load: Loads it once it is checked; None: `Loader`.

    Raises:
        yaml.YAMLError: With the line, if a mapping has a key twice, an alias stands within its own anchor, or the text
            is nested deeper than `DEPTH` or unfolds to more than `SIZE` values; or if it is no YAML.
    """
    try:
        _check(text)
        return yaml.load(text, Loader=Loader) if load is None else load(text)
    # those of PyYAML for !!bool x, 5,000 digits, half of a character; of jsonargparse for "?"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoValueError(f"no value of YAML ({type(error).__name__}: {error})") from None


def _check(text: str) -> None:
    """Checks a text before it is loaded, in one pass over it."""
    stack, sizes = [_Open()], dict[str | None, int]()
    for event in yaml.parse(text, Loader=Loader):
        line, key = f"line {event.start_mark.line + 1}", None
        match event:
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                stack.append(_Open(event.anchor, set() if isinstance(event, yaml.MappingStartEvent) else None))
                _ensure(len(stack) <= DEPTH, f"{line}: nested deeper than {DEPTH}")
                continue
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                closed = stack.pop()
                sizes[closed.anchor] = size = closed.size
            case yaml.AliasEvent(anchor=anchor):
                _ensure(all(anchor != above.anchor for above in stack), f"{line}: *{anchor} stands within itself")
                size = sizes.get(anchor, 1)
            case yaml.ScalarEvent():
                size, key = 1, event.value
            case _:
                continue
        within = stack[-1]
        if within.keys is not None and within.children % 2 == 0 and key not in (None, "<<"):
            _ensure(key not in within.keys, f"{line}: {key} is there twice; give it once")
            within.keys.add(key)
        within.children, within.size = within.children + 1, within.size + size
        _ensure(within.size <= SIZE, f"{line}: unfolds to more than {SIZE:,} values")


def _ensure(ok: bool, problem: str) -> None:
    if not ok:
        raise yaml.YAMLError(problem)
