"""Run folders, found below other folders."""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fl_lightning.core import ensure
from fl_lightning.results.metrics import FILE


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """Returns the run folders among and below the given ones, each once.

    A run is a folder with a ``metrics.csv`` of at least one round; nothing is searched below it.

    Args:
        folders: Run folders, or folders above them.

    Returns:
        Absolute paths; those below one folder in the order of their names, numbers by value.

    Raises:
        UserError: If a folder does not exist, or holds no run.
    """
    found: dict[Path, None] = {}
    for given in folders:
        path = Path(given).resolve()
        ensure(path.is_dir(), f"runs = {given}: no such folder; give the folders of runs, or a folder above them")
        below = sorted(
            _below(path), key=lambda folder: [_number(part) for part in re.split(r"(\d+(?:\.\d+)?)", str(folder))]
        )
        ensure(bool(below), f"runs = {given}: no run there, that is no {FILE} with a round; give another folder")
        found |= dict.fromkeys(below)
    return list(found)


def _below(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        if FILE in files:
            names.clear()
            with (Path(folder) / FILE).open("rb") as file:
                if len(list(islice(file, 2))) == 2:
                    yield Path(folder)


def _number(part: str) -> float | str:
    return float(part) if part[:1].isdigit() else part
