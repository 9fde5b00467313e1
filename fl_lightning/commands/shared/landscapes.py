"""Labels, folders, a progress bar, figures and landscapes for the commands on checkpoints."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import Figure, class_at, earlier, ensure, json_text, make_folder, require, save_figure
from fl_lightning.flatness import Batches, Values
from fl_lightning.results.metrics import PROTOCOL, write_table
from fl_lightning.trainer import MeasurementContext, Run, RunFolder, Split
from fl_lightning.trainer.runtime import collectives
from fl_lightning.trainer.storage import checkpoint

V = TypeVar("V", bound=Values)
Step = Callable[[int, int, str], None]
"""Reports progress: the number done, the total, and a description of what comes next."""


@contextmanager
def progress_bar(fabric: Fabric) -> Iterator[Step]:
    """Shows a progress bar on the first process."""
    if not fabric.is_global_zero:
        yield lambda done, total, description: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, description: bar.update(task, completed=done, total=total, description=description)


def output_folder(run: Run, out: str | None, name: str) -> Path:
    """Creates the folder for a command's files: ``out``, by default ``name`` in the run folder; returns its path.

    Raises:
        UserError: If it cannot be created.
    """
    assert run.checkpoint is not None
    return make_folder(run.checkpoint.parent.parent / name if out is None else out)


def number_of(folder: Path, file: str) -> str:
    """Returns the first free ending of the names of a measurement's files: nothing, ``_2``, ``_3``, ...

    Args:
        folder: Their folder.
        file: The file that every such measurement writes, such as ``surface.json``.
    """
    path, numbers = folder / file, (f"_{k}" if k > 1 else "" for k in count(1))
    return next(number for number in numbers if not path.with_stem(f"{path.stem}{number}").exists())


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Returns short names of checkpoints for figures: the run's, with version, file or number where two are equal."""
    inside = [path.resolve().parent.name == RunFolder.CHECKPOINTS for path in paths]
    runs = [path.resolve().parent.parent for path in paths]
    labels = [_run_name(run) if of_run else path.stem for path, run, of_run in zip(paths, runs, inside, strict=True)]
    for endings in ([f"/{run.name}" for run in runs], [f", {path.stem}" for path in paths]):
        twice = [of_run and labels.count(name) > 1 for name, of_run in zip(labels, inside, strict=True)]
        labels = [name + ending if add else name for name, ending, add in zip(labels, endings, twice, strict=True)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(labels, earlier(labels), strict=True)]


def _run_name(folder: Path) -> str:
    """Returns the name of a run's experiment; with the folder above if several runs of it differ in a value."""
    name, above = folder.parent.name, folder.parent.parent.name
    return f"{above}/{name}" if re.search(r"_-?\d[\d.e-]*$", name) else name


def save_figures(run: Run, folder: Path, drawn: Mapping[str, Callable[[], Figure]], number: str, section: str) -> None:
    """Writes figures as PDF and PNG, and gives them to the loggers of the checkpoint's run, which are opened again.

    So the figures of a command stand beside the run's curves.

    Args:
        run: A loaded run.
        folder: Folder for the files.
        drawn: Functions that draw the figures, by name.
        number: Ending of the names of the files, see `number_of`.
        section: Beginning of the names in the loggers.
    """
    of_run = run.checkpoint is not None and run.checkpoint.parent.name == RunFolder.CHECKPOINTS
    loggers = run.own_loggers if of_run and run.fabric.is_global_zero else {}
    for logger, state in loggers.items():
        logger.reopen(run.folder.path, state, run.rounds_done, run.about)
    try:
        for name, draw in drawn.items():
            _, png = save_figure(draw(), folder / f"{name}{number}")
            for logger in loggers:
                logger.log_figure(f"{section}{name}{number}", png, run.rounds_done)
    finally:
        for logger in loggers:
            logger.finalize("success")


def models_of(run: Run, others: Sequence[str], labels: Sequence[str] = ()) -> dict[str, Tensor]:
    """Returns the global models ``(d,)`` of a loaded run and of other checkpoints, by label.

    Args:
        run: The run.
        others: The checkpoints.
        labels: A name for each model; by default those of `labels_of`.

    Raises:
        UserError: If there is no such checkpoint, it is of another net or holds no global model, or there is not one
            label for each model.
    """
    named = len(set(labels)) == len(labels) == len(others) + 1
    require(not labels or named, "labels", list(labels), "give a name for each model, none twice")
    assert run.checkpoint is not None
    models = [(run.checkpoint, run.global_model), *(_weights_of(run, ckpt_path) for ckpt_path in others)]
    paths, weights = zip(*models, strict=True)
    return dict(zip(labels or labels_of(paths), weights, strict=True))


def _weights_of(run: Run, ckpt_path: str) -> tuple[Path, Tensor]:
    path = RunFolder.find_checkpoint(ckpt_path, run.settings.default_root_dir, run.name)
    flat, content = run.objective.flat, checkpoint.load(path)
    saved = content["state_dict"]
    parts = (class_at(name, ["fl_lightning"], Part) for name in content["config"].get("model.parts", "").split(", "))
    ensure(
        all(part is None or part.has_global_model for part in parts),
        f"{path}: some weights stay with each client, so there is no global model to compare; leave it out",
    )
    ensure(content["frozen"] == run.frozen, f"{path}: its net has other frozen parameters; compare runs of the same")
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


class Landscape:
    """Models and data of a landscape, and the files it writes.

    Args:
        run: A loaded run.
        folder: Folder for the files.
        models: Flat weights ``(d,)`` by label; the checkpoint's first.
        splits: The data.
        samples: Size of the stratified sample of the training data; None: all.
        step: Reports progress.

    Attributes:
        sets: This process's share of each data set, by name.
        about: The protocol.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        models: dict[str, Tensor],
        splits: Sequence[Split],
        samples: int | None,
        step: Step,
    ) -> None:
        self.run, self.folder, self.models, self.step = run, folder, models, step
        context = MeasurementContext.between_rounds(run)
        shares = {str(split): context.train(samples, split) for split in splits}
        self.sets: dict[str, Batches] = {name: batches for name, (batches, _, _) in shares.items()}
        self.about: dict[str, Any] = {
            **{name: f"{description}, {n:,} samples" for name, (_, n, description) in shares.items()},
            "seed": run.seed,
            "round": run.rounds_done,
        }

    def options(self, label: str, **protocol: Any) -> dict[str, Any]:
        """Returns the common arguments of the functions of `fl_lightning.flatness.landscape`."""
        return {
            "model": self.run.objective.net,
            "loss": self.run.objective.evaluation_loss,
            "data": self.sets,
            "reduce": partial(collectives.all_reduce_sum, self.run.fabric),
            "classes": self.run.data.num_classes,
            "progress": lambda done, total: self.step(done, total, label),
            "protocol": {**self.about, **protocol},
        }

    def each(self, measure: Callable[[str, Tensor], V]) -> dict[str, V]:
        """Measures every model, up to the first that is interrupted; returns the results by label."""
        results: dict[str, V] = {}
        for label, w in self.models.items():
            if not any(result.missing for result in results.values()):
                results[label] = measure(label, w)
        return results

    def save(self, name: str, results: Mapping[str, Values], **figures: Callable[[], Figure]) -> None:
        """Writes results and figures under free names, gives the figures to the run's loggers, and prints the protocol.

        Args:
            name: The files' name, without number.
            results: The results by label.
            **figures: Functions that draw the figures, by the files' names.

        Raises:
            KeyboardInterrupt: If a result is incomplete because of one.
        """
        if self.run.fabric.is_global_zero:
            number = number_of(self.folder, f"{name}.json")
            plain = {label: result.to_dict() for label, result in results.items()}
            (self.folder / f"{name}{number}.json").write_text(json_text(plain))
            rows = [{"model": label, **row} for label, result in results.items() for row in result.rows()]
            write_table(self.folder / f"{name}{number}.csv", rows[0], [row.values() for row in rows])
            save_figures(self.run, self.folder, figures, number, "landscape/")
            self.run.fabric.print(f"results: {self.folder / name}{number}.json, .csv, and figures as .pdf and .png")
        self.run.fabric.print(f"measured with: {PROTOCOL}; {', '.join(f'{k} {v}' for k, v in self.about.items())}")
        if missing := sum(result.missing for result in results.values()):
            self.run.fabric.print(f"interrupted: {missing:,} points are missing")
            raise KeyboardInterrupt
