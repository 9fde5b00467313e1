"""What a run was made with: ``provenance.json``, and what its clients hold: ``partition.json``, in the run folder."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer
from typing import Any

import torch

import fl_lightning
from fl_lightning.core import UserError, write_atomically
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.counts import histogram
from fl_lightning.results.metrics import DIRECTIONS, Mode, mode_of

FILE, PARTITION = "provenance.json", "partition.json"
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "numpy", "jsonargparse")
MOST_CHANGES = 200_000
"""Characters of uncommitted changes that are kept."""
MOST_FILES = 50
"""Files unknown to git that are named."""
MOST_CLIENTS = 1000
"""Clients whose classes are counted."""
GIT_SECONDS = 5.0
"""Longest time of one call of git."""
SECRET = re.compile(r"(api|access|private)[-_]?key|token|secret|password|credential", re.IGNORECASE)
"""What an argument of the command line contains whose value is not kept."""


def write(folder: Path, round: int, device: torch.device, processes: int, **execution: str | None) -> None:
    """Adds the start of a run to its ``provenance.json``; rank 0 calls.

    A start holds date, round, command line, versions, machine, and for the working folder and the package the commit
    and the uncommitted changes, if git knows them. The same changes are kept once. Environment variables, names of host
    and user, and values of options that look like secrets are not kept.

    Args:
        folder: The run folder, which exists.
        round: Rounds done.
        device: The device.
        processes: Number of processes.
        **execution: Engine and precision.

    Raises:
        UserError: If the file of a resumed run is not readable.
    """
    path = folder / FILE
    starts: list[dict[str, Any]] = []
    changes: dict[str, str] = {}
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            starts, changes = kept["starts"], kept["changes"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not readable; restore it, or remove it to go on without") from None
    code: dict[str, dict[str, Any] | None] = {}
    for place, found in (("working folder", _code(Path.cwd())), ("package", package())):
        code[place] = found and {key: value for key, value in found.items() if key != "diff"}
        if found and found["changes"]:
            changes[found["changes"]] = found["diff"]
    starts.append(
        {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "round": round,
            "command": command_line(),
            "versions": versions(),
            "machine": {**_machine(device), "processes": processes},
            **execution,
            "code": code,
        }
    )
    write_atomically(path, json.dumps({"starts": starts, "changes": changes}, indent=1) + "\n")


@cache
def package() -> dict[str, Any] | None:
    """Returns the code of this package as the first run of the process found it: later changes are not imported."""
    file = Path(fl_lightning.__file__)
    known = _git(file.parent, "ls-files", file.name)  # an environment may lie in the clone of something else
    return _code(file.parent) if known else None


def write_partition(folder: Path, data: FederatedDataModule) -> None:
    """Writes ``partition.json``: samples by client and class, of the first `MOST_CLIENTS` clients; rank 0 calls.

    A class that a client has no sample of is left out. Where there are none, the groups of `histogram`, with their
    names, take their place.

    Args:
        folder: The run folder, which exists.
        data: The data, after setup.
    """
    found = histogram(data, MOST_CLIENTS)
    counts = [{int(group): int(row[group]) for group in row.nonzero()[0]} for row in found.counts]
    groups = {} if data.task.by_class else {"unit": found.unit, "names": found.names}
    text = json.dumps({"clients": data.num_clients, "classes": len(found.names), "counts": counts, **groups})
    write_atomically(folder / PARTITION, text + "\n")


def write_directions(folder: Path, directions: Mapping[str, Mode]) -> None:
    """Writes ``directions.json``, if the names of metrics do not tell all of them; rank 0 calls.

    Args:
        folder: The run folder, which exists.
        directions: Whether large or small values are good, by the metric's name.
    """
    untold = {name: mode for name, mode in directions.items() if mode != mode_of(f"server/test/{name}")}
    if untold:
        write_atomically(folder / DIRECTIONS, json.dumps(untold) + "\n")


def command_line() -> str:
    """The command of this process as typed into a shell, with the program's name only, and without secrets."""
    program, kept, hidden = Path(sys.argv[0]), list[str](), False
    for arg in sys.argv[1:]:
        name, equals, _ = arg.partition("=")
        secret = bool(SECRET.search(arg))
        kept.append("***" if hidden else f"{name}=***" if secret and equals else arg)
        hidden = secret and not equals and arg.startswith("-")
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return f"{name} {shlex.join(kept)}".strip()


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that its numbers depend on."""
    found = {"python": platform.python_version(), "fl_lightning": fl_lightning.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # noqa: PERF203  one may be vendored
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _machine(device: torch.device) -> dict[str, Any]:
    """Processor, device and threads; nothing that names the host."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _cpu() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def _code(folder: Path) -> dict[str, Any] | None:
    """Commit, difference to it and its name, and files that git does not know; None outside a clone with a commit."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return None
    names = _git(folder, "ls-files", "--others", "--exclude-standard", "--directory").splitlines()
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", limit=MOST_CHANGES + 1)
    if len(diff) > MOST_CHANGES:
        diff = f"{diff[:MOST_CHANGES]}\n... cut after {MOST_CHANGES:,} characters\n"
    more = [f"... and {len(names) - MOST_FILES:,} more"] if len(names) > MOST_FILES else []
    changes = sha256(diff.encode()).hexdigest()[:12] if diff else None
    return {"commit": commit, "diff": diff, "unknown_files": names[:MOST_FILES] + more, "changes": changes}


def _git(folder: Path, *args: str, limit: int = 1 << 20) -> str:
    """The output of git in a folder, at most ``limit`` characters; nothing if it fails or takes too long."""
    command = ["git", "-C", str(folder), *args]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=quiet, text=True,
            errors="replace",
        )  # fmt: skip
    except OSError:
        return ""
    timer = Timer(GIT_SECONDS, child.kill)
    timer.start()
    with child:
        assert child.stdout is not None
        text = child.stdout.read(limit)
        done = len(text) < limit
        if not done:
            child.kill()
    timer.cancel()
    return text if not done or child.returncode == 0 else ""
