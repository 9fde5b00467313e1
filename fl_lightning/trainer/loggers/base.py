"""The log that every run has, and the base class of loggers that survive a resumption."""

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import Checked, Figure, UserError, ensure, render, style, write_atomically, writing
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.histogram import class_counts, heat_map, histogram
from fl_lightning.results.metrics import FILE, read_rows

TAKEN_BACK = 100
"""Most rounds that an error takes back: those that run as one program."""
Picture = Path | Callable[[], Figure]
"""A file, or a function that draws: loggers without pictures do not call it."""


def pixels(picture: Picture) -> np.ndarray:
    """Returns a picture as bytes ``(height, width, 4)``."""
    from PIL import Image

    with style():
        (file,) = [picture.read_bytes()] if isinstance(picture, Path) else render(picture(), png={})
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGBA"))


@dataclass(frozen=True)
class About:
    """Properties by which loggers sort runs.

    Attributes:
        job: The command that makes the run: fit or centralized.
        group: Common to the runs of a config with different seeds.
        tags: The algorithm and the data set.
        eval_last: ``trainer.eval_last`` of the run.
        private: Whether the run is one under ``trainer.privacy``.
    """

    job: str
    group: str
    tags: Sequence[str]
    eval_last: int
    private: bool = False


class RunLogger(Checked, Logger, key="trainer.loggers: {}"):
    """A logger that starts with the run, in its folder, and continues when the run is resumed."""

    dir = Path()
    """The run's folder, once the logger has started."""
    publishes = True
    """Whether others than the run folder's owner may see what is logged: of private runs, it gets what is protected."""

    def check(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        """Checks the log of a run that is resumed, before anything is written; rank 0 calls. Arguments as for `start`.

        Raises:
            UserError: If it is damaged.
        """

    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        """Begins to log.

        Args:
            run_dir: The run's folder, which exists.
            state: The `state_dict` from the checkpoint, empty in a new run.
            round: Number of rounds already done: later ones in the log are dropped.
            about: What the run is.
        """
        self.dir = run_dir

    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        """Begins to add pictures to the log of a run that is only looked at; arguments as for `start`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to continue the same log."""
        return {}

    def flush(self) -> None:
        """Writes to disk what a checkpoint of this round must find there; rank 0 calls."""

    def log_partition(self, data: FederatedDataModule) -> None:
        """Logs how the samples are divided among the clients, when a run begins; rank 0 calls."""

    def log_clients(self, name: str, values: Sequence[float], round: int) -> None:
        """Logs the distribution of a number over clients; rank 0 calls."""

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        """Logs a picture; rank 0 calls."""

    @property
    def name(self) -> str | None:
        """The logger's name."""
        return type(self).__name__

    @property
    def version(self) -> str | None:
        """The run folder's name."""
        return self.dir.name or None

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the resolved config."""


class FigureLogger(RunLogger):
    """A logger that shows figures: how the samples are divided is one of them."""

    def log_partition(self, data: FederatedDataModule) -> None:
        counts = class_counts(data)
        self.log_figure("partition/heat_map", lambda: heat_map(histogram(data)), 0)
        self.log_clients("partition/samples", counts.sum(1).tolist(), 0)
        if data.task.by_class:
            self.log_clients("partition/classes", (counts > 0).sum(1).tolist(), 0)


class CSVLogger(RunLogger):
    """``metrics.csv`` in the run folder: a row a round, a column a metric, empty where nothing was measured.

    Attributes:
        path: The file, once the logger has started.
    """

    path: Path
    publishes = False

    def __init__(self) -> None:
        self.columns: list[str] = ["round"]
        self.checksums: dict[int, int] = {}
        """Checksums of the rows up to the last round, and up to those before that an error may take back."""

    def check(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        _rows(run_dir / FILE, state, round)

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        super().start(run_dir, state, round, about)
        self.path = run_dir / FILE
        columns, rows = _rows(self.path, state, round) if round else (["round"], [])
        self._rewrite(columns, rows)
        self.checksums = {round: _checksum(rows)}

    def state_dict(self) -> dict[str, Any]:
        return {"columns": self.columns, "checksums": {**self.checksums}}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:  # type: ignore[override]
        """Appends the row of round ``step``."""
        new_row = {name: str(value) for name, value in {"round": step, **metrics}.items()}
        with writing(self.path):
            if new_columns := [key for key in metrics if key not in self.columns]:
                head, *rows = read_rows(self.path)
                self._rewrite([*self.columns, *new_columns], [dict(zip(head, row, strict=True)) for row in rows])
            # it must exist, and no link is followed that somebody has put there
            with open(self.path, "r+", newline="", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW)) as file:
                file.seek(0, os.SEEK_END)
                csv.writer(file).writerow([new_row.get(name, "") for name in self.columns])
        last = next(reversed(self.checksums))
        self.checksums[last + 1] = _checksum([new_row], self.checksums[last])
        if len(self.checksums) > TAKEN_BACK + 1:
            del self.checksums[next(iter(self.checksums))]

    def flush(self) -> None:
        with writing(self.path), self.path.open("r+b") as file:
            os.fsync(file.fileno())

    def _rewrite(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()  # a name stays as it is, also one that a spreadsheet would take for a formula
        csv.writer(text).writerows([columns, *([row.get(name, "") for name in columns] for row in rows)])
        write_atomically(self.path, text.getvalue())
        self.columns = columns


def _checksum(rows: Iterable[Mapping[str, str]], checksum: int = 0) -> int:
    """Returns the CRC-32 of the numbers in rows, in any order of the columns, after that of the rows before."""
    for row in rows:
        checksum = crc32("".join(f"{name}={row[name]}\n" for name in sorted(row) if row[name]).encode(), checksum)
    return checksum


def _rows(path: Path, state: Mapping[str, Any], rounds: int) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the columns of a log, and its rows of the first rounds, of which each has one; later rows are left out.

    Args:
        path: The file. If it holds the word ``round`` alone, the rows are empty.
        state: The logger's state in the checkpoint: the columns that it must have, and the checksum of the rows.
        rounds: Number of rounds.

    Raises:
        UserError: If it is missing, or its rows are not as they were written.
    """
    columns = state.get("columns", [])
    remedy = "put the run's own file back, or one that holds only the word round, to continue without its rows"
    try:
        head, *lines = read_rows(path) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({reason}); {remedy}") from None
    if head == ["round"] and not lines:
        return columns or head, [{"round": str(k + 1)} for k in range(rounds)]
    rows = [dict(zip(head, line, strict=False)) for line in lines[:rounds]]
    ensure(
        {*columns} <= {*head}
        and len({*head}) == len(head)
        and len(rows) == rounds
        and state.get("checksums", {}).get(rounds) == _checksum(rows),
        f"{path}: its rows of {rounds} rounds are not those that the run has written; {remedy}",
    )
    return head, rows
