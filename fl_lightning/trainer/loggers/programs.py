"""Loggers of other programs: MLflow, TensorBoard, trackio."""

import math
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core import UserError
from fl_lightning.results import NUMBER, flatten
from fl_lightning.trainer.loggers.base import About, FigureLogger, Picture, needs, pixels
from fl_lightning.trainer.runtime.console import quiet


class ProgramLogger(FigureLogger):
    """A logger that keeps what its program has opened while the run lasts."""

    experiment: Any = None

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        if state:
            self.start(run_dir, state, round, about)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.experiment is not None:
            self.end(status)
            self.experiment = None

    @abstractmethod
    def end(self, status: str) -> None:
        """Closes what is open."""


LIMIT, LENGTH = 100, 500
"""Settings that MLflow takes at once, and characters of one."""


class MLFlowLogger(ProgramLogger):
    """A run of MLflow, with the round as step: every metric, the settings, and figures as artifacts.

    A resumed run keeps its id and its settings, which MLflow does not change; rounds that it has are not logged again.

    Args:
        experiment_name: MLflow's experiment.
        run_name: Name of the run; by default its folder's.
        tracking_uri: Where MLflow keeps its runs; null: MLFLOW_TRACKING_URI, else ``mlflow.db`` in the run folder.
        tags: Tags beside the algorithm and the data set.

    Attributes:
        experiment: The ``MlflowClient``, from `start` to `finalize`.
        run_id: MLflow's id of the run.

    Raises:
        UserError: If mlflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "fl_lightning",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        needs("MLFlowLogger", "mlflow")
        self.experiment_name, self.run_name, self.tags = experiment_name, run_name, tags
        self.tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.publishes = self.tracking_uri is not None
        self.run_id, self._trains = "", True

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        self._trains = False  # the run's status stays as it is
        super().reopen(run_dir, state, round, about)

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._open(run_dir, state, round, about)
        except MlflowException as error:
            where = self.tracking_uri or "mlflow.db in the run folder"
            reason = f"{error}".partition("\n")[0]
            raise UserError(f"trainer.loggers = MLFlowLogger: tracking_uri = {where}: {reason}") from None

    def _open(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        from mlflow import MlflowClient

        super().start(run_dir, state, round, about)
        own = run_dir.resolve()
        with quiet("mlflow"):  # it tells of each table that it makes
            self.experiment = client = MlflowClient(self.tracking_uri or f"sqlite:///{own / 'mlflow.db'}")
        self.run_id, self._done = state.get("run_id", ""), 0
        if self.run_id:
            if self._trains:
                client.update_run(self.run_id, status="RUNNING")
            self._done = max((each.step for each in client.get_metric_history(self.run_id, "time/round_s")), default=0)
            return
        found = client.get_experiment_by_name(self.experiment_name)
        artifacts = None if self.tracking_uri else (own / "mlartifacts").as_uri()
        id = found.experiment_id if found else client.create_experiment(self.experiment_name, artifacts)
        tags = {
            "model": about.tags[0],
            "data": about.tags[1],
            "group": about.group,
            "job": about.job,
            **(self.tags or {}),
        }
        name = self.run_name or f"{run_dir.parent.name}/{run_dir.name}"
        self.run_id = client.create_run(id, tags=tags, run_name=name).info.run_id

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the settings of the resolved config, in a new run."""
        from mlflow.entities import Param

        settings = [] if self._done else [Param(name, text[:LENGTH]) for name, text in flatten(params).items()]
        for i in range(0, len(settings), LIMIT):
            self.experiment.log_batch(self.run_id, params=settings[i : i + LIMIT])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:  # type: ignore[override]
        """Logs the metrics of round ``step``."""
        from mlflow.entities import Metric

        if step > self._done:
            now = int(1000 * time.time())
            self.experiment.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        self.experiment.log_image(self.run_id, pixels(picture), f"figures/{name}_round_{round}.png")

    def end(self, status: str) -> None:
        """Marks the run as finished or failed, if it was training."""
        if self._trains:
            self.experiment.set_terminated(self.run_id, "FINISHED" if status == "success" else "FAILED")
        self._trains = True


METRICS = ("server/test/acc", "server/test/loss")
"""Columns of the page HPARAMS beside the settings."""


class TensorBoardLogger(ProgramLogger):
    """TensorBoard's files in the run folder: ``tensorboard --logdir runs`` shows all runs, with the round as step.

    It gets every metric, the settings (page HPARAMS), histograms over the clients, and figures. If a run is resumed,
    TensorBoard forgets the rounds after the checkpoint.

    Attributes:
        experiment: The ``SummaryWriter``, from `start` to `finalize`: torch's, or that of tensorboardX.

    Raises:
        UserError: If neither tensorboard nor tensorboardX is installed.
    """

    publishes = False

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

    def end(self, status: str) -> None:
        """Closes the file."""
        self.experiment.close()


class TrackioLogger(ProgramLogger):
    """A run of trackio, with the round as step: every metric, the settings, histograms over the clients, and figures.

    A resumed run keeps its name; rounds that it has are not logged again. Trackio's runs lie in one folder for all
    projects, ``TRACKIO_DIR``, which its dashboard shows: ``trackio show``.

    Args:
        project: Trackio's project.
        name: Name of the run; by default its folder's, with four digits that make it unique.

    Attributes:
        experiment: Trackio's run, from `start` to `finalize`.

    Raises:
        UserError: If trackio is not installed.
    """

    def __init__(self, project: str = "fl_lightning", name: str | None = None) -> None:
        needs("TrackioLogger", "trackio")
        self.project, self.run_name = project, name

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        import trackio
        from trackio import context_vars

        super().start(run_dir, state, round, about)
        self._name = state.get("name") or self.run_name or f"{run_dir.parent.name}/{run_dir.name} {uuid4().hex[:4]}"
        self._pending: dict[str, Any] = {}
        with redirect_stdout(None):
            context_vars.current_run.set(None)  # otherwise trackio ends the run that logs beside this one
            self.experiment = trackio.init(
                self.project, self._name, about.group, resume="allow" if state else "never", embed=False
            )
            context_vars.current_run.set(None)
        self._done = self.experiment._next_step - 1

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the settings of the resolved config."""
        self.experiment.config.update(flatten(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:  # type: ignore[override]
        """Logs the metrics of round ``step``, and what was logged since the last round."""
        if step > self._done:
            self.experiment.log({**self._pending, **metrics}, step)
        self._pending, self._done = {}, max(step, self._done)

    def log_clients(self, name: str, values: Sequence[float], round: int) -> None:
        from trackio import Histogram

        self._pending[f"{name}_clients"] = Histogram([*filter(math.isfinite, values)])

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        from trackio import Image

        self._pending[name] = Image(pixels(picture))

    def end(self, status: str) -> None:
        """Logs what is pending, and ends the run."""
        with redirect_stdout(None):
            if self._pending:
                self.experiment.log(self._pending, max(self._done, 0))
            self.experiment.finish()
