"""``fl-lightning landscape``, the loss around checkpoints; and ``interpolate``, on the line between two."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning import FedAvg, FederatedDataModule, FedGMT, FedSAM, LocalObjective
from fl_lightning.commands.shared.landscapes import Landscape, check_no_buffers, models_of, output_folder, progress_bar
from fl_lightning.core import Interval, Positive, PositiveInt, State, checked, require
from fl_lightning.engine import SequentialEngine
from fl_lightning.flatness import (
    Plane,
    interpolate,
    perturbation_curves,
    plot_perturbation,
    plot_plane,
    plot_surface,
    random_plane,
    surface,
)
from fl_lightning.flatness.plots import plot_interpolation
from fl_lightning.trainer import Cohort, FederatedTrainer, MeasurementContext, Phase, Round, Run, Split, dry_round
from fl_lightning.trainer.runtime import collectives


@checked
def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str,
    kind: Literal["surface", "plane", "perturbation", "trajectory"] = "surface",
    compare: Sequence[str] = (),
    labels: Sequence[str] = (),
    splits: Sequence[Split] = ("train",),
    clients: Sequence[int] = (),
    samples: PositiveInt | None = 1000,
    points: Annotated[int, Interval("[2, 1e4]")] | None = None,
    span: Positive = 1.0,
    directions: Annotated[int, Interval("[2, inf)")] = 10,
    same_directions: bool = False,
    out: str | None = None,
) -> None:
    """Measures the loss around a checkpoint; writes it as CSV and JSON, and figures as PDF and PNG.

    Nothing is overwritten: the second surface is ``surface_2``, and so on. Figures also go to the run's W&B run.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        ckpt_path: The checkpoint, or "last".
        kind: "surface": over two random directions, filter-normalised. "plane": through three checkpoints, two of them
            in ``compare``, or the local models of three ``clients``. "perturbation": against the length of one.
            "trajectory": local training of a client from the checkpoint, by its own algorithm (FedGMT also without
            its dual), FedAvg and FedSAM, in the plane through the start and the ends of the first two.
        compare: Further checkpoints with the same net.
        labels: Names of the checkpoints in the figures; by default those of their runs.
        splits: Data: train (of all clients, a stratified sample) and test.
        clients: For a surface: also the local models of these clients, and their data, for all models. For a plane:
            the three whose local models span it. For a trajectory: the client.
        samples: Number of training images; null: all.
        points: Number of points along each axis; by default 51 for a surface, else 21.
        span: A surface reaches from -span to span, curves to span.
        directions: Number of random directions of a perturbation.
        same_directions: For a surface: all models take the directions of the checkpoint, as FedGloSS's appendix D.2
            says. By default the random numbers are the same, and their lengths those of each model's own filters
            (Li et al. 2018).
        out: Folder for the files; by default ``landscape`` in the run folder.

    Raises:
        UserError: If the arguments do not fit, or a checkpoint is of another net.
    """
    spans_plane = (len(compare), len({*clients})) in ((2, 0), (0, 3))
    require(
        kind != "plane" or spans_plane,
        "compare",
        list(compare),
        "a plane goes through two checkpoints more, or through the models of three different clients",
    )
    require(kind != "trajectory" or len(clients) == 1, "clients", list(clients), "a trajectory is that of one client")
    remedy = "a perturbation is that of checkpoints; leave clients out, or draw a surface"
    require(kind != "perturbation" or not clients, "clients", list(clients), remedy)
    check_no_buffers(model)
    model.check_global_model("a landscape")
    loaded = trainer.load(model, data, ckpt_path, clients=kind == "trajectory" or bool(clients))
    for k in clients:
        require(0 <= k < data.num_clients, "clients", k, f"from 0 to {data.num_clients - 1}")
    models, folder = models_of(loaded, compare, labels), output_folder(loaded, out, "landscape")
    with progress_bar(loaded.fabric) as step:
        landscape = Landscape(loaded, folder, models, splits, samples, step)
        loaded.fabric.print(f"{kind} of {', '.join(models)} on {', '.join(landscape.sets)}", flush=True)
        match kind:
            case "surface":
                _surface(landscape, clients, points or 51, span, same_directions)
            case "plane":
                _plane(landscape, clients, points or 21)
            case "perturbation":
                _perturbation(landscape, points or 21, span, directions)
            case "trajectory":
                _trajectory(landscape, clients[0], points or 21)


def _surface(landscape: Landscape, clients: Sequence[int], points: int, span: float, same: bool) -> None:
    """Measures over two random directions, normalised by the filters of each model, or the same for all."""
    run = landscape.run
    if clients:
        landscape.models |= _local_models(run, clients)
    for k in clients:
        landscape.sets[f"data of client {k}"] = MeasurementContext.between_rounds(run).union([k])[0]
    axis, spec = np.linspace(-span, span, points), run.objective.flat
    (first, checkpoint), *_ = landscape.models.items()
    about = f"random, normalised by the filters of {first if same else 'each model'}"
    surfaces = landscape.each(
        lambda label, w: surface(
            at=w,
            directions=random_plane(spec, checkpoint if same else w, run.seed),
            x=axis,
            **landscape.options(label, directions=about),
        )
    )
    landscape.save(
        "surface", surfaces, surface=lambda: plot_surface(surfaces), surface_3d=lambda: plot_surface(surfaces, "3d")
    )


def _local_models(run: Run, clients: Sequence[int]) -> dict[str, Tensor]:
    """Returns the clients' models after a dry round, ``(d,)`` each, by label."""
    local: dict[int, Tensor] = {}
    dry_round(run, clients, lambda result: local.update({result.client: result.w.cpu()}))
    everyone = collectives.all_gather_dict(run.fabric, local)
    return {f"client {k}": everyone[k].to(run.server.w) for k in clients}


def _plane(landscape: Landscape, clients: Sequence[int], points: int) -> None:
    """Measures over the plane through the three models, or through the local models of three clients."""
    if clients:
        landscape.models = _local_models(landscape.run, clients)
    plane = Plane.through(*landscape.models.values())
    x, y = plane.grid(points)
    loss_surface = surface(
        at=plane.origin,
        directions=plane.directions,
        x=x,
        y=y,
        models=landscape.models,
        **landscape.options("plane", origin=next(iter(landscape.models))),
    )
    landscape.save("plane", {"plane": loss_surface}, plane=lambda: plot_plane(loss_surface))


def _perturbation(landscape: Landscape, points: int, span: float, directions: int) -> None:
    """Measures the loss against the length of a perturbation."""
    radii, seed = np.linspace(0, span, points), landscape.run.seed
    curves = landscape.each(
        lambda label, w: perturbation_curves(
            at=w, radii=radii, directions=directions, seed=seed, **landscape.options(label)
        )
    )
    landscape.save("perturbation", curves, perturbation=lambda: plot_perturbation(curves))


def _trajectory(landscape: Landscape, client: int, points: int) -> None:
    """Draws local training of a client by the run's algorithm, FedAvg and FedSAM; of FedGMT four paths (its Fig. 6)."""
    run, objective = landscape.run, landscape.run.objective
    kinds = (FedAvg,) if type(objective) is FedSAM else (FedAvg, FedSAM)
    objectives: dict[str, LocalObjective] = {
        kind.__name__: kind(objective.net, loss=objective.loss, optimizer=objective.optimizer) for kind in kinds
    }
    if type(objective) is not FedAvg or objective.ascent is not None or objective.parts or objective.relaxed_init:
        name = type(objective).__name__
        objectives = {f"{name} of this run" if name in objectives else name: objective, **objectives}
    if isinstance(objective, FedGMT) and objective.use_dual:
        objectives[f"{type(objective).__name__} without ADMM"] = dual_free = copy(objective)
        dual_free.use_dual = False
    paths = {name: trajectory(run, variant, client) for name, variant in objectives.items()}
    if len(paths) > 2 and type(objective) is FedAvg and torch.equal(*list(paths.values())[:2]):
        paths.pop(next(iter(paths)))  # its parts do not change local training
    first, second = list(paths.values())[:2]
    plane = Plane.through(first[0], first[-1], second[-1])
    x, y = plane.grid(points, include=[plane.project(path) for path in paths.values()])
    landscape.sets = {
        f"data of client {client}": MeasurementContext.between_rounds(run).union([client])[0],
        **landscape.sets,
    }
    loss_surface = surface(
        at=plane.origin,
        directions=plane.directions,
        x=x,
        y=y,
        models=paths,
        **landscape.options("trajectory", client=client),
    )
    for name, projected in loss_surface.models.items():
        run.fabric.print(f"{name}: at most {projected.residual.max():.3g} outside the plane")
    landscape.save("trajectory", {"trajectory": loss_surface}, trajectory=lambda: plot_plane(loss_surface, total=True))


def trajectory(run: Run, objective: LocalObjective, client: int) -> Tensor:
    """Returns a client's weights from the start of the next round's local training to its end, ``(K + 1, d)``.

    The run stays as it is. Every process calls; rank 0 trains.

    Args:
        run: A loaded run, with the clients' state.
        objective: The run's objective, a variant of its class, or another objective on the same net without state.
        client: The client's id.
    """
    cohort = Cohort.of(run, [client], run.next_round)
    jobs = Phase(Round(run, cohort), cohort).send()
    if type(objective) is not type(run.objective):
        received = State({"w": run.server.w})
        state = State.initial({**objective.client_inits(), **objective.scratch_inits()}, run.clients.w0, received.w)
        jobs = [replace(job, state=state, received=received) for job in jobs]
    iterates: list[Tensor] = []

    def recorded(w: Tensor, *rest: Any) -> Any:
        iterates.append(w.clone())
        return objective.local_step(w, *rest)

    recording: Any = copy(objective)
    recording.local_step = recorded
    iterates += [result.w for result in SequentialEngine(recording, run.net, run.fabric.autocast).train(jobs)]
    return run.fabric.broadcast(torch.stack(iterates).cpu() if iterates else torch.empty(0)).to(run.server.w)


@checked
def line(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    a: str,
    b: str,
    /,
    labels: Sequence[str] = (),
    splits: Sequence[Split] = ("train", "test"),
    samples: PositiveInt | None = 10_000,
    points: Annotated[int, Interval("[3, 1e6]")] = 61,
    out: str | None = None,
) -> None:
    """Measures loss and accuracy on the line through two checkpoints, γ a + (1-γ) b, and the barrier between them.

    Args:
        trainer: Its seed and precision are used, and its processes share the work.
        model: The local objective.
        data: The data.
        a: The checkpoint at γ = 1.
        b: The checkpoint at γ = 0.
        labels: Names of the two in the figure; by default those of their runs.
        splits: Data: train (of all clients, a stratified sample) and test.
        samples: Number of training images; null: all.
        points: Number of values of γ from -1 to 2.
        out: Folder for the files; by default ``interpolate`` in the run folder of ``a``.

    Raises:
        UserError: If a checkpoint is of another net.
    """
    check_no_buffers(model)
    loaded = trainer.load(model, data, a)
    models, folder = models_of(loaded, [b], labels), output_folder(loaded, out, "interpolate")
    (name_a, w_a), (name_b, w_b) = models.items()
    with progress_bar(loaded.fabric) as step:
        landscape = Landscape(loaded, folder, models, splits, samples, step)
        curves = interpolate(
            a=w_a, b=w_b, gammas=np.linspace(-1, 2, points), **landscape.options("line", a=name_a, b=name_b)
        )
        loaded.fabric.print("barrier: " + ", ".join(f"{name} {curves.barrier(name):.4g}" for name in curves.loss))
        landscape.save(
            "interpolate", {"line": curves}, interpolate=lambda: plot_interpolation({"line": curves}, (name_b, name_a))
        )
