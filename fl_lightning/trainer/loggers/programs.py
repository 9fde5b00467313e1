"""The logs of TensorBoard and of Weights & Biases."""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.core import FROZEN, UserError, ensure, folded
from fl_lightning.data import FederatedDataModule
from fl_lightning.results import (
    NUMBER,
    SUFFIX,
    Series,
    average,
    best_of,
    config_files,
    flatten,
    is_protected,
    is_result,
    mode_of,
    read_directions,
    read_run,
    values,
)
from fl_lightning.trainer.loggers.base import About, FigureLogger, Picture, RunLogger, pixels

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
        ensure(
            any(map(find_spec, ("tensorboard", "tensorboardX"))),
            "trainer.loggers = TensorBoardLogger: needs tensorboard; pip install tensorboard",
        )

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


Mode = Literal["offline", "online", "disabled"]


class WandbLogger(LightningWandbLogger, FigureLogger):
    """Lightning's ``WandbLogger`` in the run's folder, with the round as x-axis; a resumed run keeps its id.

    W&B gets every metric; the best value of each in the summary, ``.max`` of accuracy and mIoU, ``.min`` of losses and
    lambda_max, beside the ``.last`` one; the headline as ``server/test/acc_headline``, fit for the metric of a sweep
    (see `fl_lightning.results.summary`); the resolved config; the partition as heat map and histograms;
    histograms over the clients; spectra, landscapes and curves as images, also those of ``fl-lightning flatness`` and
    ``landscape``; config and checkpoints as artifacts.

    Without the package wandb the run says so, and trains without this logger, unless a mode asks for it.

    Args:
        project: W&B project; null: WANDB_PROJECT, else fl_lightning.
        group: Group within it; null: WANDB_RUN_GROUP, else algorithm, data set and a number of the config, which runs
            share that differ in their seeds only.
        tags: Tags beside the algorithm and the data set; null: WANDB_TAGS.
        name: Name of the run; by default its folder's.
        mode: offline (upload later by ``wandb sync``; needs no account), online, or disabled; null: the environment
            variable WANDB_MODE, else offline; online for an agent of a sweep.
        entity: W&B user or team.
        log_model: Whether the run's checkpoints become an artifact when it ends: ``model-<id>``, with the aliases
            ``last`` and ``best``; null: unless it is private, since they hold the key of its noise.

    Attributes:
        experiment: The W&B run, from `start` to `finalize`.

    Raises:
        UserError: If a mode is given, and wandb is not installed.
    """

    experiment: Any = None

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        mode: Mode | None = None,
        entity: str | None = None,
        log_model: bool | None = None,
    ) -> None:
        project = project or os.environ.get("WANDB_PROJECT") or "fl_lightning"
        spec = find_spec("wandb")
        self.installed = spec is not None and spec.origin is not None  # a folder of W&B's runs has none
        ensure(self.installed or mode is None, f"WandbLogger.mode = {mode}: wandb is missing; run pip install wandb")
        if self.installed:
            super().__init__(project=project, name=name)
        self.project, self.group, self.tags = project, group, tags
        self.run_name, self.entity, self.log_model = name, entity, log_model
        # an agent of a sweep on W&B waits for the run
        self.mode = (
            mode or os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_SWEEP_ID") else "offline")
        )

    @rank_zero_only
    def start(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        self._open(run_dir, state, round, about)
        columns = read_run(run_dir).items()
        self._training = True
        self._columns = {name: pairs for name, pairs in columns if not about.private or is_protected(name)}

    @rank_zero_only
    def reopen(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        if state:
            self._open(run_dir, state, round, about)

    def _open(self, run_dir: Path, state: Mapping[str, Any], round: int, about: About) -> None:
        RunLogger.start(self, run_dir, state, round, about)
        self._about, self._round, self._training = about, round, False
        self._pending, self._defined = dict[str, Any](), set[str]()
        self._directions = read_directions(run_dir)
        if not self.installed:
            rank_zero_warn("WandbLogger: wandb is not installed, so W&B gets nothing; run pip install wandb")
            return
        import wandb

        tags = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
        try:
            self.experiment = wandb.init(
                project=self.project,
                entity=self.entity,
                group=self.group or os.environ.get("WANDB_RUN_GROUP") or about.group,
                tags=list(dict.fromkeys([*about.tags, *(self.tags or tags)])),
                job_type=about.job,
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
                f"trainer.loggers: WandbLogger.mode = {self.mode}: {folded(error):.120}; "
                "run `wandb login`, or use mode: offline"
            ) from None
        self.experiment.define_metric("round")
        self.experiment.define_metric("*", step_metric="round")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.experiment.id} if self.experiment else {}

    # What is logged

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:  # type: ignore[override]
        """Logs the metrics of round ``step``, and what was logged since the last round."""
        if not self.experiment:
            return
        self._round = step
        row = {"round": step, **self._pending, **metrics}
        self._pending = {}
        for name, value in metrics.items():
            if name not in self._defined and is_result(name):  # W&B keeps the best value of it, too
                self._defined.add(name)
                summary = f"{mode_of(name, None, self._directions)},last"
                self.experiment.define_metric(name, step_metric="round", summary=summary)
            self._columns.setdefault(name, Series()).append(step, value)
            if name.startswith("server/test/") and not name.endswith("/loss"):
                row[f"{name}{SUFFIX}"] = average(values(name, self._columns[name], step, self._about.eval_last))
        self.experiment.log(row)

    def log_partition(self, data: FederatedDataModule) -> None:
        if self.experiment and self.mode != "disabled":
            super().log_partition(data)
            self._flush(0)

    def log_clients(self, name: str, values: Sequence[float], round: int) -> None:
        finite = [value for value in values if math.isfinite(value)]
        if self.experiment and finite:
            import wandb

            bins = np.histogram(finite, bins=min(len(finite), 32))
            self._pending[f"{name}_clients"] = wandb.Histogram(np_histogram=bins)

    def log_figure(self, name: str, picture: Picture, round: int) -> None:
        if self.experiment and self.mode != "disabled":
            import wandb

            self._pending[name] = wandb.Image(pixels(picture))

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Logs the resolved config."""
        if self.experiment:
            self.experiment.config.update(params, allow_val_change=True)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Logs the best values and the artifacts, and closes the W&B run."""
        if not self.experiment:
            return
        self._flush(self._round)
        if self._training:
            # of the whole run: W&B's own start over when a run is resumed
            for name in filter(is_result, self._columns):
                mode, pairs = mode_of(name, None, self._directions), self._columns[name]
                self.experiment.summary[name] = {mode: best_of(pairs, mode)[1], "last": pairs[-1][1]}
            if self.mode != "disabled":
                self._log_artifacts()
        self.experiment.finish(exit_code=0 if status == "success" else 1)
        self.experiment = None

    def _flush(self, round: int) -> None:
        """Logs what is pending in a row of its own."""
        if self._pending:
            self.experiment.log({"round": round, **self._pending})
            self._pending = {}

    def _log_artifacts(self) -> None:
        """Logs config and checkpoints, laid out as in the run folder."""
        config = list(config_files(self.dir).values())
        self._log_artifact("config", "last", config)
        wanted = not self._about.private if self.log_model is None else self.log_model
        for alias in ("best", "last") if wanted else ():  # W&B's own alias is that of the latest
            file = self.dir / "checkpoints" / f"{alias}.ckpt"
            if file.exists():
                self._log_artifact("model", alias, [*config, file, file.with_name(FROZEN)])

    def _log_artifact(self, kind: str, alias: str, files: Sequence[Path]) -> None:
        """Logs files of the run folder that exist, under second names, as later files take their place."""
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.experiment.id}", kind)
        for file in filter(Path.exists, files):
            name = file.relative_to(self.dir)
            kept = _kept(file, Path(self.experiment.dir).parent / "artifacts" / name)
            artifact.add_file(str(kept), str(name), policy="immutable", skip_cache=True)
        if artifact.manifest.entries:
            self.experiment.log_artifact(artifact, aliases=[alias])


def _kept(file: Path, to: Path) -> Path:
    """Returns a second name of a file; checkpoints, which are never rewritten, are not copied if possible."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.unlink(missing_ok=True)
    if file.suffix in (".ckpt", ".pt"):
        with suppress(OSError):  # the file system has no hard links
            to.hardlink_to(file)
            return to
    shutil.copyfile(file, to)
    return to
