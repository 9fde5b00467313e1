"""What the index answers before the parser's slow imports: wrong names, numbers and choices; completion by Tab."""

import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from fl_lightning.commands.shared.arguments import (
    config_names,
    find_config,
    joined,
    prepare,
    settings_in,
    whole_numbers,
)
from fl_lightning.commands.shared.index import (
    FOREIGN,
    PARTS,
    ArgumentsError,
    entry,
    fitting_classes,
    index,
    named_classes,
    options_of,
)
from fl_lightning.commands.shared.parser import Parser
from fl_lightning.core.options import Interval, check_values
from fl_lightning.results.configs import NoValueError, load_yaml

DOTTED = re.compile(r"(?<![\w./])(?!fl_lightning\.)[A-Za-z_]\w*\.[A-Za-z_]")
"""Is found in the dotted path of a class that is not the package's; its module may define further classes."""
BY_PARSER = re.compile(r"class_path|init_args|dict_kwargs|\.help$|^(trainer|h|help)$")
"""Is found in the name of an option that only the parser understands."""
BY_PARSER_ALONE = (
    OSError, ValueError, AttributeError, RecursionError, NoValueError, yaml.constructor.ConstructorError
)  # fmt: skip
"""Errors of a config that another loader may read, or that the parser explains."""


def check_early(command: str, *args: str) -> None:
    """Refuses names and values that are wrong in any case; the parser checks what passes.

    Args:
        command: The subcommand.
        args: Its arguments.

    Raises:
        UserError: If there is no such config, or a number is out of its range.
        ArgumentsError: If a config is no YAML, there is no such class or setting, or a value is not of its type; the
            message is in the parser's words.
    """
    known, options = entry(command), options_of(command)
    if not known["complete"]:
        return
    given, chosen, unknown = prepare(args), dict[str, str](), list[str]()
    values, classes = dict[str, tuple[Any, Any]](), index()["classes"]
    for before, arg in pairwise(["", *given]):
        name, _, value = arg.removeprefix("--").partition("=")
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0].removesuffix("+")
        if name == "config":
            try:
                text = re.sub(r"#.*", "", Path(value).read_text(encoding="utf-8"))
                chosen = _renamed(chosen, named_classes(settings_in(Path(value))))
                values.clear()  # the config may have others
            except BY_PARSER_ALONE:
                return
            except yaml.YAMLError as error:
                raise ArgumentsError(f"Problems parsing config: {error}") from None
        else:
            text = value
        if DOTTED.search(text) or BY_PARSER.search(name) or re.match("-[^-]", arg):
            return
        if not arg.startswith("--"):
            if before in unknown or not (known["places"] or (before.startswith("--") and "=" not in before)):
                unknown.append(arg)
        elif part == "trainer" or part not in PARTS or not rest:
            if f"{part}.{key}".strip(".") not in options:
                unknown.append(arg)
        elif chosen.get(part) in classes and key not in classes[chosen[part]]["settings"] and key == rest:
            inner = f"Option '{key}' is not accepted\nGiven value: NestedArg(key='{key}', val={value!r})"
            raise ArgumentsError(f'Parser key "{part}":\n{inner}')
        above, _, leaf = name.rpartition(".")
        own = classes.get(chosen.get(above), {"settings": {}})["settings"]
        if setting := options.get(name, own.get(leaf, {})):
            _check_class(name, value, setting)
            values |= _parsed(name, value, setting) if "=" in arg else {}
        if "classes" in setting:
            chosen = _renamed(chosen, {name: value.rpartition(".")[2]})
    if unknown:
        raise ArgumentsError(f"unrecognized arguments: {' '.join(unknown)}")
    for name, (number, kind) in values.items():
        check_values("", {name: number}, {name: kind})


def _renamed(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Returns names of classes by their keys, after some are given anew: a new class has parts of its own."""
    above = tuple(f"{path}." for path in now)
    return {path: kind for path, kind in before.items() if not path.startswith(above)} | now


def _check_class(path: str, name: str, setting: dict[str, Any]) -> None:
    """Refuses the name of a class that neither the package nor a file has."""
    known = name in index()["classes"] or name in index()["others"] or os.path.exists(name)
    own = "classes" in setting or (path not in FOREIGN and fitting_classes(path, ()))  # a net is any Module
    closed = own and not {"list", "open"} & {*setting}
    if closed and re.fullmatch(r"[A-Za-z_]\w*", name) and not known and load_yaml(name) == name:
        bases = " ".join(f"fl_lightning.{base}" for base in setting.get("classes", ()))
        raise ArgumentsError(f'Parser key "{path}":\nSubtypes: {bases}\nExpected a dot import path string: {name}')


def _parsed(path: str, value: str, setting: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns a value and its type by its key, if the index has its type."""
    if "type" not in setting:
        return {}
    kind = eval(setting["type"], {"Annotated": Annotated, "Interval": Interval, "Literal": Literal})
    parser, arg = Parser(), f"--{path}={value}"
    parser.add_argument(f"--{path}", type=kind)
    try:
        return {path: (parser.parse_args([arg])[path], kind)}
    except ArgumentsError as error:
        if whole_numbers([arg], str(error)) == [arg]:
            raise
        return {}


def add_options(parser: ArgumentParser, command: str, words: Sequence[str]) -> None:
    """Adds the options of a subcommand, and the settings of the classes that the words and their configs name.

    Args:
        parser: The subcommand's.
        command: The subcommand.
        words: Its arguments so far.
    """
    chosen: dict[str, str] = {}
    for arg in joined(words):
        name, _, value = arg.removeprefix("--").partition("=")
        if name == "config":
            with suppress(ValueError, OSError, AttributeError, yaml.YAMLError):
                chosen |= named_classes(settings_in(find_config(value)))
        chosen[name.removesuffix("+")] = value.rpartition(".")[2]
    options, classes = options_of(command), index()["classes"]
    coming = [*options]
    for path in coming:
        name = chosen.get(path) or (options[path].get("classes", [""])[0] if path in PARTS else "")
        inner = classes[name]["settings"] if name in classes else {}
        options |= {f"{path}.{name}": setting for name, setting in inner.items()}
        coming += [f"{path}.{name}" for name in inner]
    for path, setting in options.items():
        own = fitting_classes(path, declared := setting.get("classes", ()))
        # the base classes with settings may be meant themselves
        own += [name for name in declared if "." in path and classes.get(name, {"settings": {}})["settings"]]
        _add(parser, path, setting.get("choices", own), setting.get("nargs"))
        if declared:
            _add(parser, f"{path}.help", own)
        if "list" in setting:
            _add(parser, f"{path}+", own)
    if index()["commands"][command]["places"]:
        parser.add_argument("places", nargs="*")


def _add(parser: ArgumentParser, name: str, values: Sequence[str], nargs: Any = None) -> None:
    action: Any = parser.add_argument(f"--{name}", nargs=nargs)
    if name == "config":
        from argcomplete.completers import FilesCompleter  # which completes, so it is there

        action.completer = lambda prefix, **_: [*config_names(), *FilesCompleter()(prefix)]
    elif values:
        action.completer = lambda **_: values
