"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from fl_lightning.core import UserError
from fl_lightning.trainer.loggers.base import RunLogger

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run as WandbRun


class WandbLogger(LightningWandbLogger, RunLogger):
    """Lightning's ``WandbLogger`` in the run's folder, with the round as x-axis; a resumed run keeps its id.

    Args:
        project: W&B project.
        group: Group within it.
        tags: Tags.
        name: Name of the run; by default its folder's.
        mode: offline (upload later by ``wandb sync``; needs no account), online, or disabled; null: the environment
            variable WANDB_MODE, else offline.
        entity: W&B user or team.
    """

    def __init__(
        self,
        project: str = "fl_lightning",
        group: str | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        mode: Literal["offline", "online", "disabled"] | None = None,
        entity: str | None = None,
    ) -> None:
        super().__init__(project=project, name=name)
        self.project, self.group, self.tags = project, group, tags
        self.run_name, self.entity = name, entity
        self.mode = mode or os.environ.get("WANDB_MODE", "offline")
        self.run: WandbRun | None = None

    @property
    def experiment(self) -> Any:
        """The W&B run, from `start` to `finalize`."""
        return self.run

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int) -> None:
        RunLogger.start(self, run_dir, state, round)
        import wandb

        try:
            self.run = wandb.init(
                project=self.project,
                entity=self.entity,
                group=self.group,
                tags=self.tags,
                name=self.run_name or f"{run_dir.parent.name}/{run_dir.name}",
                id=state.get("id"),
                resume="allow",
                mode=self.mode,  # type: ignore[arg-type]
                reinit="create_new",  # parallel runs log side by side
                dir=run_dir,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"trainer.loggers: WandbLogger.mode = {self.mode}: {' '.join(str(error).split())[:120]}; "
                "run `wandb login`, or use mode: offline"
            ) from None
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.run.id} if self.run else {}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs the metrics of round ``step``."""
        if self.run:
            self.run.log({"round": step, **metrics})

    def log_rows(self, name: str, rows: Sequence[Mapping[str, float]], round: int) -> None:
        if self.run and rows:
            import wandb

            table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            self.log_metrics({name: table}, round)  # type: ignore[dict-item]

    def log_figure(self, name: str, path: Path, round: int) -> None:
        if self.run:
            import wandb

            self.log_metrics({name: wandb.Image(str(path))}, round)  # type: ignore[dict-item]

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the resolved config."""
        if self.run:
            self.run.config.update(params, allow_val_change=True)  # type: ignore[no-untyped-call]

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the W&B run."""
        if self.run:
            self.run.finish(exit_code=0 if status == "success" else 1)
            self.run = None
