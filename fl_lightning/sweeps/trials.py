"""Stand-in for the trials of a sweep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    name: str
    args: tuple[str, ...]
    command: str = "fit"


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    folder: Path | None
    error: str | None


def run_trials(trials: Sequence[Trial], folder: Path, jobs: int = 1) -> list[Outcome]:
    found = []
    for trial in trials:
        runs = sorted((folder / trial.name).glob("version_*"))
        if not runs or not (runs[-1] / "summary.json").exists():
            more = [f"--trainer.default_root_dir={folder}", f"--trainer.name={trial.name}"]
            done = subprocess.run(
                [sys.executable, "-m", "fl_lightning", trial.command, *trial.args, *more],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                found.append(Outcome(trial, None, done.stderr.strip().splitlines()[-1]))
                continue
            runs = sorted((folder / trial.name).glob("version_*"))
        found.append(Outcome(trial, runs[-1], None))
    return found
