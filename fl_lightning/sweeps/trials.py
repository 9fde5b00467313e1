"""Stand-in for the trials of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError


@dataclass(frozen=True)
class Trial:
    """One run to make."""

    name: str
    args: tuple[str, ...]
    command: str = "fit"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    folder: Path | None = None
    error: str | None = None


def run_trials(
    trials: Sequence[Trial], folder: Path, build: Callable[[Trial, Path], Any], jobs: int = 1
) -> Iterator[Outcome]:
    """Trains trials, and yields each when it has ended."""
    for trial in trials:
        if found := outcome(trial, folder):
            yield found
            continue
        made = build(trial, folder)
        try:
            getattr(made.trainer, trial.command)(made.model, made.data)
        except UserError as error:
            yield Outcome(trial, None, str(error))
        else:
            yield Outcome(trial, made.trainer.run.folder.path)


def outcome(trial: Trial, folder: Path) -> Outcome | None:
    """What became of a trial, as far as its folder tells; None if it has not ended."""
    runs = sorted((folder / trial.name).glob("version_*/summary.json"))
    return Outcome(trial, runs[-1].parent) if runs else None
