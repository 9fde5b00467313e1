"""Several runs of one config as one batched program: other seeds, or other values of a setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core.errors import UserError
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Job, LocalResult
from fl_lightning.trainer.callbacks.progress import COLUMNS, Progress
from fl_lightning.trainer.trainer import FederatedTrainer

Plain = bool | int | float | str | None
PARTS = ("", "ascent", "optimizer", "loss")
"""Parts of an objective that local training uses."""


def fit(
    trainers: Sequence[FederatedTrainer],
    models: Sequence[LocalObjective],
    datamodule: FederatedDataModule,
    ckpt_path: str | None = None,
) -> None:
    """Train all runs side by side: the local steps of all their cohorts are one program of the engine.

    Each run is what it would be alone, up to rounding, in a folder of its own. One that diverges ends, the others go
    on. Progress is shown for the first one.

    Args:
        trainers: One for each run, alike but for the seed; they should differ in name to be resumed by "last".
        models: Their local objectives, alike but for numbers.
        datamodule: The clients' data, shared by all.
        ckpt_path: "last" to go on with the newest run of each name.

    Raises:
        UserError: As ``FederatedTrainer.fit``, or if the runs differ in more than that; and in the end, if some of
            them broke off.
    """
    first = trainers[0]
    if first.fabric.world_size > 1:
        raise UserError(f"trainer.devices: {first.fabric.world_size} processes; a group of runs takes one, set it to 1")
    names = differing(models)
    begun = []
    for trainer, model in zip(trainers, models, strict=True):
        if trainer is not first:
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Progress)]
        trainer.values = {name: _get(model, name) for name in names}
        begun.append(trainer._prepare(model, datamodule, ckpt_path))

    def sample() -> list[Job]:
        rearmost = min(trainer.round for trainer in trainers)
        return [job for trainer in trainers if trainer.round == rearmost for job in trainer._sample_jobs()]

    first._choose_engine(begun[0][1].get("engine"), sample)
    for trainer, (path, restored) in zip(trainers, begun, strict=True):
        if trainer is not first:
            trainer._name_engine(first.engine_name)
        trainer._start_run(path, restored)
    broken = _train(trainers)
    _show(trainers, broken)
    if broken:
        which, error = next(iter(broken.items()))
        raise UserError(f"{len(broken)} of {len(trainers)} runs broke off; {which.run_dir}: {error}")


def differing(models: Sequence[LocalObjective]) -> list[str]:
    """Names of the numbers that differ between objectives, such as ``ascent.rho``.

    Raises:
        UserError: If the objectives differ in more than numbers.
    """
    names = []
    if len({(*model.flat.names, *model.flat.shapes) for model in models}) > 1:
        raise UserError("model.net: runs of a group must have the same; start them one by one")
    for part in PARTS:
        owners = [getattr(model, part) if part else model for model in models]
        if len({type(owner) for owner in owners}) > 1:
            raise UserError(f"model.{part or 'class_path'}: runs of a group must have the same; start them one by one")
        for name, value in vars(owners[0]).items() if owners[0] is not None else ():
            values = [vars(owner)[name] for owner in owners]
            if name.startswith("_") or name in PARTS or not isinstance(value, Plain) or len(set(values)) == 1:
                continue
            path = f"{part}.{name}".lstrip(".")
            if part == "loss" or not all(type(v) in (int, float) for v in values):
                raise UserError(
                    f"model.{path} = {', '.join(map(str, values))}: runs of a group may differ in numbers of the "
                    "objective, its ascent and its optimizer; start them one by one"
                )
            names.append(path)
    return names


def _get(model: LocalObjective, name: str) -> float:
    part, _, attribute = name.rpartition(".")
    return float(getattr(getattr(model, part) if part else model, attribute))


def _train(trainers: Sequence[FederatedTrainer]) -> dict[FederatedTrainer, UserError]:
    """All rounds of all runs; returns those that broke off, and why."""
    engine, broken = trainers[0].engine, dict[FederatedTrainer, UserError]()
    with ExitStack() as stack:
        rounds = {trainer: stack.enter_context(closing(trainer._rounds())) for trainer in trainers}
        waiting: dict[FederatedTrainer, list[Job]] = {}

        def advance(trainer: FederatedTrainer, results: Iterator[LocalResult] | None) -> None:
            waiting.pop(trainer, None)
            try:
                waiting[trainer] = next(rounds[trainer]) if results is None else rounds[trainer].send(results)
            except StopIteration:
                pass
            except UserError as error:
                broken[trainer] = error

        for trainer in trainers:
            advance(trainer, None)
        while waiting:
            # resumed runs may have stopped in different rounds: the rearmost go first
            at = {trainer: (jobs[0].ctx.t, jobs[0].ctx.phase) for trainer, jobs in waiting.items()}
            now = [trainer for trainer in waiting if at[trainer] == min(at.values())]
            results = iter(list(engine.train([job for trainer in now for job in waiting[trainer]])))
            for trainer in now:
                advance(trainer, iter(list(islice(results, len(waiting[trainer])))))
    return broken


def _show(trainers: Sequence[FederatedTrainer], broken: dict[FederatedTrainer, UserError]) -> None:
    """What the runs came to, with mean and standard deviation."""
    shown = [name for name in COLUMNS if any(name in trainer.metrics for trainer in trainers)]
    values = trainers[0].values
    table = Table("seed", *values, *(COLUMNS[name] for name in shown), title=f"{len(trainers)} runs")
    whole = [trainer for trainer in trainers if trainer not in broken]
    for trainer in trainers:
        cells = [f"{trainer.metrics[name]:.4f}" if name in trainer.metrics else "" for name in shown]
        own = [f"{value:g}" for value in trainer.values.values()]
        table.add_row(f"{trainer.seed}{' (broke off)' * (trainer in broken)}", *own, *cells)
    if len(whole) > 1 and not values:
        found = [[trainer.metrics[name] for trainer in whole if name in trainer.metrics] for name in shown]
        table.add_row("mean ± sd", *(f"{mean(v):.4f} ± {stdev(v):.4f}" if len(v) > 1 else "" for v in found))
    console = Console()
    console.print(table)
    for trainer in trainers:
        console.print(f"results: {trainer.run_dir}", soft_wrap=True, highlight=False)
