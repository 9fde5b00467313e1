"""Completion of the command line by Tab, from its index."""

from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml
from argcomplete.completers import FilesCompleter

from fl_lightning.commands.shared.arguments import PARTS, joined
from fl_lightning.commands.shared.configs import config_names, find_config
from fl_lightning.commands.shared.index import fitting_classes, index, named_classes, options_of
from fl_lightning.results.yaml_text import load_yaml


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
                chosen |= named_classes(load_yaml(find_config(value).read_text(encoding="utf-8")))
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
        action.completer = lambda prefix, **_: [*config_names(), *FilesCompleter()(prefix)]
    elif values:
        action.completer = lambda **_: values
