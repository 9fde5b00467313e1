"""What a leg has found, in a small JSON file: an item is done once, and written at once."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Item = Callable[[], dict[str, Any]]
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "batched": {"engine": "batched"},
    "graphed": {"engine": "graphed"},
    "compiled": {"engine": "graphed", "compile": True},
}
"""Settings of the trainer."""


class Task(NamedTuple):
    """What a leg works on.

    Attributes:
        module: The leg's module; its ``items(task)`` returns functions by name, in order of value.
        device: cuda or cpu.
        end: The time (`time.monotonic`, which all processes of a machine share) after which no item begins.
        out: The file of results; what else is kept lies beside it.
        fit: Arguments for ``fl-lightning fit``.
    """

    module: str
    device: str
    end: float
    out: Path
    fit: list[str]


class Results:
    """A small JSON file of what legs have found so far, by machine, leg and item.

    Args:
        path: The file.
        leg: The leg.

    Attributes:
        content: All of the file.
        found: The leg's part of it on this machine, once it has begun.
        failed: Items of this call that ended in an error, or whose check failed, now or in an earlier call.
    """

    def __init__(self, path: Path, leg: str) -> None:
        self.path, self.leg = path, leg
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def begin(self, machine: dict[str, str], names: Sequence[str], only: str = "") -> list[str]:
        """Returns the items to do whose name has the pattern ``only``, those that failed before at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._here = self.content.setdefault(machine_name(machine), {"machine": machine})
        self.found = self._here.setdefault(self.leg, {})
        self._names = names
        self._write()
        todo = [name for name in names if re.search(only, name) and not is_done(self.found.get(name))]
        return sorted(todo, key=lambda name: is_failure(self.found.get(name, {})))

    def add(self, name: str, value: dict[str, Any], log: str = "") -> None:
        """Writes what an item has found, and at which commit; ``log`` is kept in a file of its own."""
        at = os.environ.get("COMMIT")
        self.found[name] = {**value, **({"commit": at} if at else {})}
        self._write()
        if log:
            with self.path.with_suffix(".log").open("a") as file:
                file.write(f"== {self.leg}: {name}: {value.get('error')}\n{log}\n")
        numbers = {key: v for key, v in value.items() if isinstance(v, (int, float)) or key == "error"}
        line = ", ".join(f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}" for key, v in numbers.items())
        print(f"{name}: {line}", flush=True)

    def text(self) -> str:
        """What was not reached."""
        missing = self._here[f"{self.leg}: not reached"]
        return f"{self.leg}: {len(self.found)} items in {self.path}; not reached: {', '.join(missing) or 'none'}"

    def _write(self) -> None:
        self.failed = [n for n in self._names if is_failure(self.found.get(n, {}))]
        missing = [name for name in self._names if not is_done(self.found.get(name))]
        self._here[f"{self.leg}: not reached"] = missing
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self.path)


def is_done(value: dict[str, Any] | None) -> bool:
    """Whether an item has ended, and was right; one that says that it is not whole goes on."""
    return value is not None and not is_failure(value) and value.get("whole", True)


def is_failure(value: dict[str, Any]) -> bool:
    return "error" in value or value.get("ok") is False


def machine(device: str) -> dict[str, str]:
    """What the numbers belong to."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "kind": device,
        "device": name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def machine_name(machine: dict[str, str]) -> str:
    """What tells machines apart in a file of results."""
    return f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"


def wait(device: str) -> None:
    """Returns when the device has done its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def accelerator(device: str) -> str:
    """Fabric's name of a device."""
    return "gpu" if device == "cuda" else "cpu"
