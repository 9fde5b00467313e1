"""The files that rounds of a run write line by line beside its log; each line begins with its round."""

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

from fl_lightning.core import ensure, write_atomically, writing
from fl_lightning.results import clients

FILES = ("flatness.jsonl", clients.FILE, "events.csv")
"""Those of which a checkpoint keeps checksums."""
ROUND = re.compile(rb'(?:\{"round": )?(\d+),')


def append_rows(path: Path, head: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Appends rows to a CSV file, after the head if it is new.

    Raises:
        UserError: If it cannot be written.
    """
    with writing(path), path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([*([] if file.tell() else [head]), *rows])


def drop_later_rounds(path: Path, rounds: int) -> None:
    """Removes later rounds, and a line that a crash has cut short; the file may be missing."""
    if path.exists():
        write_atomically(path, b"".join(_lines(path, rounds)))


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
    now = checksums(folder, rounds)
    for name, known in saved.items():
        problem = "a line is not as the run has written it" if name in now else "missing"
        ensure(
            now.get(name) in (known, 0),
            f"{folder / name}: {problem}; restore the file, or give an empty one to go on without its lines",
        )


def _checksum(path: Path, rounds: int) -> int:
    with path.open("r+b") as file:
        os.fsync(file.fileno())  # a checkpoint never knows of more lines than the file
    checksum = 0
    for line in _lines(path, rounds):
        checksum = crc32(line.rstrip(b"\r\n"), checksum)
    return checksum


def _lines(path: Path, rounds: int) -> Iterator[bytes]:
    """Yields the lines up to a round, and those without one, as the head."""
    for line in path.read_bytes().splitlines(keepends=True):
        match = ROUND.match(line)
        if line.endswith(b"\n") and (match is None or int(match[1]) <= rounds):  # else a crash has cut it short
            yield line
