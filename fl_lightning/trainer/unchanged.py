"""Whether a run is resumed as it was: a digest of all that may change a bit of its sums."""

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn

import fl_lightning
from fl_lightning.core import Checked
from fl_lightning.engine import EngineName
from fl_lightning.trainer.run import Run

LEFT_OUT = ("accelerator", "strategy", "devices", "num_nodes", "engine", "callbacks", "loggers")
"""Settings of which the digest has what became of them, and those whose objects change during a run."""


def digest(run: Run, engine: EngineName) -> str:
    """Returns a digest of settings, algorithm, data, versions and devices; what it cannot describe counts by its class.

    Args:
        run: The run.
        engine: Its engine; "auto" says less than the one that was chosen.
    """
    config = run.settings.config
    parts = [
        engine,
        _arguments(run.settings),
        dict(run.objective.hparams) | _arguments(run.objective),
        _arguments(run.data) | {"samples": run.data.fingerprint()},
        config and {**config, "trainer": {**config["trainer"], "engine": None}},
        [fl_lightning.__version__, str(torch.__version__), numpy.__version__],
        [run.fabric.device.type, run.fabric.world_size, torch.get_num_threads()],
    ]
    return hashlib.sha256(repr(_plain(parts)).encode()).hexdigest()


def _arguments(owner: object) -> dict[str, Any]:
    """Returns the attributes of an object that its constructors' parameters name."""
    names = {name for kind in type(owner).__mro__ if "__init__" in vars(kind) for name in _parameters(kind)}
    found = {name: getattr(owner, name) for name in names - {*LEFT_OUT} if hasattr(owner, name)}
    return {"class": type(owner).__qualname__, **found}


def _parameters(kind: type) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]


def _plain(value: Any) -> Any:
    """Returns a value as nested lists of numbers and text, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return sorted(([str(name), _plain(item)] for name, item in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, nn.Module):
        return [repr(value), _plain(_public(value, bool | int | float | str))]
    return [kind.__module__, kind.__qualname__, *([_plain(_public(value))] if isinstance(value, Checked) else [])]


def _public(value: object, kind: Any = object) -> dict[str, Any]:
    names = {name: item for name, item in vars(value).items() if not name.startswith("_")}
    return {name: item for name, item in names.items() if isinstance(item, kind) and name != "training"}
