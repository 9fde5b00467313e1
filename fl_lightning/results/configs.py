"""Configs: their YAML, read with care, and the settings of runs, compared."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import UserError, earlier, ensure, folded, hidden

EXECUTION = (
    "name", "default_root_dir", "engine", "client_block", "compile", "accelerator", "strategy", "devices",
    "num_nodes", "threads", "client_memory", "loggers", "callbacks", "enable_progress_bar",
)  # fmt: skip
"""Settings of the trainer that change how a run is executed, and not its results."""


ONLY_PYTHON = re.compile(r"\((?:[^()]*, )?id [0-9a-f]{6}\)|\b__main__\.|<locals>")
"""A pattern of settings that no config can make: what a description of `core.made` has, and classes of a script."""
SINCE = {"absent": "kept", "state": "reset", "warmup": 0, "rho0": 0.001, "eps": 1e-12}
"""Settings that classes got after the ledger's first rows, and the defaults that these have; of others it is null."""
LENGTH = ("max_rounds", "max_time")
"""Settings of the trainer that extend a run."""


def is_private(config: Mapping[str, Any]) -> bool:
    """Returns whether a run of this config protects its clients: by ``trainer.privacy`` with a secret key."""
    privacy = config.get("trainer", {}).get("privacy")
    return privacy is not None and privacy.get("init_args", {}).get("noise_seed") is None


def config_files(folder: Path) -> dict[int, Path]:
    """Returns the config files of a run, by the round after which each counts.

    The first start writes ``config.yaml``, and each resume that changes a setting writes ``config_round_<n>.yaml``. The
    last file holds the present config.

    Args:
        folder: The run folder.
    """
    files = ((re.fullmatch(r"config(?:_round_(\d+))?\.yaml", path.name), path) for path in folder.glob("config*.yaml"))
    return dict(sorted((int(match[1] or 0), path) for match, path in files if match))


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config file of a run, without secrets, which earlier versions have kept.

    Raises:
        UserError: If it is not readable.
    """
    try:
        config = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not readable ({folded(reason):.120}); put the run's own file back") from None
    ensure(isinstance(config, dict), f"{path}: no mapping of settings; put the run's own file back")
    return dict(config)


def config_of(folder: Path) -> dict[str, Any]:
    """Returns the present config of a run, see `read_config`; an empty one of a run without a config."""
    files = [*config_files(folder).values()]
    return read_config(files[-1]) if files else {}


@lru_cache(1000)
def _parsed(text: str) -> Any:
    """Returns what a config says, without secrets. A table reads the config of each of its runs several times."""
    config = load_yaml(text)
    json.dumps(config, sort_keys=True, default=str)  # keys that are no text, as those of `group_key` are
    return hidden(config)


def setting_of(config: Mapping[str, Any], key: str) -> Any:
    """Returns a value of a config by its key on the command line; None if it has no such key."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping):
            return None
        settings = value.get("init_args")
        value = (settings if isinstance(settings, Mapping) and name in settings else value).get(name)
    return value


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns every setting in which two configs differ, as ``key: old -> new``."""
    old, new = flatten(before), flatten(after)
    keys = different([old, new])
    return [f"{key}: {_shown(old.get(key, 'not set'))} -> {_shown(new.get(key, 'not set'))}" for key in keys]


COMPOSED = ("model.ascent", "model.server_update", "model.averaging", "model.parts")
"""Settings that make another method of an algorithm: FedAvg with SAM clients is FedSAM, which has no such setting."""


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns the settings in which two resolved configs differ, as ``key = saved value (here: value)``.

    Keys are written as on the command line, without init_args. Where a part has different classes, only these are
    named. Settings that only one config has, and those of the trainer that change no result, do not count.

    Args:
        saved: A run's config.
        here: Another one.
    """
    old, new = flatten(saved), flatten(here)
    keys = different([old, new])
    kept = [key for key in keys if not any(key.startswith(f"{part}.") for part in keys) and not is_execution(key)]
    return [f"{key} = {_shown(old[key])} (here: {_shown(new[key])})" for key in kept if key in old and key in new]


def settings_of(folder: Path) -> dict[str, str]:
    """Returns the present settings of a run, see `flatten`; none of a run without a config.

    Raises:
        UserError: If its config is not readable.
    """
    return flatten(config_of(folder))


def telling(configs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the settings that tell configs apart, by a short name: the end of the key, long enough to be unique.

    These are the settings that all of them have and in which they differ, what `COMPOSED` adds to some of them, and of
    the others those that are needed: a radius that only one of two algorithms has adds nothing to their names. Seeds
    and execution do not count.

    Args:
        configs: Settings of each config, as `flatten` returns them.

    Returns:
        The keys by short name; none if they do not tell all configs apart.
    """
    candidates = varying(configs)
    composed = [key for key in COMPOSED if any(config.get(key, "null") != "null" for config in configs)]
    chosen = [key for key in candidates if key in composed or all(key in config for config in configs)]

    def kinds(keys: Sequence[str]) -> int:
        return len({tuple(config.get(key) for key in keys) for config in configs})

    for key in candidates:
        if key not in chosen and kinds([*chosen, key]) > kinds(chosen):
            chosen.append(key)
    return short_names(chosen) if kinds(chosen) == len(configs) else {}


def varying(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys of the settings in which configs differ, without seeds and execution."""
    seeds = ("trainer.seed", "data.seed")
    return [key for key in different(configs) if not (is_execution(key) or key in seeds)]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns keys by a short name: the end of the key, long enough to be unique, or else the key."""
    ends = {key: [".".join(key.split(".")[-n:]) for n in range(1, key.count(".") + 2)] for key in keys}
    return {
        next((e for e in names if sum(e in rivals for rivals in ends.values()) == 1), k): k for k, names in ends.items()
    }


def find_setting(keys: Sequence[str], name: str, option: str) -> str:
    """Returns the key with a name, which is the key or its end.

    Raises:
        UserError: If there is none, or more than one.
    """
    matches = [key for key in keys if key == name] or [key for key in keys if key.endswith(f".{name}")]
    problem = "the end of several settings" if matches else "no setting that varies in these runs"
    ensure(len(matches) == 1, f"{option} = {name}: {problem}; choose from {', '.join(matches or short_names(keys))}")
    return matches[0]


def different(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys of the settings that are not the same in all configs, as `flatten` returns them."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def is_execution(key: str) -> bool:
    """Returns whether a key as on the command line is that of a setting in `EXECUTION`."""
    part, _, name = key.partition(".")
    return part == "trainer" and name.split(".")[0] in EXECUTION


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a config as text, by key as on the command line, without init_args.

    For a part with a class, the name of the class stands under the key of the part, and its settings stand below it.
    For a list, its entries stand under its key, and the settings of entries with a class stand below it, by the name of
    the class, such as Compress, or Compress_2 for the second one of the class.
    """
    settings: dict[str, str] = {}
    for key, value in config.items():
        nested: Any = value
        if isinstance(value, list):
            parts = [entry for entry in value if isinstance(entry, dict)]
            classes = [str(part.get("class_path", index)).rpartition(".")[2] for index, part in enumerate(parts)]
            names = [f"{kind}_{n + 1}" if n else kind for kind, n in zip(classes, earlier(classes), strict=True)]
            nested = dict(zip(names, parts, strict=True))
        elif isinstance(value, dict) and "class_path" in value:
            nested = value.get("init_args")
        if nested is not value or not isinstance(value, dict) or not value:
            settings[key] = ", ".join(map(_name, value)) if isinstance(value, list) else _name(value)
        if isinstance(nested, dict):
            settings |= {f"{key}.{name}": text for name, text in flatten(nested).items()}
    return settings


def only_python(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a config, as `flatten` does, that only the program which has made the run can make."""
    return {key: text for key, text in flatten(config).items() if ONLY_PYTHON.search(text)}


def group_key(config: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """Returns the text that runs share whose configs differ in nothing but their seeds and their execution.

    Args:
        config: A resolved config, without secrets.
        without: Further settings of the trainer that may differ.
    """
    parts = {name: dict(config[name]) for name in ("model", "data", "trainer") if isinstance(config.get(name), dict)}
    for part in parts.values():
        if part.get("init_args"):
            part["init_args"] = {key: value for key, value in part["init_args"].items() if key != "seed"}
    trainer, left_out = parts.get("trainer", {}), (*EXECUTION, "seed", *without)
    parts["trainer"] = {key: value for key, value in trainer.items() if key not in left_out}
    return json.dumps(parts, sort_keys=True, default=str)


def run_key(folder: Path) -> str:
    """Returns the `group_key` of a run's last config; with earlier ones, if the run was resumed with other settings.

    Settings that only extend a run do not count there.

    Args:
        folder: The run folder, with a config.

    Raises:
        UserError: If a config is not readable.
    """
    configs = {round: without_defaults(read_config(path)) for round, path in config_files(folder).items()}
    keys = {round: group_key(config, LENGTH) for round, config in configs.items()}
    return group_key(list(configs.values())[-1]) if len(set(keys.values())) == 1 else json.dumps(keys)


def without_defaults(value: Any) -> Any:
    """Returns a config without the settings at a default that earlier configs lack: null, or that of `SINCE`."""
    if isinstance(value, dict):
        return {key: without_defaults(setting) for key, setting in value.items() if setting != SINCE.get(key)}
    return list(map(without_defaults, value)) if isinstance(value, list) else value


def group_id(config: dict[str, Any]) -> str:
    """Returns six hexadecimal digits of the `group_key`'s hash."""
    return hashlib.sha256(group_key(hidden(config)).encode()).hexdigest()[:6]


def _shown(text: str) -> str:
    return folded(text, 60) or "empty"  # a list without entries, or a text


def _name(value: Any) -> str:
    return str(value.get("class_path", value) if isinstance(value, dict) else value).removeprefix("fl_lightning.")


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
                _ensure(all(anchor != ancestor.anchor for ancestor in stack), f"{line}: *{anchor} stands within itself")
                size = sizes.get(anchor, 1)
            case yaml.ScalarEvent():
                size, key = 1, event.value
            case _:
                continue
        parent = stack[-1]
        if parent.keys is not None and parent.children % 2 == 0 and key not in (None, "<<"):
            _ensure(key not in parent.keys, f"{line}: {key} is there twice; give it once")
            parent.keys.add(key)
        parent.children, parent.size = parent.children + 1, parent.size + size
        _ensure(parent.size <= SIZE, f"{line}: unfolds to more than {SIZE:,} values")


def _ensure(ok: bool, problem: str) -> None:
    if not ok:
        raise yaml.YAMLError(problem)
