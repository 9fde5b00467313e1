"""Refuses wrong names of configs, classes and settings before the parser's slow imports."""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.commands.shared.arguments import PARTS, prepare
from fl_lightning.commands.shared.index import entry, fitting_classes, index, named_classes, options_of
from fl_lightning.commands.shared.unknown import FOREIGN, ArgumentsError
from fl_lightning.results.yaml_text import load_yaml

DOTTED = re.compile(r"(?<![\w./])(?!fl_lightning\.)[A-Za-z_]\w*\.[A-Za-z_]")
"""Is found in the dotted path of a class that is not the package's; its module may define further classes."""
BY_PARSER = re.compile(r"class_path|init_args|dict_kwargs|\.help$|^(trainer|h|help)$")
"""Is found in the name of an option that only the parser understands."""


def check_early(command: str, *args: str) -> None:
    """Refuses names of configs, classes and settings that are wrong in any case; the parser checks what passes.

    Args:
        command: The subcommand.
        args: Its arguments.

    Raises:
        UserError: If there is no such config.
        ArgumentsError: If there is no such class or setting; the message is in the parser's words.
    """
    known, options = entry(command), options_of(command)
    if not known["complete"]:
        return
    given, chosen, unknown = prepare(args), dict[str, str](), list[str]()
    for before, arg in pairwise(["", *given]):
        name, _, value = arg.removeprefix("--").partition("=")
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0].removesuffix("+")
        if name == "config":
            try:
                text = re.sub(r"#.*", "", Path(value).read_text(encoding="utf-8"))
                chosen |= named_classes(load_yaml(text))
            except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
                return
        else:
            text = value
        if DOTTED.search(text) or BY_PARSER.search(name) or re.match("-[^-]", arg):
            return
        if not arg.startswith("--"):
            if before in unknown or not (known["places"] or (before.startswith("--") and "=" not in before)):
                unknown.append(arg)
        elif part not in PARTS or part == "trainer":
            if f"{part}.{key}".strip(".") not in options:
                unknown.append(arg)
            elif key == rest:
                _check_class(name, value, options[name])
        elif not rest:
            _check_class(name, value, options[name])
            chosen[part] = value.rpartition(".")[2]
        elif chosen.get(part) in index()["classes"]:
            settings = index()["classes"][chosen[part]]["settings"]
            if key not in settings and key == rest:
                inner = f"Option '{key}' is not accepted\nGiven value: NestedArg(key='{key}', val={value!r})"
                raise ArgumentsError(f'Parser key "{part}":\n{inner}')
            if key == rest:
                _check_class(name, value, settings[key])
    if unknown:
        raise ArgumentsError(f"unrecognized arguments: {' '.join(unknown)}")


def _check_class(path: str, name: str, setting: dict[str, Any]) -> None:
    """Refuses the name of a class that neither the package nor a file has."""
    known = name in index()["classes"] or name in index()["others"] or os.path.exists(name)
    own = "classes" in setting or (path not in FOREIGN and fitting_classes(path, ()))  # a net is any Module
    closed = own and not {"list", "open"} & {*setting}
    if closed and re.fullmatch(r"[A-Za-z_]\w*", name) and not known and load_yaml(name) == name:
        bases = " ".join(f"fl_lightning.{base}" for base in setting.get("classes", ()))
        raise ArgumentsError(f'Parser key "{path}":\nSubtypes: {bases}\nExpected a dot import path string: {name}')
