"""YAML that says what it seems to say: no key twice, nothing endless."""

from dataclasses import dataclass, field
from typing import Any

import yaml

DEPTH, SIZE = 50, 100_000
"""Largest depth, and number of values with aliases unfolded."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STARTS = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
ENDS = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


@dataclass
class _Open:
    """A mapping or sequence that is being read: its anchor, keys, and number of values."""

    anchor: str | None = None
    is_mapping: bool = False
    keys: set[str] = field(default_factory=set)
    children: int = 0
    size: int = 1


def load_yaml(text: str) -> Any:
    """Returns the content of a YAML text of plain values.

    Raises:
        yaml.YAMLError: As `check_yaml`, or if the text is no YAML.
    """
    check_yaml(text)
    return yaml.load(text, Loader=LOADER)


def check_yaml(text: str) -> None:
    """Checks a text before it is loaded, in one pass over it.

    Raises:
        yaml.YAMLError: With the line, if a mapping has a key twice, an alias stands within its own anchor, or the text
            is nested deeper than `DEPTH` or unfolds to more than `SIZE` values.
    """
    stack, sizes = [_Open()], dict[str, int]()
    for event in yaml.parse(text, Loader=LOADER):
        line, anchor = f"line {event.start_mark.line + 1}", getattr(event, "anchor", None)
        if isinstance(event, STARTS):
            stack.append(_Open(anchor, isinstance(event, yaml.MappingStartEvent)))
            _ensure(len(stack) <= DEPTH, f"{line}: nested deeper than {DEPTH}")
            continue
        if isinstance(event, ENDS):
            closed = stack.pop()
            anchor, size, key = closed.anchor, closed.size, None
        elif isinstance(event, yaml.AliasEvent):
            _ensure(all(anchor != each.anchor for each in stack), f"{line}: *{anchor} stands within itself")
            size, key = sizes.get(str(anchor), 1), None
        elif isinstance(event, yaml.ScalarEvent):
            size, key = 1, event.value
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        within = stack[-1]
        if within.is_mapping and within.children % 2 == 0 and key not in (None, "<<"):
            _ensure(key not in within.keys, f"{line}: {key} is there twice; give it once")
            within.keys.add(key)
        within.children, within.size = within.children + 1, within.size + size
        _ensure(within.size <= SIZE, f"{line}: unfolds to more than {SIZE:,} values")


def _ensure(ok: bool, problem: str) -> None:
    if not ok:
        raise yaml.YAMLError(problem)
