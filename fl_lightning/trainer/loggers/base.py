"""The base class of loggers that write to the run folder and survive a resumption."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import Checked, Figure, ensure, render, style
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.histogram import class_counts, heat_map, histogram

TAKEN_BACK = 100
"""Most rounds that an error takes back: those that run as one program."""
Picture = Path | Callable[[], Figure]
"""A file, or a function that draws: loggers without pictures do not call it."""


def needs(logger: str, *packages: str) -> None:
    """Refuses a logger if none of the packages that it can use is installed."""
    ensure(any(map(find_spec, packages)), f"trainer.loggers = {logger}: needs {packages[0]}; pip install {packages[0]}")


def pixels(picture: Picture) -> np.ndarray:
    """Returns a picture as bytes ``(height, width, 4)``."""
    from PIL import Image

    with style():
        (file,) = [picture.read_bytes()] if isinstance(picture, Path) else render(picture(), png={})
    return np.asarray(Image.open(BytesIO(file)).convert("RGBA"))


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

    dir: Path | None = None
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
        return self.dir.name if self.dir else None

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
