"""What is measured on checkpoints: ``fl-lightning flatness | landscape | interpolate``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from fl_lightning.algorithms import FedAvg, FedSAM
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core.errors import UserError, require
from fl_lightning.core.state import RoundContext, State
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Job, SequentialEngine
from fl_lightning.trainer import checkpoint, collectives
from fl_lightning.trainer.measurements import (
    PROTOCOL,
    Measure,
    PseudoGradient,
    Reading,
    Scene,
    check_statistics,
    default,
)
from fl_lightning.trainer.trainer import FederatedTrainer

if TYPE_CHECKING:
    from fl_lightning.flatness import Batches, Values

V = TypeVar("V", bound="Values")
Kind = Literal["surface", "plane", "perturbation", "trajectory"]
Where = Literal["train", "test"]
Step = Callable[[int, int, str], None]
"""Told how much is done, of how much, and what comes."""


# Measures


def flatness(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str | None = None,
    metrics: Sequence[Measure] | None = None,
    out: str | None = None,
) -> list[Reading]:
    """Measure a checkpoint; write ``flatness.json``, ``flatness.csv`` and figures, and show a table.

    Local models are those of a rehearsal: the round that comes next (after the last round: the last one's cohort once
    more) is trained from the checkpoint, and nothing of it is kept. An interrupt keeps what was measured before.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        ckpt_path: The checkpoint, or "last".
        metrics: What is measured; by default LambdaMax and Discrepancy.
        out: Folder for the files; by default ``flatness`` in the run folder.

    Returns:
        The readings.
    """
    require(ckpt_path is not None, "ckpt_path", ckpt_path, "give a checkpoint, or 'last'")
    check_statistics(model)
    metrics = default() if metrics is None else metrics
    path, restored = trainer.load(model, data, ckpt_path, clients=True)
    folder, readings, interrupted = _folder(path, out, "flatness"), list[Reading](), False
    cohort = trainer.sampler(trainer.coming, data.num_clients, trainer.seed)
    with _bar(trainer) as step:
        heard = [m for m in metrics if type(m).heard is not Measure.heard or m.tracks]
        total = len(metrics) + len(heard)
        try:
            scene = Scene(trainer, trainer.global_model, trainer.server.w, trainer.server.w, cohort)
            if heard:
                scene = _rehearsed(trainer, heard, cohort, restored, lambda done, name: step(done, total, name))
            for i, metric in enumerate(metrics):
                told = partial(_products, step, len(heard) + i, total, type(metric).__name__)
                step(len(heard) + i, total, type(metric).__name__)
                readings += metric.end(replace(scene, progress=told))
            step(total, total, "done")
        except KeyboardInterrupt as stop:
            interrupted = True
            readings += getattr(stop, "partial", [])  # of a measure that was under way
    if trainer.fabric.is_global_zero:
        _save_readings(folder, path, trainer, readings)
        _draw_readings(folder, _label(path), readings)
        _show_readings(readings, trainer, folder)
    if interrupted:
        raise KeyboardInterrupt
    return readings


def _rehearsed(
    trainer: FederatedTrainer,
    metrics: Sequence[Measure],
    cohort: list[int],
    restored: Mapping[str, Any],
    step: Callable[[int, str], None],
) -> Scene:
    """The scene after one more round, and the measures told of its local models."""
    for i, metric in enumerate(metrics):
        step(i, f"{type(metric).__name__}: local training")
        metric.begin(trainer, cohort)
    mean = PseudoGradient(trainer)

    def heard(result: Any) -> None:
        if result.finite:
            mean.add(result)
            for metric in metrics:
                metric.heard(trainer, result)

    after = trainer.rehearse(cohort, heard)
    previous = restored.get("callbacks", {}).get("FlatnessMonitor", {}).get("pseudo_gradient")
    return Scene(
        trainer,
        trainer.global_model,
        trainer.server.w,
        after.w,
        cohort,
        mean.value(),
        None if previous is None else previous.to(after.w),
    )


def _save_readings(folder: Path, path: Path, trainer: FederatedTrainer, readings: Sequence[Reading]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"checkpoint": str(path), "round": trainer.round, "seed": trainer.seed, "protocol": PROTOCOL}
    rows = [asdict(reading) for reading in readings]
    (folder / "flatness.json").write_text(json.dumps({**about, "readings": rows}, indent=1) + "\n")
    columns = [name for name in Reading.__dataclass_fields__ if name != "details"]
    with (folder / "flatness.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row | {"settings": json.dumps(row["settings"])} for row in rows)


def _draw_readings(folder: Path, label: str, readings: Sequence[Reading]) -> None:
    """Figures of what is more than one number."""
    from fl_lightning.core.figures import save_figure
    from fl_lightning.flatness.plots import plot_density, plot_spectrum

    for reading in readings:
        if "eigenvalues" in reading.details:
            save_figure(plot_spectrum({label: reading.details["eigenvalues"]}), folder / "spectrum")
        if "density" in reading.details:
            curve = reading.details["grid"], reading.details["density"]
            save_figure(plot_density({label: curve}), folder / "density")


def _show_readings(readings: Sequence[Reading], trainer: FederatedTrainer, folder: Path) -> None:
    table = Table("measure", "value", "±", "on", title=f"Flatness after round {trainer.round}")
    table.columns[0].no_wrap = True
    for column in table.columns[1:3]:
        column.justify = "right"
    for r in readings:
        spread = f"{r.error:.2g}" if r.error is not None else ""
        spread = f"{abs(r.residual * r.value):.1g} (residual)" if r.residual is not None else spread
        table.add_row(r.name, f"{r.value:.4g}", spread, r.protocol())
    console = Console()
    console.print(table)
    console.print(f"measured with: {PROTOCOL}; seed {trainer.seed}", highlight=False, soft_wrap=True)
    console.print(f"results: {folder}", highlight=False, soft_wrap=True)


# Landscapes


def landscape(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str | None = None,
    kind: Kind = "surface",
    compare: Sequence[str] = (),
    splits: Sequence[Where] = ("train",),
    clients: Sequence[int] = (),
    samples: int | None = 1000,
    points: int | None = None,
    span: float = 1.0,
    directions: int = 10,
    out: str | None = None,
) -> None:
    """Measure the loss around a checkpoint; write it as CSV and JSON, and the figures as PDF and PNG.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        ckpt_path: The checkpoint, or "last".
        kind: "surface": over two random directions, the same for all models, filter-normalised. "plane": through
            three checkpoints, of which two are in ``compare``. "perturbation": against the length of a perturbation.
            "trajectory": local training of a client from the checkpoint, by its own algorithm, FedAvg and FedSAM, in
            the plane through the start and the ends of the first two.
        compare: Further checkpoints with the same net.
        splits: Data: train (of all clients, a stratified sample) and test.
        clients: Of a surface: local models of these clients, too, and their data, for all models. Of a trajectory: the
            client.
        samples: Training images; null: all.
        points: Points along each axis; by default 51 for a surface, else 21.
        span: A surface reaches from -span to span, curves to span.
        directions: Random directions of a perturbation.
        out: Folder for the files; by default ``landscape`` in the run folder.

    Raises:
        UserError: If the arguments do not fit, or a checkpoint is of another net.
    """
    require(ckpt_path is not None, "ckpt_path", ckpt_path, "give a checkpoint, or 'last'")
    require(points is None or points >= 2, "points", points, "2 or more")
    require(span > 0, "span", span, "above 0")
    require(samples is None or samples >= 1, "samples", samples, "at least 1, or null for all")
    require(kind != "plane" or len(compare) == 2, "compare", list(compare), "a plane goes through two checkpoints more")
    require(kind != "trajectory" or len(clients) == 1, "clients", list(clients), "a trajectory is that of one client")
    _refuse_statistics(model)
    path, _ = trainer.load(model, data, ckpt_path, clients=kind == "trajectory" or bool(clients))
    for k in clients:
        require(0 <= k < data.num_clients, "clients", k, f"from 0 to {data.num_clients - 1}")
    models = {_label(path): trainer.global_model}
    for other in compare:
        models[_unique(_label(Path(other)), models)] = _weights(checkpoint.resolve(other, Path(), ""), trainer)
    with _study(trainer, _folder(path, out, "landscape"), models, splits, samples) as study:
        trainer.fabric.print(f"{kind} of {', '.join(models)} on {', '.join(study.sets)}", flush=True)
        match kind:
            case "surface":
                study.surface(clients, points or 51, span)
            case "plane":
                study.plane(points or 21)
            case "perturbation":
                study.perturbation(points or 21, span, directions)
            case "trajectory":
                study.trajectory(clients[0], points or 21)


@dataclass
class Study:
    """Models, data, and where what is measured of them goes.

    Attributes:
        trainer: With a checkpoint loaded.
        folder: For the files.
        models: Flat weights by label; the checkpoint's first.
        sets: This process's share of each data set, by name.
        about: The protocol.
        step: Told of the progress.
    """

    trainer: FederatedTrainer
    folder: Path
    models: dict[str, Tensor]
    sets: dict[str, Batches]
    about: dict[str, Any]
    step: Step

    def options(self, label: str, **protocol: Any) -> dict[str, Any]:
        """Arguments that all functions of `fl_lightning.flatness.landscape` take."""
        return {
            "model": self.trainer.objective.net,
            "loss": self.trainer.objective.evaluation_loss,
            "data": self.sets,
            "reduce": partial(collectives.all_reduce_sum, self.trainer.fabric),
            "progress": lambda done, total: self.step(done, total, label),
            "protocol": {**self.about, **protocol},
        }

    def each(self, measure: Callable[[str, Tensor], V]) -> dict[str, V]:
        """A measurement of every model, up to one that is interrupted."""
        found: dict[str, V] = {}
        for label, w in self.models.items():
            found[label] = measure(label, w)
            if found[label].missing:
                break
        return found

    def keep(self, name: str, results: Mapping[str, Values], **figures: Callable[[], Any]) -> None:
        """Write results by label, and figures by name; after an interrupt the program then ends as ever."""
        from fl_lightning.core.figures import save_figure

        if self.trainer.fabric.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain = {label: result.to_dict() for label, result in results.items()}
            (self.folder / f"{name}.json").write_text(json.dumps(plain) + "\n")
            rows = [{"model": label, **row} for label, result in results.items() for row in result.rows()]
            with (self.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            for figure, draw in figures.items():
                save_figure(draw(), self.folder / figure)
        if missing := sum(result.missing for result in results.values()):
            self.trainer.fabric.print(f"interrupted: {missing:,} points are missing; results: {self.folder}")
            raise KeyboardInterrupt

    def add_clients(self, clients: Sequence[int]) -> None:
        """Data of these clients, and their models after a rehearsal of the coming round."""
        local: dict[int, Tensor] = {}
        self.trainer.rehearse(list(clients), lambda result: local.update({result.client: result.w.cpu()}))
        everyone = collectives.all_gather_dict(self.trainer.fabric, local)
        for k in clients:
            self.models[f"client {k}"] = everyone[k].to(self.trainer.fabric.device)
            self.sets[f"data of client {k}"] = _scene(self.trainer).union([k])[0]

    def surface(self, clients: Sequence[int], points: int, span: float) -> None:
        """Over two random directions, the same for all models before they are normalised."""
        from fl_lightning.flatness import random_plane, surface
        from fl_lightning.flatness.plots import plot_surface

        if clients:
            self.add_clients(clients)
        axis, spec, seed = np.linspace(-span, span, points), self.trainer.objective.flat, self.trainer.seed
        found = self.each(
            lambda label, w: surface(
                at=w,
                directions=random_plane(spec, w, seed),
                x=axis,
                **self.options(label, directions="random, filter-normalised"),
            )
        )
        self.keep("surface", found, surface=lambda: plot_surface(found), surface_3d=lambda: plot_surface(found, "3d"))

    def plane(self, points: int) -> None:
        """Through the three models."""
        from fl_lightning.flatness import Plane, surface
        from fl_lightning.flatness.plots import plot_plane

        plane = Plane.through(*self.models.values())
        x, y = plane.grid(points)
        options = self.options("plane", origin=next(iter(self.models)))
        found = surface(at=plane.origin, directions=plane.directions, x=x, y=y, models=self.models, **options)
        self.keep("plane", {"plane": found}, plane=lambda: plot_plane(found))

    def perturbation(self, points: int, span: float, directions: int) -> None:
        """Against the length of a perturbation."""
        from fl_lightning.flatness import perturbation_curves
        from fl_lightning.flatness.plots import plot_perturbation

        radii, seed = np.linspace(0, span, points), self.trainer.seed
        found = self.each(
            lambda label, w: perturbation_curves(
                at=w, radii=radii, directions=directions, seed=seed, **self.options(label)
            )
        )
        self.keep("perturbation", found, perturbation=lambda: plot_perturbation(found))

    def trajectory(self, client: int, points: int) -> None:
        """Local training of a client, by its own algorithm, FedAvg and FedSAM."""
        from fl_lightning.flatness import Plane, surface
        from fl_lightning.flatness.plots import plot_plane

        own = self.trainer.objective
        rivals: list[LocalObjective] = [FedAvg(own.net, loss=own.loss, optimizer=own.optimizer)]
        if type(own) is not FedSAM:
            rivals.append(FedSAM(own.net, loss=own.loss, optimizer=own.optimizer))
        objectives = rivals if type(own) is FedAvg else [own, *rivals]
        paths: dict[str, Tensor] = {}
        if self.trainer.fabric.is_global_zero:  # which keeps the clients' state
            paths = {type(o).__name__: trajectory(self.trainer, o, client).cpu() for o in objectives}
        paths = {name: path.to(own.device) for name, path in self.trainer.fabric.broadcast(paths).items()}
        first, second = list(paths.values())[:2]
        plane = Plane.through(first[0], first[-1], second[-1])
        x, y = plane.grid(points, include=[plane.project(path) for path in paths.values()])
        self.sets = {f"data of client {client}": _scene(self.trainer).union([client])[0], **self.sets}
        options = self.options("trajectory", client=client)
        found = surface(at=plane.origin, directions=plane.directions, x=x, y=y, models=paths, **options)
        for name, projected in found.models.items():
            self.trainer.fabric.print(f"{name}: at most {projected.residual.max():.3g} outside the plane")
        self.keep("trajectory", {"trajectory": found}, trajectory=lambda: plot_plane(found, total=True))


@contextmanager
def _study(
    trainer: FederatedTrainer, folder: Path, models: dict[str, Tensor], splits: Sequence[Where], samples: int | None
) -> Iterator[Study]:
    """A study under a progress bar; in the end it is told how it was measured, and where the results are."""
    shares = {str(split): _scene(trainer).train(samples, split) for split in splits}
    about: dict[str, Any] = {name: f"{what}, {n:,} samples" for name, (_, n, what) in shares.items()}
    about |= {"seed": trainer.seed, "round": trainer.round}
    with _bar(trainer) as step:
        yield Study(trainer, folder, models, {name: batches for name, (batches, _, _) in shares.items()}, about, step)
    trainer.fabric.print(f"measured with: {PROTOCOL}; {', '.join(f'{k} {v}' for k, v in about.items())}")
    trainer.fabric.print(f"results: {folder}")


def _scene(trainer: FederatedTrainer) -> Scene:
    return Scene(trainer, trainer.global_model, trainer.server.w, trainer.server.w, ())


def trajectory(trainer: FederatedTrainer, objective: LocalObjective, client: int) -> Tensor:
    """A client's local weights from the model it receives to its last step, ``(K + 1, d)``; nothing is kept of it.

    Args:
        trainer: With a checkpoint loaded (``FederatedTrainer.load``).
        objective: The trainer's own, or another one on the same net that keeps no state.
        client: Its id.
    """
    ctx = RoundContext(trainer.coming, trainer.max_rounds, trainer.data.num_clients, trainer.objective.flat)
    own = objective is trainer.objective
    sent = trainer.objective.broadcast(trainer.server, ctx) if own else State({"w": trainer.server.w})
    sent = sent.only(objective.wire[0])
    empty = State.initial({**objective.client_inits(), **objective.scratch_state}, trainer.clients.w0, sent.w)
    state = trainer.clients.get(client, sent.w, objective.scratch_state, None) if own else empty
    context = trainer.client_context(client, ctx)
    job = Job(client, state, sent, context, trainer.minibatches(client, context), trainer.seed)
    iterates: list[Tensor] = []
    local_step = objective.local_step

    def recorded(w: Tensor, *rest: Any) -> Any:
        iterates.append(w.clone())
        return local_step(w, *rest)

    recording: Any = copy(objective)
    recording.local_step = recorded
    (result,) = SequentialEngine(recording, trainer.net, trainer.fabric.autocast).train([job])
    return torch.stack([*iterates, result.w])


def interpolate(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    a: str,
    b: str,
    splits: Sequence[Where] = ("train", "test"),
    samples: int | None = 10_000,
    points: int = 61,
    out: str | None = None,
) -> None:
    """Loss and accuracy on the line through two checkpoints, γ a + (1-γ) b, and the barrier between them.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        a: The checkpoint at γ = 1.
        b: The checkpoint at γ = 0.
        splits: Data: train (of all clients, a stratified sample) and test.
        samples: Training images; null: all.
        points: Values of γ from -1 to 2.
        out: Folder for the files; by default ``interpolate`` in the run folder of ``a``.

    Raises:
        UserError: If a checkpoint is of another net.
    """
    from fl_lightning.flatness import interpolate as line
    from fl_lightning.flatness.plots import plot_interpolation

    require(points >= 3, "points", points, "3 or more")
    _refuse_statistics(model)
    path, _ = trainer.load(model, data, a)
    other = _weights(checkpoint.resolve(b, Path(), ""), trainer)
    names = _label(path), _unique(_label(Path(b)), {_label(path): None})
    with _study(trainer, _folder(path, out, "interpolate"), {}, splits, samples) as study:
        options = study.options("line", a=names[0], b=names[1])
        found = line(a=trainer.global_model, b=other, gammas=np.linspace(-1, 2, points), **options)
        trainer.fabric.print("barrier: " + ", ".join(f"{name} {found.barrier(name):.4g}" for name in found.loss))
        ends = (names[1], names[0])
        study.keep("interpolate", {"line": found}, interpolate=lambda: plot_interpolation({"line": found}, ends))


# Parts


def _refuse_statistics(model: LocalObjective) -> None:
    if model.net_buffers is not None:
        raise UserError(
            f"model.net = {type(model.net).__name__} keeps buffers, and a landscape would need statistics at every "
            "point; take a net without, such as one with GroupNorm"
        )


def _folder(path: Path, out: str | None, name: str) -> Path:
    return Path(out) if out is not None else path.parent.parent / name


def _label(path: Path) -> str:
    """A run's name and version, from its checkpoint's path."""
    run = path.resolve().parent.parent
    return f"{run.parent.name}/{run.name}" if path.parent.name == checkpoint.LAST.parent.name else path.stem


def _unique(label: str, taken: Mapping[str, Any]) -> str:
    n = 1
    while (name := label if n == 1 else f"{label} ({n})") in taken:
        n += 1
    return name


def _weights(path: Path, trainer: FederatedTrainer) -> Tensor:
    """The global model of another checkpoint, ``(d,)``."""
    flat, saved = trainer.objective.flat, checkpoint.load(path)["state_dict"]
    found = {name: saved.get(f"net.{name}") for name in flat.names}
    for name, shape in zip(flat.names, flat.shapes, strict=True):
        value = found[name]
        if value is None or value.shape != shape:
            raise UserError(f"{path}: its '{name}' does not fit model.net; compare checkpoints of the same net")
    return torch.cat([found[name].reshape(-1) for name in flat.names]).to(trainer.server.w)


def _products(step: Step, at: int, total: int, name: str, done: int, most: int) -> None:
    step(at, total, f"{name}: {done} of at most {most} Hessian-vector products")


@contextmanager
def _bar(trainer: FederatedTrainer) -> Iterator[Step]:
    """A progress bar on the first process: call it with how much is done, of how much, and what comes."""
    if not trainer.fabric.is_global_zero:
        yield lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
