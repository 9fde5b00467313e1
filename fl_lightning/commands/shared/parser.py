"""The parser of a subcommand, and a subcommand that reads no config; neither torch nor Lightning is imported.

Before the slow imports, the index answers Tab, and refuses wrong names.
"""

import argparse
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, get_args, get_origin

import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser, get_loader, set_loader

from fl_lightning.commands import COMMANDS, function_of
from fl_lightning.commands.shared.arguments import (
    config_names,
    find_config,
    joined,
    prepare,
    settings_in,
    split,
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
from fl_lightning.commands.shared.messages import WORDS, find_user_error
from fl_lightning.core import ensure
from fl_lightning.results.configs import NoValueError, load_yaml


def _load(text: str) -> Any:
    if text == "None":  # jsonargparse loads a nested null a second time, after it has made it text
        return None
    value = load_yaml(text, get_loader("yaml"))
    # an argument, of one line, holds no comment: --trainer.name '#1' is a name
    cut = "\n" not in text and " #" in f" {text}" and not isinstance(value, (list, dict))
    return text if cut and text.lstrip()[0] not in "'\"" else value


INDENT = 24 * " "
"""Where the text of a help begins."""

set_loader(MODE := "checked yaml", _load, (yaml.YAMLError,))


class Parser(ArgumentParser):
    """A parser that raises its errors, and refuses abbreviated names and YAML with a key given twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"prog": "fl-lightning", "allow_abbrev": False, "parser_mode": MODE, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuses the arguments."""
        raise find_user_error(ex) or ArgumentsError(message)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Returns the help in plain words; see `readable`."""
        return readable(super().format_help(*args, **kwargs))


def readable(text: str) -> str:
    """Returns a help of lines of up to 80 letters: types in words, and docstrings without their markup."""
    text = re.sub(r"(?<=type:)\s+(?:[^()]|\(\))+?(?=,\s+(?:default:|classes:)|\))", _in_words, text)
    text = re.sub(r"(?::\w+:)?`(\w+)`", r"\1", text.replace("``", ""))
    lines = list[str]()
    for line in text.splitlines():
        if lines and re.match(rf"{INDENT}\S", line) and re.match(r"  .{20}  \S", lines[-1]):
            lines[-1] += line[len(INDENT) - 1 :]  # the text of an option is one paragraph
        else:
            lines.append(line)
    text = "\n".join([*lines, ""])
    return re.sub(r"^(  .{20}  |)(.{57,})$", _filled, text, flags=re.M)


def _filled(line: re.Match[str]) -> str:
    return fill(line[2], 80, initial_indent=line[1], subsequent_indent=INDENT if line[1] else "")


def _in_words(match: re.Match[str]) -> str:
    """Writes a type of Python in words."""
    kind = re.sub(r"<class '(\w+)'>|, 'checked later'", r"\1", " ".join(match[0].split()))
    while kind != (kind := re.sub(r"(\w+)\[([^\[\]]*)\]", _plain, kind)):
        pass
    return " " + re.sub(r"\b(?:int|float|bool|str)\b", lambda m: WORDS[m[0]].removeprefix("a "), kind).replace(
        " | ", " or "
    )


def _plain(match: re.Match[str]) -> str:
    outer, inner = match.groups()
    if outer in ("Literal", "Union"):
        return inner.replace("'", "").replace(", ", " | ")
    forms = {"Optional": f"{inner} | null", "dict": "mapping", "Annotated": inner.replace(", ", " ")}
    return forms.get(outer, f"list of {inner}")


class Command:
    """A subcommand: the parser that the parameters of its ``run`` make, and its parsed arguments, ``config``.

    Args:
        command: Its name.
        args: Its arguments.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, command: str, *args: str) -> None:
        self.command, self.function = command, function_of(command)
        self.parameters = inspect.signature(self.function, eval_str=True).parameters
        self.flags = {name: p.default for name, p in self.parameters.items() if p.annotation is bool}
        spelled = {f"--{spelling}" for name in self.flags for spelling in (name, name.replace("_", "-"))}
        # a flag stands alone, or before true or false: what else follows is an argument of its own
        self.args = arguments = [
            f"{arg}=true" if arg in spelled and not isinstance(_load(after), bool) else arg
            for arg, after in pairwise([*_lists(joined(args), self.parameters), "--"])
        ]
        self.places = [
            name for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY and name not in (*PARTS, "cli")
        ]
        options = {arg.partition("=")[0] for arg in arguments}
        for name in self.places:
            usage = " ".join(["fl-lightning", command, *map(str.upper, self.places)])
            ensure(f"--{name}" not in options, f"--{name}: no option; give it by its place: {usage}")
        # the parameter for the settings of the subcommand's runs, *settings
        self.rest = next((name for name, p in self.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        own_args, self.settings = split(arguments) if self.rest else (arguments, list[str]())
        self.read(own_args)

    def read(self, args: list[str]) -> None:
        """Makes the parser, and parses the arguments."""
        self.parser = self.init_parser()
        self.add_arguments_to_parser(self.parser)
        self.parse_arguments(self.parser, args)

    def init_parser(self, **kwargs: Any) -> Any:
        """Makes an empty parser."""
        return Parser(prog=f"fl-lightning {self.command}", description=COMMANDS[self.command], **kwargs)

    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
        """Adds the subcommand's own arguments."""
        texts = {param.arg_name: param.description for param in parse(inspect.getdoc(self.function) or "").params}
        for name in self.places:
            nargs = {list[str]: "+", list[str] | None: "*"}.get(self.parameters[name].annotation)
            place = parser.add_argument(name, metavar=name.upper(), type=str, nargs=nargs, help=texts.get(name))
            place.required = nargs != "*"
        for name, default in self.flags.items():  # --dry-run, --dry_run, or one of them with true or false
            spelled, text = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), texts.get(name)
            parser.add_argument(*spelled, type=bool, nargs="?", const=True, default=default, help=text)
        if self.rest is not None:
            parser.epilog = texts.get(f"*{self.rest}")
        parser.add_function_arguments(self.function, skip={*PARTS, "cli", *self.places, *self.flags})
        null = getattr(import_module(self.function.__module__), "NULL", {})
        added = [name for name in null if any(arg.startswith(f"--{name}+") for arg in self.args)]
        parser.set_defaults({name: [{"class_path": class_path} for class_path in null[name]] for name in added})

    def parse_arguments(self, parser: ArgumentParser, args: Any) -> None:
        """Parses the arguments; an integer may be written as 3.0."""
        try:
            self.config = parser.parse_args(args)
            for key, value in self.config.items():  # what a setting of any type takes as it is
                if type(value).__name__ == "NestedArg":
                    parser.error(
                        f'Parser key "{key.replace(".init_args", "")}":\n  Expected a value. Got value: {value}'
                    )
        except ArgumentsError as error:
            corrected = whole_numbers(args, str(error))
            if corrected == args:
                raise
            return self.parse_arguments(parser, corrected)

    def run(self) -> None:
        """Runs the subcommand."""
        self.call(self.config)

    def call(self, namespace: Any, **instead: Any) -> None:
        """Calls its function with what its parameters name, or with other values in the place of some."""
        arguments = {name: self if name == "cli" else namespace[name] for name in self.parameters if name != self.rest}
        arguments |= {name: value for name, value in instead.items() if name in arguments}
        positional = [arguments.pop(name) for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        self.function(*positional, *self.settings, **arguments)


def _lists(args: Sequence[str], parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yields the arguments of a subcommand; the values of its options that are lists may be given as in 0,1,2."""
    kinds = {f"--{name}": (p.annotation, *get_args(p.annotation)) for name, p in parameters.items()}
    for before, arg in pairwise(["", *args]):
        option, _, value = arg.partition("=") if arg.startswith("--") else (before, "", arg)
        plain = value and value[0] not in "[({" and value != "null"
        is_list = any(get_origin(kind) is Sequence for kind in kinds.get(option, ()))
        yield f"{arg.removesuffix(value)}[{value}]" if plain and is_list else arg


DOTTED = re.compile(r"(?<![\w./])(?!fl_lightning\.)[A-Za-z_]\w*\.[A-Za-z_]")
"""The pattern of a dotted path of a class that is not the package's; its module may define further classes."""
BY_PARSER = re.compile(r"class_path|init_args|dict_kwargs|\.help$|^(trainer|h|help)$")
"""The pattern of names of options that only the parser understands."""
BY_PARSER_ALONE = (
    OSError, ValueError, AttributeError, RecursionError, NoValueError, yaml.constructor.ConstructorError
)  # fmt: skip
"""Errors of a config that another loader may read, or that the parser explains."""


def check_early(command: str, *args: str) -> None:
    """Refuses names that are wrong in any case; the parser checks what passes, and all other values.

    Args:
        command: The subcommand.
        args: Its arguments.

    Raises:
        UserError: If there is no such config.
        ArgumentsError: If a config is no YAML, or there is no such class or setting; the message is in the parser's
            words.
    """
    record, options = entry(command), options_of(command)
    if not record["complete"]:
        return
    prepared, chosen, unknown = prepare(args), dict[str, str](), list[str]()
    classes = index()["classes"]
    for before, arg in pairwise(["", *prepared]):
        name, _, value = arg.removeprefix("--").partition("=")
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0].removesuffix("+")
        if name == "config":
            try:
                text = re.sub(r"#.*", "", Path(value).read_text(encoding="utf-8"))
                chosen = _renamed(chosen, named_classes(settings_in(Path(value))))
            except BY_PARSER_ALONE:
                return
            except yaml.YAMLError as error:
                raise ArgumentsError(f"Problems parsing config: {error}") from None
        else:
            text = value
        if DOTTED.search(text) or BY_PARSER.search(name) or re.match("-[^-]", arg):
            return
        if not arg.startswith("--"):
            if before in unknown or not (record["places"] or (before.startswith("--") and "=" not in before)):
                unknown.append(arg)
        elif part == "trainer" or part not in PARTS or not rest:
            if f"{part}.{key}".strip(".") not in options:
                unknown.append(arg)
        elif chosen.get(part) in classes and key not in classes[chosen[part]]["settings"] and key == rest:
            inner = f"Option '{key}' is not accepted\nGiven value: NestedArg(key='{key}', val={value!r})"
            raise ArgumentsError(f'Parser key "{part}":\n{inner}')
        above, _, leaf = name.rpartition(".")
        settings = classes.get(chosen.get(above), {"settings": {}})["settings"]
        if setting := options.get(name, settings.get(leaf, {})):
            _check_class(name, value, setting)
        if "classes" in setting:
            chosen = _renamed(chosen, {name: value.rpartition(".")[2]})
    if unknown:
        raise ArgumentsError(f"unrecognized arguments: {' '.join(unknown)}")


def _renamed(chosen: dict[str, str], changes: dict[str, str]) -> dict[str, str]:
    """Returns names of classes by their keys, after some are given anew: a new class has parts of its own."""
    above = tuple(f"{path}." for path in changes)
    return {path: kind for path, kind in chosen.items() if not path.startswith(above)} | changes


def _check_class(path: str, name: str, setting: dict[str, Any]) -> None:
    """Refuses the name of a class that neither the package nor a file has."""
    choices = setting.get("choices", [])
    known = name in [*index()["classes"], *index()["others"], *choices] or os.path.exists(name)
    has_classes = "classes" in setting or (path not in FOREIGN and fitting_classes(path, ()))  # a net is any Module
    closed = has_classes and (choices or not {"list", "open"} & {*setting})
    if closed and re.fullmatch(r"[A-Za-z_]\w*", name) and not known and load_yaml(name) == name:
        bases = " ".join(f"fl_lightning.{base}" for base in setting.get("classes", ()))
        raise ArgumentsError(f'Parser key "{path}":\nSubtypes: {bases}\nExpected a dot import path string: {name}')


def add_options(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> None:
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
    paths = [*options]
    for path in paths:
        name = chosen.get(path) or (options[path].get("classes", [""])[0] if path in PARTS else "")
        inner = classes[name]["settings"] if name in classes else {}
        options |= {f"{path}.{name}": setting for name, setting in inner.items()}
        paths += [f"{path}.{name}" for name in inner]
    for path, setting in options.items():
        names = fitting_classes(path, declared := setting.get("classes", ()))
        # the base classes with settings may be meant themselves
        names += [name for name in declared if "." in path and classes.get(name, {"settings": {}})["settings"]]
        _add(parser, path, setting.get("choices", names), setting.get("nargs"))
        if declared:
            _add(parser, f"{path}.help", names)
        if "list" in setting:
            _add(parser, f"{path}+", names)
    if index()["commands"][command]["places"]:
        parser.add_argument("places", nargs="*")


def _add(parser: argparse.ArgumentParser, name: str, values: Sequence[str], nargs: Any = None) -> None:
    action: Any = parser.add_argument(f"--{name}", nargs=nargs)
    if name == "config":
        from argcomplete.completers import FilesCompleter  # it completes, so it is installed

        action.completer = lambda prefix, **_: [*config_names(), *FilesCompleter()(prefix)]
    elif values:
        action.completer = lambda **_: values
