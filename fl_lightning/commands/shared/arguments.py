"""Turns arguments as people and W&B's agent write them into what the parser reads; finds configs by their names."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from fl_lightning.commands.shared.index import PARTS, first_of, fitting_classes, unknown_class
from fl_lightning.core import UserError, ensure, require, similar
from fl_lightning.results import ONLY_PYTHON, NoValueError, load_yaml, only_python, read_config, setting_of
from fl_lightning.trainer import RunFolder

SETTINGS = (*PARTS, "config")
"""First parts of the names of a run's settings."""


def joined(args: Sequence[str]) -> list[str]:
    """Writes the options of a run as ``--name=value``.

    A setting without a value is true: so W&B's agent writes it for ``${args_no_boolean_flags}``.
    """
    options, pairs = list[str](), iter(pairwise([*args, "--"]))
    for raw, after in pairs:
        arg = re.sub(r"^--values\+(?==|$)", "--values", re.sub("^-c(onfig)?(?==|$)", "--config", raw))
        if _option(arg) in (*SETTINGS, "ckpt_path", "seeds", "values") and "=" not in arg:
            if not after.startswith("--"):
                next(pairs)
                arg = f"{arg}={after}"
            elif "." in arg and not arg.endswith(".help"):
                arg = f"{arg}=true"
        options.append(arg)
    return options


def prepare(args: Sequence[str]) -> list[str]:
    """Makes arguments readable for the parser.

    The config of a checkpoint's run is added, names of configs become paths, Python's values become YAML, and the
    values of ``--values``, which is given several times, become one list.
    """
    args = _with_config_of_run(joined(args))
    values = [arg.removeprefix("--values=") for arg in args if _option(arg) == "values"]
    readable = [option for arg in without(args, "values") for option in _afresh(_readable(arg))]
    return [*readable, f"--values={json.dumps(values)}"] if values else readable


def _afresh(arg: str) -> list[str]:
    """Empties a list of classes before it is given anew: else an entry would get settings of the one in its place."""
    name, _, value = arg.partition("=")
    if not value.startswith("[") or name.endswith("+") or _option(arg) not in PARTS:
        return [arg]
    with suppress(yaml.YAMLError):
        if lists_classes(load_yaml(value)):
            return [f"{name}=[]", arg]
    return [arg]


def lists_classes(value: Any) -> bool:
    """Returns whether a value is a list that names a class."""
    return isinstance(value, list) and any(
        re.fullmatch(r"(\w+\.)*[A-Z]\w*", str(entry.get("class_path") if isinstance(entry, dict) else entry))
        for entry in value
    )


def without(args: Sequence[str], *names: str) -> list[str]:
    """Returns arguments, which are `joined`, without some options."""
    return [arg for arg in args if arg.partition("=")[0].removeprefix("--") not in names]


def split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a subcommand's own arguments, and those that are settings of a run; they are `joined`."""
    return [arg for arg in args if _option(arg) not in SETTINGS], [arg for arg in args if _option(arg) in SETTINGS]


def seeds_of(listed: str) -> list[int]:
    """Returns seeds that are listed as in 0,1,2.

    Raises:
        UserError: If they are not different numbers.
    """
    texts = listed.split(",")
    valid = all(text.isdecimal() for text in texts) and len({*map(int, texts)}) == len(texts)
    require(valid, "seeds", listed, "give different numbers, such as 0,1,2")
    return [int(text) for text in texts]


def model_of_configs(args: Sequence[str]) -> dict[str, Any]:
    """Returns class_path and init_args of the last config's model.

    Args:
        args: The arguments, by `prepare`.
    """
    path, settings = "", dict[str, Any]()
    for file in (arg.removeprefix("--config=") for arg in args if _option(arg) == "config"):
        model = settings_in(Path(file)).get("model")
        if isinstance(model, dict) and "class_path" in model:
            init_args = model.get("init_args") or {}
            settings, path = {**(settings if model["class_path"] == path else {}), **init_args}, model["class_path"]
    return {"class_path": path, "init_args": settings} if path else {}


def said_of(args: Sequence[str], *parts: str) -> str:
    """Returns what arguments, by `prepare`, and their configs say of some parts of a run, in their order, as a key."""
    settings = list[Any]()
    for arg in args:
        name, _, value = arg.partition("=")
        if name == "--config":
            content = settings_in(Path(value))
            settings.append({part: content[part] for part in parts if part in content})
        elif _option(arg) in parts:
            settings.append(arg)
    return json.dumps(settings, default=str)


@cache
def settings_in(config: Path) -> dict[str, Any]:
    """Returns the settings in a config; none for a file without a mapping."""
    content = load_yaml(config.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def kept(config_model: Mapping[str, Any], run_model: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a config's model that another algorithm in its place still has.

    Args:
        config_model: The model of the config, by `model_of_configs`.
        run_model: The model of the run.
    """
    if not config_model or _class_or_value(config_model) == _class_or_value(run_model):
        return []
    config_settings, run_settings = config_model["init_args"], run_model.get("init_args", {})
    return [
        name
        for name, value in config_settings.items()
        if name != "net" and value is not None and _class_or_value(value) == _class_or_value(run_settings.get(name))
    ]


def _class_or_value(value: Any) -> Any:
    """Returns the name of an object's class, and other values as they are."""
    value = value.get("class_path", value) if isinstance(value, Mapping) else value
    return value.rpartition(".")[2] if isinstance(value, str) else value


def whole_numbers(args: list[str], message: str) -> list[str]:
    """Writes an integer that is given as 3.0 or 3e0 as 3, if the parser's message is about that."""
    match = re.search(r"Expected an? <class 'int'>\. Got value: (-?\d+)\.0+\s*$", message, re.M)

    def written(arg: str) -> str:
        name, _, value = arg.partition("=")
        is_number = re.fullmatch(r"-?\d+\.0+|-?\d+(\.\d*)?[eE]\+?\d+", value)
        return f"{name}={match[1]}" if match and is_number and float(value) == float(match[1]) else arg

    return [*map(written, args)]


def _option(arg: str) -> str:
    """Returns the first part of an option's name, such as trainer of ``--trainer.seed=1``; "" for a value."""
    return first_of(r"\A--?(\w+)", arg)


def _with_config_of_run(args: list[str]) -> list[str]:
    """Adds the config of the run if a checkpoint is named and no config."""
    if {"config", "h", "help"} & {*map(_option, args)}:
        return args
    for before, arg in pairwise(["", *args]):
        name, _, value = arg.partition("=")
        positional = not arg.startswith("-") and ("=" in before or not before.startswith("-"))
        named = name == "--ckpt_path" and value not in ("last", "best", "auto", "null", "None", "")
        path = Path(value if named else arg if positional else "")
        if not named and path.suffix != ".ckpt" and not (positional and (path / RunFolder.CHECKPOINTS).is_dir()):
            continue
        RunFolder.find_checkpoint(str(path), Path(), "")
        require(path.suffix not in (".yaml", ".yml"), "ckpt_path", path, "a config; give it as --config")
        if (config := RunFolder(path.parent.parent).newest_config).is_file():
            return [f"--config={config}", *_appended_once(read_config(config), args), *args]
        require(
            "model" in map(_option, args), "ckpt_path", path, "no config.yaml of its run lies above it; give --config"
        )
    return args


def _appended_once(config: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Returns arguments that take from a config's lists the classes that ``+=`` appends to them once more.

    So the arguments that have begun a run also continue it.
    """
    appended: dict[str, list[Any]] = {}
    for key, value in (re.split(r"\+=", arg, maxsplit=1) for arg in args if re.match(r"--[\w.]+\+=", arg)):
        with suppress(yaml.YAMLError):  # the parser names the mistake
            added = load_yaml(_yaml(value))
            appended.setdefault(key, []).extend(map(_class_or_value, added if isinstance(added, list) else [added]))
    options = []
    for key, names in appended.items():
        entries = setting_of(config, key.removeprefix("--"))
        remaining = [entry for entry in entries or () if _class_or_value(entry) not in names]
        if isinstance(entries, list) and len(remaining) < len(entries):
            options.append(f"{key}={json.dumps(remaining)}")
    return options


def _readable(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if equals and name == "--config":
        return f"{name}={_loadable(find_config(value))}"
    if not equals or _option(arg) not in PARTS:
        return arg
    key = name[2:].removesuffix("+")
    if fitting_classes(key, ()) and value.endswith(".py") and Path(value).is_file():  # the parser would read it
        raise UserError(unknown_class(key, value, ""))
    try:
        _check_names(key, load_yaml(value, get_loader("yaml")))
    except NoValueError as error:
        raise UserError(f"{name[2:]} = {value:.60}: {error}; give another one") from None
    except yaml.YAMLError:
        pass  # the parser takes it as text
    return f"{name}={_logger(value) if name.removesuffix('+') == '--trainer.loggers' else _yaml(value)}"


def _loadable(config: Path) -> Path:
    """Refuses the config of a run that a program has made of objects that no config can name."""
    with suppress(yaml.YAMLError):  # the parser names the mistake
        _check_names(f"config = {config}", settings_in(config), settings=True)
    unnamed = only_python(settings_in(config)) if ONLY_PYTHON.search(config.read_text(encoding="utf-8")) else {}
    for key, text in unnamed.items():
        raise UserError(
            f"config = {config}: {key} = {text:.80}: made by a program, and a config cannot; run the program, or name "
            "a class of a module"
        )
    return config


def _check_names(where: str, value: Any, settings: bool = False) -> None:
    """Refuses a name of a setting that is no text, as in ``{3: 4}``; a mapping that is a value may have such keys."""
    for entry in value if isinstance(value, list) else ():
        _check_names(where, entry)
    for key, inner in value.items() if isinstance(value, dict) else ():
        named = settings or "class_path" in value
        ensure(
            isinstance(key, str) or not named, f"{where}: {key} = {inner!s:.60}: no name of a setting; give its name"
        )
        _check_names(where, inner, named and key in ("trainer", "init_args"))


def _logger(value: str) -> str:
    """Returns the class of a logger that is named by its program, as in tensorboard; other values as YAML."""
    programs = {name.casefold().removesuffix("logger"): name for name in fitting_classes("trainer.loggers", ())}
    return programs.get(value.casefold(), _yaml(value))


def _yaml(value: str) -> str:
    """Writes None, and dicts, lists and tuples of Python, as YAML; returns other values as they are."""
    if value != "None" and value[:1] not in ("{", "[", "("):
        return value
    try:
        return json.dumps(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError):
        return value  # it is YAML already


SUFFIX = ".yaml"


def configs_folder() -> Path:
    """Returns the folder of the configs: in a clone next to the package, in an installed wheel inside it."""
    package = Path(__file__).parents[2]
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """Returns the names of all configs, sorted; a name is a path below the folder without suffix."""
    folder = configs_folder()
    return sorted(path.relative_to(folder).as_posix()[: -len(SUFFIX)] for path in folder.rglob(f"*{SUFFIX}"))


def find_config(name: str, key: str = "config") -> Path:
    """Returns the file of a config.

    Args:
        name: A path, or the name of a config of the package.
        key: What it is given for, for the message.

    Raises:
        UserError: If there is neither.
    """
    ensure(key != "config" or not name.endswith(".ckpt"), f"{key} = {name}: a checkpoint; give it as --ckpt_path")
    if Path(name).is_file():
        return Path(name)
    # a path of a clone works from an installed wheel, too
    short, names = name.removeprefix("configs/").removesuffix(SUFFIX), config_names()
    if short in names:
        return configs_folder() / f"{short}{SUFFIX}"
    ensure(not Path(name).is_dir(), f"{key} = {name}: a folder; give a config of it, such as config.yaml")
    matches = [known for known in names if known.endswith(f"/{short.rpartition('/')[2]}")]
    near = matches or similar(short, names, cutoff=0.5)
    hint = f"did you mean {', '.join(near[:4])}?" if near else "`fl-lightning configs` lists the names"
    raise UserError(f"{key} = {name}: no such file or config; {hint}")
