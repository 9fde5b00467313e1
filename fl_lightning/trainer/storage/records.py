"""The files that a run writes line by line beside its log, as a checkpoint knows them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from fl_lightning.core import ensure
from fl_lightning.results import clients

FILES = ("flatness.jsonl", clients.FILE, "events.csv")
ROUND = re.compile(rb'(?:\{"round": )?(\d+),')
"""How a line begins."""


def checksums(folder: Path, rounds: int) -> dict[str, int]:
    """Returns the checksum of each file of a run folder, up to a round: a round that breaks off leaves more lines."""
    return {name: _checksum(folder / name, rounds) for name in FILES if (folder / name).is_file()}


def check(folder: Path, rounds: int, saved: Mapping[str, int]) -> None:
    """Checks the files of a run that is resumed; one that was emptied is right.

    Args:
        folder: The run folder.
        rounds: Rounds done.
        saved: The checkpoint's `checksums`.

    Raises:
        UserError: If a line is not as it was written, or a file is missing.
    """
    found = checksums(folder, rounds)
    for name, known in saved.items():
        problem = "a line is not as the run has written it" if name in found else "missing"
        ensure(
            found.get(name) in (known, 0),
            f"{folder / name}: {problem}; restore the file, or give an empty one to go on without its lines",
        )


def _checksum(path: Path, rounds: int) -> int:
    found = 0
    with path.open("r+b") as file:
        os.fsync(file.fileno())  # a checkpoint never knows of more lines than the file
        for line in file:
            match = ROUND.match(line)
            if line.endswith(b"\n") and (match is None or int(match[1]) <= rounds):  # else a crash has cut it short
                found = crc32(line.rstrip(b"\r\n"), found)
    return found
