"""MLflow."""

import os
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.results.configs import flatten
from fl_lightning.trainer.loggers.base import About, FigureLogger, Picture, needs, pixels
from fl_lightning.trainer.runtime.console import quiet

LIMIT, LENGTH = 100, 500
"""Settings that MLflow takes at once, and characters of one."""


class MLFlowLogger(FigureLogger):
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

    experiment: Any = None

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
        self.run_id = ""

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        from mlflow import MlflowClient

        super().start(run_dir, state, round, about)
        own = run_dir.resolve()
        with quiet("mlflow"):  # it tells of each table that it makes
            self.experiment = client = MlflowClient(self.tracking_uri or f"sqlite:///{own / 'mlflow.db'}")
        self.run_id, self._done = state.get("run_id", ""), 0
        if self.run_id:
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

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        if state:
            self.start(run_dir, state, round, about)

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
            now = int(1000 * time())
            self.experiment.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        self.experiment.log_image(self.run_id, pixels(picture), f"figures/{name}_round_{round}.png")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Marks the run as finished or failed."""
        if self.experiment is not None:
            self.experiment.set_terminated(self.run_id, "FINISHED" if status == "success" else "FAILED")
            self.experiment = None
