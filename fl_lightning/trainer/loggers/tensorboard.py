"""TensorBoard."""

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.results import NUMBER, flatten
from fl_lightning.trainer.loggers.base import About, FigureLogger, Picture, needs, pixels

METRICS = ("server/test/acc", "server/test/loss")
"""Columns of the page HPARAMS beside the settings."""


class TensorBoardLogger(FigureLogger):
    """TensorBoard's files in the run folder: ``tensorboard --logdir runs`` shows all runs, with the round as step.

    It gets every metric, the settings (page HPARAMS), histograms over the clients, and figures. If a run is resumed,
    TensorBoard forgets the rounds after the checkpoint.

    Attributes:
        experiment: The ``SummaryWriter``, from `start` to `finalize`: torch's, or that of tensorboardX.

    Raises:
        UserError: If neither tensorboard nor tensorboardX is installed.
    """

    publishes = False
    experiment: Any = None

    def __init__(self) -> None:
        needs("TensorBoardLogger", "tensorboard", "tensorboardX")

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        self._open(run_dir, purge_step=round + 1)  # of a new run, too: TensorBoard takes the first one for no restart

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        self._open(run_dir)

    def _open(self, run_dir: Path, purge_step: int | None = None) -> None:
        self.dir = run_dir
        self._package = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
        suffix = f".{time.time_ns()}"  # tensorboardX would replace a file of the same second
        self.experiment = import_module(self._package).SummaryWriter(
            str(run_dir), purge_step=purge_step, filename_suffix=suffix
        )

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the settings of the resolved config."""
        texts = flatten(params)  # TensorBoard sorts and draws numbers
        settings = {name: float(text) if NUMBER.fullmatch(text) else text for name, text in texts.items()}
        hparams = import_module(f"{self._package}.summary").hparams
        for summary in hparams(settings, dict.fromkeys(METRICS, 0.0)):
            self.experiment._get_file_writer().add_summary(summary)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:  # type: ignore[override]
        """Logs the metrics of round ``step``."""
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)

    def log_clients(self, name: str, values: Sequence[float], round: int) -> None:
        finite = np.asarray(values, float)[np.isfinite(values)]
        if finite.size:
            self.experiment.add_histogram(f"{name}_clients", finite, round)

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        self.experiment.add_image(name, pixels(picture), round, dataformats="HWC")

    def flush(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the file."""
        if self.experiment is not None:
            self.experiment.close()
            self.experiment = None
