"""Files of the run folder that say where a run comes from: ``provenance.json``, ``partition.json``."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

import fl_lightning
from fl_lightning.core import (
    ensure,
    hidden_text,
    hidden_words,
    json_text,
    leaves,
    processor,
    read_json,
    write_atomically,
)
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.histogram import histogram
from fl_lightning.results.metrics import DIRECTIONS, Mode, mode_of

FILE, PARTITION = "provenance.json", "partition.json"
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "numpy", "jsonargparse")
MOST_CHANGES = 200_000
"""Characters of uncommitted changes that are kept."""
MOST_FILES = 50
"""Files unknown to git that are named."""
MOST_CLIENTS = 1000
"""Clients whose classes are counted."""
STDLIB = Path(os.__file__).parent
GIT_SECONDS = 5.0
"""Longest time of one call of git."""


def write(folder: Path, round: int, device: torch.device, processes: int, **execution: str | None) -> None:
    """Adds the start of a run to its ``provenance.json``; only rank 0 calls this.

    A start holds date, round, command line, versions and machine. If git knows the working folder or the package, the
    start also holds its commit and uncommitted changes; changes that several starts share are kept once. Environment
    variables, names of host and user, and what looks like a secret are not kept.

    Args:
        folder: The run folder, which exists.
        round: Rounds done.
        device: The device.
        processes: Number of processes.
        **execution: Engine, precision, name of the config's file, and whether a config or a program has made the run.

    Raises:
        UserError: If the file of a resumed run is damaged.
    """
    path = folder / FILE
    content = read_json(path, {"starts": list[dict[str, Any]], "changes": dict[str, str]}, _signed([], {}))
    starts, changes = content["starts"], content["changes"]
    ensure(
        content == _signed(starts, changes),
        f"{path}: not as the run has written it; restore it, or remove it to go on without",
    )
    codes = {"working folder": _code(Path.cwd()), "package": package()}
    changes |= {state["changes"]: hidden_text(state["diff"]) for state in codes.values() if state and state["changes"]}
    code = {place: state and {key: v for key, v in state.items() if key != "diff"} for place, state in codes.items()}
    starts.append(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": round,
            "command": command_line(),
            "versions": versions(),
            "machine": {  # nothing that names the host
                "system": f"{platform.system()} {platform.machine()}",
                "cpu": processor(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "processes": processes,
            },
            **execution,
            "code": code,
        }
    )
    write_atomically(path, json_text(_signed(starts, changes), indent=1))


def _signed(starts: Any, changes: Any) -> dict[str, Any]:
    """Returns the content of ``provenance.json``, with its checksum: damage of the disk is found on resume."""
    content = {"starts": starts, "changes": changes}
    return {**content, "crc32": crc32(json.dumps(content).encode())}


@cache
def package() -> dict[str, Any] | None:
    """Returns the code of this package as the first run of the process found it: later changes are not imported."""
    file = Path(fl_lightning.__file__)
    # an environment may lie in the clone of something else
    return _code(file.parent, ".") if _git(file.parent, "ls-files", file.name) else None


def write_partition(folder: Path, data: FederatedDataModule) -> None:
    """Writes ``partition.json``: samples by client and class, of the first `MOST_CLIENTS` clients.

    Only rank 0 calls this. A class that a client has no sample of is left out. Data without classes are counted by the
    groups of `histogram`, and the file names these groups.

    Args:
        folder: The run folder, which exists.
        data: The data, after setup.
    """
    partition = histogram(data, MOST_CLIENTS)
    counts = [{int(group): int(row[group]) for group in row.nonzero()[0]} for row in partition.counts]
    groups = {} if data.task.by_class else {"unit": partition.unit, "names": partition.names}
    text = json_text({"clients": data.num_clients, "classes": len(partition.names), "counts": counts, **groups})
    write_atomically(folder / PARTITION, text)


def write_directions(folder: Path, directions: Mapping[str, Mode]) -> None:
    """Writes ``directions.json`` for the metrics whose names do not say their direction; only rank 0 calls this.

    Args:
        folder: The run folder, which exists.
        directions: Whether large or small values are good, by the metric's name.
    """
    unnamed = {name: mode for name, mode in directions.items() if mode != mode_of(f"server/test/{name}")}
    if unnamed:
        write_atomically(folder / DIRECTIONS, json_text(unnamed))


def digest_of_files(config: Any) -> str:
    """Returns a hash of the code that the process has loaded, and of the files that settings name.

    The code is this package, and all modules that are neither installed nor Python's. A program without a file, such as
    a notebook, may be any: its hash never occurs again.

    Args:
        config: The settings, as plain values.
    """
    main = sys.modules["__main__"]
    sources = {*Path(fl_lightning.__file__).parent.rglob("*.py")}
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix and STDLIB not in path.parents and not {"site-packages", "dist-packages"} & {*path.parts}:
            sources.add(path)
    named_files = {Path(text) for text in map(str, leaves(config)) if os.path.isfile(text)}
    digest = sha256() if hasattr(main, "__file__") else sha256(os.urandom(32))
    for path in [*sorted(sources), *sorted(named_files)]:
        with suppress(OSError), path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def command_line() -> str:
    """Returns the command of this process as typed into a shell, with the program's name only, and without secrets."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return f"{name} {shlex.join(hidden_words(sys.argv[1:]))}".strip()


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of the packages that its numbers depend on."""
    return {
        "python": platform.python_version(),
        "fl_lightning": fl_lightning.__version__,
        **{package: version(package) for package in PACKAGES},
        **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
    }


def _code(folder: Path, paths: str = ":/") -> dict[str, Any] | None:
    """Returns commit, difference to it, and files that git does not know; None outside a clone with a commit.

    Args:
        folder: A folder of the clone.
        paths: What the difference is of, as git names it from there; by default the whole clone.
    """
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return None
    names = _git(folder, "ls-files", "--others", "--exclude-standard", "--directory").splitlines()
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--", paths)
    diff = diff[:MOST_CHANGES] + f"\n... cut after {MOST_CHANGES:,} characters\n" * (len(diff) > MOST_CHANGES)
    more = [f"... and {len(names) - MOST_FILES:,} more"] if len(names) > MOST_FILES else []
    changes = sha256(diff.encode()).hexdigest()[:12] if diff else None
    return {"commit": commit, "diff": diff, "unknown_files": names[:MOST_FILES] + more, "changes": changes}


def _git(folder: Path, *args: str) -> str:
    """Returns the output of git in a folder; nothing if it fails or takes too long."""
    command, quiet = ["git", "-C", str(folder), *args], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=quiet, text=True, errors="replace",
            timeout=GIT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""
