"""What the commands on checkpoints share: labels, folders, a progress bar, and the writing of landscapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric import Fabric
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ensure
from fl_lightning.flatness import Batches, Values
from fl_lightning.results.metrics import write_table
from fl_lightning.trainer import checkpoint, collectives
from fl_lightning.trainer.measurements import PROTOCOL, MeasurementContext
from fl_lightning.trainer.measurements.base import Split
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

V = TypeVar("V", bound=Values)
Step = Callable[[int, int, str], None]
"""Called with the number done, the total, and a description of what comes next."""


@contextmanager
def progress_bar(fabric: Fabric) -> Iterator[Step]:
    """A progress bar on the first process."""
    if not fabric.is_global_zero:
        yield lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def output_folder(run: Run, out: str | None, name: str) -> Path:
    """The folder for a command's files: ``out``, by default ``name`` in the run folder of the checkpoint."""
    assert run.checkpoint is not None
    return run.checkpoint.parent.parent / name if out is None else Path(out)


def label_of(path: Path | None, taken: Sequence[str] = ()) -> str:
    """A run's name and version, from its checkpoint's path; numbered if it is already ``taken``."""
    assert path is not None
    run = path.resolve().parent.parent
    label = f"{run.parent.name}/{run.name}" if path.parent.name == RunFolder.CHECKPOINTS else path.stem
    n = sum(other == label or other.startswith(f"{label} (") for other in taken)
    return f"{label} ({n + 1})" if n else label


def weights_of(run: Run, ckpt_path: str) -> tuple[Path, Tensor]:
    """The path of another checkpoint, and its global model, ``(d,)``.

    Raises:
        UserError: If there is no such checkpoint, or it is of another net.
    """
    path = RunFolder.find_checkpoint(ckpt_path, run.settings.default_root_dir, run.name)
    flat, saved = run.objective.flat, checkpoint.load(path)["state_dict"]
    for name, shape in zip(flat.names, flat.shapes, strict=True):
        ensure(
            f"net.{name}" in saved and saved[f"net.{name}"].shape == shape,
            f"{path}: its '{name}' does not fit model.net; compare checkpoints of the same net",
        )
    return path, torch.cat([saved[f"net.{name}"].reshape(-1) for name in flat.names]).to(run.server.w)


def check_no_buffers(model: LocalObjective) -> None:
    """Checks that the net keeps no running statistics.

    Raises:
        UserError: If it does.
    """
    ensure(
        model.net_buffers is None,
        f"model.net = {type(model.net).__name__} keeps buffers, and a landscape would need statistics at every "
        "point; take a net without, such as one with GroupNorm",
    )


@dataclass
class Study:
    """Models and data of a landscape, and the files it writes.

    Attributes:
        run: A loaded run.
        folder: Folder for the files.
        models: Flat weights by label; the checkpoint's first.
        sets: This process's share of each data set, by name.
        about: The protocol.
        step: Reports progress.
    """

    run: Run
    folder: Path
    models: dict[str, Tensor]
    sets: dict[str, Batches]
    about: dict[str, Any]
    step: Step

    @classmethod
    @contextmanager
    def of(
        cls, run: Run, folder: Path, models: dict[str, Tensor], splits: Sequence[Split], samples: int | None
    ) -> Iterator[Study]:
        """A study with a progress bar; prints its protocol and folder at the end.

        Args:
            run: A loaded run.
            folder: Folder for the files.
            models: Flat weights by label.
            splits: The data.
            samples: Size of the stratified sample of the training data; None: all.
        """
        context = MeasurementContext.between_rounds(run)
        shares = {str(split): context.train(samples, split) for split in splits}
        about: dict[str, Any] = {name: f"{what}, {n:,} samples" for name, (_, n, what) in shares.items()}
        about |= {"seed": run.seed, "round": run.rounds_done}
        with progress_bar(run.fabric) as step:
            yield cls(run, folder, models, {name: batches for name, (batches, _, _) in shares.items()}, about, step)
        run.fabric.print(f"measured with: {PROTOCOL}; {', '.join(f'{k} {v}' for k, v in about.items())}")
        run.fabric.print(f"results: {folder}")

    def options(self, label: str, **protocol: Any) -> dict[str, Any]:
        """Common arguments of the functions of `fl_lightning.flatness.landscape`."""
        return {
            "model": self.run.objective.net,
            "loss": self.run.objective.evaluation_loss,
            "data": self.sets,
            "reduce": partial(collectives.all_reduce_sum, self.run.fabric),
            "progress": lambda done, total: self.step(done, total, label),
            "protocol": {**self.about, **protocol},
        }

    def each(self, measure: Callable[[str, Tensor], V]) -> dict[str, V]:
        """A measurement of every model, up to the first that is interrupted."""
        found: dict[str, V] = {}
        for label, w in self.models.items():
            if not any(result.missing for result in found.values()):
                found[label] = measure(label, w)
        return found

    def save(self, name: str, results: Mapping[str, Values], **figures: Callable[[], Figure]) -> None:
        """Writes results and figures.

        Args:
            name: The files' name.
            results: The results by label.
            **figures: Draw the figures, by the files' names.

        Raises:
            KeyboardInterrupt: If a result is incomplete because of one.
        """
        from fl_lightning.core.figures import save_figure

        if self.run.fabric.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain = {label: result.to_dict() for label, result in results.items()}
            (self.folder / f"{name}.json").write_text(json.dumps(plain) + "\n")
            rows = [{"model": label, **row} for label, result in results.items() for row in result.rows()]
            write_table(self.folder / f"{name}.csv", rows[0], [row.values() for row in rows])
            for figure, draw in figures.items():
                save_figure(draw(), self.folder / figure)
        if missing := sum(result.missing for result in results.values()):
            self.run.fabric.print(f"interrupted: {missing:,} points are missing; results: {self.folder}")
            raise KeyboardInterrupt
