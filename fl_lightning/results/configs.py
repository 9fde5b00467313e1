"""The configs of runs, compared."""

import hashlib
import json
from typing import Any

EXECUTION = (
    "name", "default_root_dir", "engine", "client_block", "compile", "accelerator", "strategy", "devices",
    "num_nodes", "threads", "client_memory", "loggers", "callbacks", "enable_progress_bar",
)  # fmt: skip
"""Settings of the trainer that change how a run is executed, and not its results."""


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


def flatten(config: dict[str, Any]) -> dict[str, str]:
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
