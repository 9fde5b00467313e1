"""Loggers of a run: CSV always, Weights & Biases if asked; one x-axis, ``round``."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.core.errors import UserError

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run as WandbRun


class RunLogger(Logger):
    """A logger that is told its run folder when the run starts, and its state when a run is resumed."""

    def __init__(self) -> None:
        self.dir: Path | None = None

    def start(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        """Begin to log.

        Args:
            run_dir: The run's folder, which exists.
            state: The `state_dict` from the checkpoint, empty in a new run.
            round: Number of rounds already done: later ones that stand in the log are dropped.
        """
        self.dir = run_dir

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same log."""
        return {}

    def log_table(self, name: str, rows: Sequence[Mapping[str, float]], round: int) -> None:
        """Record what is no single number, such as a spectrum; rank 0 calls."""

    def log_image(self, name: str, path: Path, round: int) -> None:
        """Record a picture; rank 0 calls."""

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
        """Record the resolved config."""


class CSVLogger(RunLogger):
    """``metrics.csv`` in the run folder: a row a round, a column a metric, empty where nothing was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[str] = ["round"]

    @property
    def path(self) -> Path:
        """The file."""
        assert self.dir is not None, "start the logger first"
        return self.dir / "metrics.csv"

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        super().start(run_dir, state, round)
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
        """Append the row of round ``step``."""
        if new := [key for key in metrics if key not in self.columns]:
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({"round": step, **metrics})

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


class WandbLogger(RunLogger):
    """A Weights & Biases run; offline unless asked, which needs no account.

    Args:
        project: W&B project.
        group: Group within it.
        tags: Tags.
        name: Name of the run; by default its folder's.
        mode: offline (upload later by ``wandb sync``), online, or disabled.
        entity: W&B user or team.
    """

    def __init__(
        self,
        project: str = "fl_lightning",
        group: str | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        mode: Literal["offline", "online", "disabled"] = "offline",
        entity: str | None = None,
    ) -> None:
        super().__init__()
        self.project, self.group, self.tags = project, group, tags
        self.run_name, self.mode, self.entity = name, mode, entity
        self.experiment: WandbRun | None = None

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        super().start(run_dir, state, round)
        import wandb

        try:
            self.experiment = self._init(wandb, run_dir, state.get("id"))
        except wandb.errors.Error as error:
            raise UserError(
                f"trainer.loggers: WandbLogger.mode = {self.mode}: {' '.join(str(error).split())[:120]}; "
                "run `wandb login`, or use mode: offline"
            ) from None
        self.experiment.define_metric("round")
        self.experiment.define_metric("*", step_metric="round")

    def _init(self, wandb: Any, run_dir: Path, run_id: str | None) -> WandbRun:
        run: WandbRun = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            name=self.run_name or f"{run_dir.parent.name}/{run_dir.name}",
            id=run_id,
            resume="allow",
            mode=self.mode,
            reinit="create_new",  # the runs of a group log side by side
            dir=run_dir,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return run

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.experiment.id} if self.experiment else {}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics of round ``step``."""
        if self.experiment:
            self.experiment.log({"round": step, **metrics})

    def log_table(self, name: str, rows: Sequence[Mapping[str, float]], round: int) -> None:
        if self.experiment and rows:
            import wandb

            table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            self.experiment.log({"round": round, name: table})

    def log_image(self, name: str, path: Path, round: int) -> None:
        if self.experiment:
            import wandb

            self.experiment.log({"round": round, name: wandb.Image(str(path))})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if self.experiment:
            self.experiment.config.update(params, allow_val_change=True)  # type: ignore[no-untyped-call]

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the run."""
        if self.experiment:
            self.experiment.finish(exit_code=0 if status == "success" else 1)
            self.experiment = None
