"""The configs of runs, compared."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import UserError, load_yaml

EXECUTION = (
    "name", "default_root_dir", "engine", "client_block", "compile", "accelerator", "strategy", "devices",
    "num_nodes", "threads", "client_memory", "loggers", "callbacks", "enable_progress_bar",
)  # fmt: skip
"""Settings of the trainer that change how a run is executed, and not its results."""


LENGTH = ("max_rounds", "max_time")
"""Settings of the trainer that extend a run."""


def config_files(folder: Path) -> dict[int, Path]:
    """Config files of a run, by the round after which each counts.

    They are that of the first start, and ``config_round_<n>.yaml`` of each resume that changed a setting. The last one
    is that of the run as it is now.

    Args:
        folder: The run folder.
    """
    named = ((re.fullmatch(r"config(?:_round_(\d+))?\.yaml", path.name), path) for path in folder.glob("config*.yaml"))
    return dict(sorted((int(match[1] or 0), path) for match, path in named if match))


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config file of a run.

    Raises:
        UserError: If it is not readable.
    """
    try:
        found = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: not readable ({what:.120}); put the run's own file back") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: no mapping of settings; put the run's own file back")
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns every setting in which two configs differ, as ``key: old -> new``."""
    old, new = flatten(before), flatten(after)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}" for key in keys]


def differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Returns the settings in which two resolved configs differ, as ``key = saved value (here: value)``.

    Keys are written as on the command line, without init_args. Of parts of different classes only these are named.
    Settings that only one config has, and those of the trainer that change no result, do not count.

    Args:
        saved: A run's config.
        here: Another one.
    """
    return [
        f"{key} = {_short(one)} (here: {_short(other)})"
        for key, one, other in _differing("", saved, here)
        if key.removeprefix("trainer.") not in EXECUTION
    ]


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a config as short text, by key as on the command line, without init_args.

    A part of a class is its name under the key of the part, and its settings below.
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if not isinstance(value, dict) or not value:
            found[key] = ", ".join(map(_short, value)) if isinstance(value, list) else _short(value)
            continue
        if "class_path" in value:
            found[key] = _short(value)
            value = value.get("init_args") or {}
        found |= {f"{key}.{below}": text for below, text in flatten(value).items()}
    return found


def group_key(config: dict[str, Any]) -> str:
    """The text that runs share whose configs differ in nothing but their seeds and their execution.

    Args:
        config: A resolved config.
    """
    parts = {name: dict(config[name]) for name in ("model", "data", "trainer") if isinstance(config.get(name), dict)}
    for name, init_args in ((name, part.get("init_args")) for name, part in parts.items()):
        if init_args:
            parts[name]["init_args"] = {key: value for key, value in init_args.items() if key != "seed"}
    trainer = parts.get("trainer", {})
    parts["trainer"] = {key: value for key, value in trainer.items() if key not in (*EXECUTION, "seed")}
    return json.dumps(parts, sort_keys=True, default=str)


def run_key(folder: Path) -> str:
    """The `group_key` of a run's last config; with those before it, if the run was resumed with other settings.

    Settings that only extend a run do not count there.

    Raises:
        UserError: If a config is missing or not readable.
    """
    configs = {round: read_config(path) for round, path in config_files(folder).items()}
    if not configs:
        raise UserError(f"{folder}: no config.yaml")
    keys = {round: group_key(_without(config, LENGTH)) for round, config in configs.items()}
    if len(set(keys.values())) == 1:
        return group_key(list(configs.values())[-1])
    return json.dumps(keys)


def _without(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {**config, "trainer": {key: value for key, value in config["trainer"].items() if key not in names}}


def group_id(config: dict[str, Any]) -> str:
    """Six hexadecimal digits of the `group_key`."""
    return hashlib.sha256(group_key(config).encode()).hexdigest()[:6]


def _differing(key: str, one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    if not (isinstance(one, dict) and isinstance(other, dict)) or one.get("class_path") != other.get("class_path"):
        return [] if one == other else [(key, one, other)]
    one, other = ({**part, **(part.get("init_args") or {})} for part in (one, other))
    shared = [name for name in one if name in other and name not in ("class_path", "init_args")]
    return [found for name in shared for found in _differing(f"{key}.{name}".lstrip("."), one[name], other[name])]


def _short(value: Any) -> str:
    text = str(value.get("class_path", value) if isinstance(value, dict) else value).removeprefix("fl_lightning.")
    return text if len(text) <= 60 else f"{text[:60]}…"
