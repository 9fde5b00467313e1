"""Trackio."""

import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.results.configs import flatten
from fl_lightning.trainer.loggers.base import About, FigureLogger, Picture, needs, pixels


class TrackioLogger(FigureLogger):
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

    experiment: Any = None

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
        resume = "allow" if state else "never"
        with redirect_stdout(None):
            context_vars.current_run.set(None)  # otherwise trackio ends the run that logs beside this one
            self.experiment = trackio.init(self.project, self._name, about.group, resume=resume, embed=False)
            context_vars.current_run.set(None)
        self._done = self.experiment._next_step - 1

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        if state:
            self.start(run_dir, state, round, about)

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

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Logs what is pending, and ends the run."""
        if self.experiment is not None:
            with redirect_stdout(None):
                if self._pending:
                    self.experiment.log(self._pending, max(self._done, 0))
                self.experiment.finish()
            self.experiment = None
