"""Items of a leg: done once, written at once."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Item = Callable[[], dict[str, Any]]


class Results:
    """A small JSON file of what a leg has found so far, by device, leg and item.

    Args:
        path: The file.
        leg: The leg.
        device: Where it runs.
        seconds: After which no item begins.
    """

    def __init__(self, path: Path, leg: str, device: str, seconds: float) -> None:
        self.path, self.leg, self.device = path, leg, device
        self._end = time.monotonic() + seconds
        self._content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        here = self._content.setdefault(device, {})
        here["machine"] = machine(device)
        self.found: dict[str, Any] = here.setdefault(leg, {})

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()

    def fill(self, items: Mapping[str, Item]) -> bool:
        """Does what is not done yet; returns whether an item failed, in this call or a check of it."""
        todo = [name for name in items if not self.done(name)]
        for name in todo:
            if self.left <= 0:
                break
            started = time.perf_counter()
            try:
                value = items[name]()
            except Exception as error:  # the others go on
                value = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"}
            self.found[name] = {**value, "seconds": round(time.perf_counter() - started, 1)}
            self._write()
            print(f"{name}: {self._line(name)}", flush=True)
        self._content[self.device][f"{self.leg}: not reached"] = [name for name in items if not self.done(name)]
        self._write()
        return any("error" in self.found[n] or self.found[n].get("ok") is False for n in items if n in self.found)

    def done(self, name: str) -> bool:
        """Whether an item has ended without an error; one that says that it is not whole goes on."""
        found = self.found.get(name)
        return found is not None and "error" not in found and found.get("whole", True)

    def text(self) -> str:
        """What was not reached."""
        missing = self._content[self.device][f"{self.leg}: not reached"]
        return f"{self.leg}: {len(self.found)} items in {self.path}; not reached: {', '.join(missing) or 'none'}"

    def _line(self, name: str) -> str:
        return ", ".join(
            f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}" for key, v in self.found[name].items()
        )

    def _write(self) -> None:
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self._content, indent=1) + "\n")
        temporary.replace(self.path)


def machine(device: str) -> dict[str, str]:
    """What the numbers belong to."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def wait(device: str) -> None:
    """Returns when the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def accelerator(device: str) -> str:
    """Fabric's name of a device."""
    return "gpu" if device == "cuda" else "cpu"
