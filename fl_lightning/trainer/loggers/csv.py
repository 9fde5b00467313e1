"""The log that every run has."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import write_atomically
from fl_lightning.trainer.loggers.base import About, RunLogger


class CSVLogger(RunLogger):
    """``metrics.csv`` in the run folder: a row a round, a column a metric, empty where nothing was measured."""

    def __init__(self) -> None:
        self.columns: list[str] = ["round"]

    @property
    def path(self) -> Path:
        """The file."""
        assert self.dir is not None, "start the logger first"
        return self.dir / "metrics.csv"

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        super().start(run_dir, state, round, about)
        self.columns, rows = ["round"], []
        if self.path.exists():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                # a crash may have cut the last row short
                rows = [row for row in reader if None not in row.values() and int(row["round"]) <= round]
                self.columns = list(reader.fieldnames or self.columns)
        self._rewrite(rows)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends the row of round ``step``."""
        if new := [key for key in metrics if key not in self.columns]:
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({"round": step, **metrics})

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue())
