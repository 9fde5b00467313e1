"""Turns arguments as people and W&B's agent write them into what the parser reads."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.commands.shared.configs import find_config
from fl_lightning.core import require
from fl_lightning.trainer.storage.run_folder import RunFolder

CONFIG_FLAGS = ("-c", "--config")
PARTS = ("trainer", "model", "data")
"""Parts of a config."""


def prepare(args: list[str]) -> list[str]:
    """Makes arguments readable for the parser.

    The config of a checkpoint's run is added, names of configs become paths, and Python's values become YAML.
    """
    return gathered(_config_files(_values(_config_of_run(args))), "values")


def without(args: Sequence[str], *names: str) -> list[str]:
    """Returns the arguments without some options and their values."""
    flags = [f"--{name}" for name in names]
    pairs = zip(["", *args], args, strict=False)
    return [arg for before, arg in pairs if arg.partition("=")[0] not in flags and before not in flags]


def split(args: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Returns a subcommand's own arguments, and those that are settings of a run: ``--config``, ``--data.path``, ..."""
    own, settings, coming = list[str](), list[str](), iter(args)
    for arg in coming:
        flag, assigned, _ = arg.partition("=")
        if flag.startswith("-") and flag.strip("-+").partition(".")[0] in (*PARTS, "c", "config"):
            settings += [arg] if assigned else [arg, *islice(coming, 1)]
        else:
            own.append(arg)
    return tuple(own), settings


def seeds_of(listed: str) -> list[int]:
    """Returns seeds that are listed as in 0,1,2.

    Raises:
        UserError: If they are not different numbers.
    """
    found = listed.split(",")
    good = all(text.isdecimal() for text in found) and len(set(found)) == len(found)
    require(good, "seeds", listed, "give different numbers, such as 0,1,2")
    return [int(text) for text in found]


def gathered(args: list[str], name: str) -> list[str]:
    """Gathers the values of an option that is given several times into one list."""
    flag = f"--{name}"
    pairs = list(pairwise([*args, ""]))
    values = [arg.partition("=")[2] or after for arg, after in pairs if arg.partition("=")[0] == flag]
    return [*without(args, name), f"{flag}={json.dumps(values)}"] if values else args


def model_of_configs(args: Sequence[str]) -> dict[str, Any]:
    """Returns class_path and init_args of the last config's model.

    Args:
        args: The arguments, with paths of configs.
    """
    path, settings = "", dict[str, Any]()
    for arg, value in zip(args, [*args[1:], ""], strict=True):
        flag, assigned, text = arg.partition("=")
        if flag in CONFIG_FLAGS:
            found = yaml.safe_load(Path(text if assigned else value).read_text(encoding="utf-8"))
            model = found.get("model") if isinstance(found, dict) else None
            if isinstance(model, dict) and "class_path" in model:
                own = model.get("init_args") or {}
                settings = {**settings, **own} if model["class_path"] == path else dict(own)
                path = model["class_path"]
    return {"class_path": path, "init_args": settings} if path else {}


def kept(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a config's model that another algorithm in its place still has.

    Args:
        before: The config's, by `model_of_configs`.
        now: The run's.
    """
    if not before or _class_or_value(before) == _class_or_value(now):
        return []
    own, settings = before["init_args"], now.get("init_args", {})
    return [
        name
        for name, value in own.items()
        if name != "net" and value is not None and _class_or_value(value) == _class_or_value(settings.get(name))
    ]


def _class_or_value(value: Any) -> Any:
    """Returns the name of an object's class, and other values as they are."""
    value = value.get("class_path", value) if isinstance(value, Mapping) else value
    return value.rpartition(".")[2] if isinstance(value, str) else value


def whole_numbers(args: list[str], message: str) -> list[str]:
    """Writes an integer that is given as 3.0 as 3, if the parser's message is about that."""
    found = re.search(r"Expected an? <class 'int'>\. Got value: (-?\d+)\.0+\s*$", message, re.M)
    return [re.sub(rf"=({found[1]})\.0+$", r"=\1", arg) for arg in args] if found else args


def _config_of_run(args: list[str]) -> list[str]:
    """Adds the config of the run if a checkpoint is named and no config."""
    if {*CONFIG_FLAGS, "-h", "--help"} & {arg.partition("=")[0] for arg in args}:
        return args
    for before, arg, after in zip(["", *args], args, [*args[1:], ""], strict=False):
        name, _, value = arg.partition("=")
        positional = not arg.startswith("-") and ("=" in before or not before.startswith("-"))
        path = Path((value or after) if name == "--ckpt_path" else arg if positional else "")
        if path.suffix == ".ckpt" and (config := RunFolder(path.parent.parent).newest_config).is_file():
            return ["--config", str(config), *args]
    return args


def _config_files(args: list[str]) -> list[str]:
    found = []
    for before, arg in zip(["", *args], args, strict=False):
        name, equals, value = arg.partition("=")
        if before in CONFIG_FLAGS:
            arg = str(find_config(arg))
        elif equals and name in CONFIG_FLAGS:
            arg = f"{name}={find_config(value)}"
        found.append(arg)
    return found


def _values(args: list[str]) -> list[str]:
    found = []
    for arg, after in pairwise([*args, "--"]):
        name, equals, value = arg.partition("=")
        setting = name.startswith(tuple(f"--{part}" for part in PARTS)) and not name.endswith(".help")
        if setting and equals:
            arg = f"{name}={_yaml(value)}"
        elif setting and "." in name and after.startswith("--"):  # a flag, as ${args_no_boolean_flags} has them
            arg = f"{name}=true"
        found.append(arg)
    return found


def _yaml(value: str) -> str:
    """Writes None, and dicts, lists and tuples of Python, as YAML; returns other values as they are."""
    if value == "None":
        return "null"
    if value[:1] not in ("{", "[", "("):
        return value
    try:
        return json.dumps(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError):
        return value  # YAML already
