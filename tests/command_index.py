"""Writes the index of the command line, ``fl_lightning/commands/shared/index.json``, from the code.

``python -m tests.command_index`` renews the file; a test compares it with the code.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from inspect import isabstract
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin
from unittest.mock import patch

from torch import nn

import fl_lightning
from fl_lightning.commands import COMMANDS
from fl_lightning.commands.main import command_of
from fl_lightning.commands.shared.cli import FederatedParser
from fl_lightning.commands.shared.index import FILE, PARTS
from fl_lightning.commands.shared.parser import Command
from fl_lightning.core.options import Checked
from fl_lightning.trainer.trainer import FederatedTrainer
from tests.catalogue import HEADS, WIRE, entries


def made() -> dict[str, Any]:
    """Returns the index, made from the code."""
    with patch.dict(os.environ, COLUMNS="80"):
        commands = {name: of_command(name) for name in COMMANDS}
    texts = [*dict.fromkeys(text for command in commands.values() for text in command["help"])]
    for command in commands.values():
        command["help"] = [texts.index(text) for text in command["help"]]
    public = {name: kind for name in fl_lightning.__all__ if isinstance(kind := getattr(fl_lightning, name), type)}
    own_names = {kind.__name__ for base in (Checked, nn.Module) for kind in below(base) if is_own(kind)}
    return {
        "algorithms": {"heads": [*HEADS], "note": WIRE, "rows": [[entry.name, *entry.cells] for entry in entries()]},
        "classes": {name: of_class(public[name]) for name in sorted(public)},
        "others": sorted(own_names - {*public}),
        "commands": commands,
        "texts": texts,
        "made with": {"python": platform.python_version_tuple()[:2], "jsonargparse": version("jsonargparse")},
    }


def of_class(kind: type) -> dict[str, Any]:
    settings = {}
    if issubclass(kind, (Checked, nn.Module, FederatedTrainer)):
        parser = FederatedParser()
        parser.add_class_arguments(kind, "it", fail_untyped=False, sub_configs=True)
        settings = of_parser(parser, "--it.")
    bases = [base.__name__ for base in kind.__mro__[1:] if is_own(base)]
    abstract = {"abstract": True} if isabstract(kind) else {}
    return {"bases": bases, "key": getattr(kind, "config_key", ""), "settings": settings} | abstract


def of_command(name: str) -> dict[str, Any]:
    with patch.object(Command, "parse_arguments", lambda it, *_: setattr(it, "config", {})):  # some miss arguments
        command = command_of(name)
    return {
        "options": {
            name: entry for name, entry in of_parser(command.parser, "--").items() if not name.startswith("trainer.")
        },
        "places": len(command.places),
        "complete": command.needs == PARTS and command.rest is None,
        "help": command.parser.format_help().split("\n\n"),
    }


def of_parser(parser: Any, start: str) -> dict[str, Any]:
    return {
        option.removeprefix(start): of_action(action)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith(start) and not option.endswith((".help", "+", "--print_shtab"))
    }


def of_action(action: Any) -> dict[str, Any]:
    leaves = [*parts(getattr(action, "_typehint", None))]
    kinds = [leaf for leaf in leaves if isinstance(leaf, type) and is_own(leaf)]
    values = [value for leaf in leaves if get_origin(leaf) is Literal for value in get_args(leaf)]
    entry = {
        "classes": [*dict.fromkeys(kind.__name__ for kind in kinds)],
        "open": bool(kinds) and len(kinds) < len(leaves),
        "choices": [str(value) for value in values] + ["true", "false"] * (bool in leaves),
        "nargs": action.nargs,
        "list": len(action.option_strings) == 2 and action.option_strings[1].endswith("+"),
    }
    return {name: value for name, value in entry.items() if value not in ([], None, False)}


def parts(hint: Any) -> Iterator[Any]:
    """Yields the types of which a type is made, without null."""
    if get_origin(hint) is Annotated:
        yield from parts(get_args(hint)[0])
    elif get_origin(hint) is Literal or not get_args(hint):
        yield from () if hint is NoneType else (hint,)
    else:
        for part in get_args(hint):
            yield from parts(part)


def below(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from below(subclass)


def is_own(kind: type) -> bool:
    return kind.__module__.startswith("fl_lightning.")


def text(index: dict[str, Any]) -> str:
    """Returns the index as JSON, a line for each entry."""
    sections = []
    for name, value in index.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
            sections.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
        else:
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            sections.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(text(made()), end="")
    else:
        FILE.write_text(text(made()), encoding="utf-8")
