"""The base class of loggers that write to the run folder and survive a resumption."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only


class RunLogger(Logger):
    """A logger that starts with the run, in its folder, and continues when the run is resumed."""

    dir: Path | None = None

    def start(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        """Begins to log.

        Args:
            run_dir: The run's folder, which exists.
            state: The `state_dict` from the checkpoint, empty in a new run.
            round: Number of rounds already done: later ones in the log are dropped.
        """
        self.dir = run_dir

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to continue the same log."""
        return {}

    def log_rows(self, name: str, rows: Sequence[Mapping[str, float]], round: int) -> None:
        """Logs a table, such as a spectrum; rank 0 calls."""

    def log_figure(self, name: str, path: Path, round: int) -> None:
        """Logs a picture; rank 0 calls."""

    @property
    def name(self) -> str | None:
        """The logger's name."""
        return type(self).__name__

    @property
    def version(self) -> str | None:
        """The run folder's name."""
        return self.dir.name if self.dir else None

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the resolved config."""
