"""The parser of a subcommand, and a subcommand that reads no config; neither torch nor Lightning is imported."""

import inspect
import re
from importlib import import_module
from textwrap import fill
from typing import Any, NoReturn

import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser, get_loader, set_loader

from fl_lightning.commands.shared.arguments import joined, split, whole_numbers
from fl_lightning.commands.shared.index import PARTS, ArgumentsError
from fl_lightning.commands.shared.messages import WORDS, find_user_error
from fl_lightning.core import ensure
from fl_lightning.results.configs import load_yaml


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
        command: Its name: that of a module of the folder above.
        args: Its arguments.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, command: str, *args: str) -> None:
        module = import_module(f"fl_lightning.commands.{command}")
        self.command, self.function, self.summary = command, module.run, module.SUMMARY
        self.args = own = joined(args)
        self.parameters = inspect.signature(module.run, eval_str=True).parameters
        places = [name for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        self.places = [name for name in places if name not in (*PARTS, "cli")]
        options = {arg.partition("=")[0] for arg in own}
        for name in self.places:
            usage = " ".join(["fl-lightning", command, *map(str.upper, self.places)])
            ensure(f"--{name}" not in options, f"--{name}: no option; give it by its place: {usage}")
        # the parameter for the settings of the subcommand's runs, *settings
        self.rest = next((name for name, p in self.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        own, self.settings = split(own) if self.rest else (own, list[str]())
        self.read(own)

    def read(self, args: list[str]) -> None:
        """Makes the parser, and parses the arguments."""
        self.parser = self.init_parser()
        self.add_arguments_to_parser(self.parser)
        self.parse_arguments(self.parser, args)

    def init_parser(self, **kwargs: Any) -> Any:
        """Makes an empty parser."""
        return Parser(prog=f"fl-lightning {self.command}", description=self.summary, **kwargs)

    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
        """Adds the subcommand's own arguments."""
        texts = {param.arg_name: param.description for param in parse(inspect.getdoc(self.function) or "").params}
        for name in self.places:
            nargs = {list[str]: "+", list[str] | None: "*"}.get(self.parameters[name].annotation)
            place = parser.add_argument(name, metavar=name.upper(), type=str, nargs=nargs, help=texts.get(name))
            place.required = nargs != "*"
        flags = {name: p.default for name, p in self.parameters.items() if p.annotation is bool}
        for name, default in flags.items():  # --dry-run, --dry_run, or one of them with true or false
            spelled, text = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), texts.get(name)
            parser.add_argument(*spelled, type=bool, nargs="?", const=True, default=default, help=text)
        if self.rest is not None:
            parser.epilog = texts.get(f"*{self.rest}")
        parser.add_function_arguments(self.function, skip={*PARTS, "cli", *self.places, *flags})
        null = getattr(import_module(self.function.__module__), "NULL", {})
        parser.set_defaults({name: [{"class_path": each} for each in null[name]] for name in null})

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
            whole = whole_numbers(args, str(error))
            if whole == args:
                raise
            return self.parse_arguments(parser, whole)

    def run(self) -> None:
        """Runs the subcommand."""
        self.call(self.config)

    def call(self, made: Any, **instead: Any) -> None:
        """Calls its function with what its parameters name, or with other values in the place of some."""
        given = {name: self if name == "cli" else made[name] for name in self.parameters if name != self.rest}
        given |= {name: value for name, value in instead.items() if name in given}
        positional = [given.pop(name) for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        self.function(*positional, *self.settings, **given)
