"""Several runs of one config as one batched program: other seeds, or other values of a setting."""

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import UserError, ensure
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Engine
from fl_lightning.trainer.callbacks.progress import COLUMNS, Ending, Progress
from fl_lightning.trainer.checks import check_fit
from fl_lightning.trainer.choose import choose_engine
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.round import Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.trainer import FederatedTrainer

Plain = bool | int | float | str | None
PARTS = ("", "ascent", "optimizer", "loss")
"""Parts of an objective that local training uses."""


def fit(
    trainers: Sequence[FederatedTrainer],
    models: Sequence[LocalObjective],
    datamodule: FederatedDataModule,
    ckpt_path: str | None = None,
) -> list[Run]:
    """Trains all runs in parallel: the local steps of all their cohorts are one program of the engine.

    Each run is what it would be alone, up to rounding, in a folder of its own. One that diverges ends, and the others
    continue. The live progress is that of the first one.

    Args:
        trainers: One for each run, alike except for the seed; with different names, "last" resumes each of them.
        models: Their local objectives, alike except for numbers.
        datamodule: The clients' data, shared by all.
        ckpt_path: "last" to continue the newest run of each name.

    Returns:
        The runs.

    Raises:
        UserError: As ``FederatedTrainer.fit``; if the runs differ in more than that; and at the end, if some of them
            broke off.
    """
    first = trainers[0]
    with first.environment():
        ensure(
            first.fabric.world_size <= 1,
            f"trainer.devices: {first.fabric.world_size} processes; parallel runs take one, set it to 1",
        )
        names = differing(models)
        runs = [trainer.start(model, datamodule, ckpt_path) for trainer, model in zip(trainers, models, strict=True)]
        for run in runs:
            check_fit(run)
            run.varied = {name: float(attrgetter(name)(run.objective)) for name in names}
            silent = Ending if run is runs[0] else (Ending, Progress)  # the table at the end names all folders
            run.callbacks = [c for c in run.callbacks if not isinstance(c, silent)]
        choose_engine(runs)
        broken = _train(runs)
    _show(runs, broken)
    if broken:
        run, error = next(iter(broken.items()))
        raise UserError(f"{len(broken)} of {len(runs)} runs broke off; {run.folder.path}: {error}")
    return runs


def differing(models: Sequence[LocalObjective]) -> list[str]:
    """Names of the numbers that differ between objectives, such as ``ascent.rho``.

    Raises:
        UserError: If the objectives differ in more than numbers.
    """
    names = []
    remedy = "parallel runs must have the same; start them one by one"
    ensure(
        len({(*model.flat.names, *model.flat.shapes) for model in models}) <= 1,
        f"model.net: {remedy}",
    )
    for part in PARTS:
        owners = [getattr(model, part) if part else model for model in models]
        ensure(
            len({type(owner) for owner in owners}) <= 1,
            f"model.{part or 'class_path'}: {remedy}",
        )
        for name, value in vars(owners[0]).items() if owners[0] is not None else ():
            values = [vars(owner)[name] for owner in owners]
            if name.startswith("_") or name in PARTS or not isinstance(value, Plain) or len(set(values)) == 1:
                continue
            path = f"{part}.{name}".lstrip(".")
            ensure(
                part != "loss" and all(type(v) in (int, float) for v in values),
                f"model.{path} = {', '.join(map(str, values))}: parallel runs may differ in numbers of the "
                "objective, its ascent and its optimizer; start them one by one",
            )
            names.append(path)
    return names


def _train(runs: Sequence[Run]) -> dict[Run, UserError]:
    """Trains all runs to their ends; returns those that broke off, and why."""
    engine, broken, active = runs[0].engine, dict[Run, UserError](), list[Run]()
    try:
        for run in runs:
            run.open()
            active.append(run)
            run.call("on_fit_start")
        while active:
            # resumed runs may have stopped in different rounds: those furthest behind go first
            behind = min(run.rounds_done for run in active)
            broken |= _train_round([run for run in active if run.rounds_done == behind and not run.finished], engine)
            for run in [run for run in active if run in broken or run.finished]:
                active.remove(run)
                run.fail(broken[run]) if run in broken else run.end()
    except BaseException as error:
        for run in active:
            run.fail(error)
        raise
    return broken


def _train_round(runs: Sequence[Run], engine: Engine) -> dict[Run, UserError]:
    """One round of each run, phase by phase; returns those that broke off. Any error restores the run that it hits."""
    snapshots = {run: run.snapshot() for run in runs}
    rounds = {run: Round(run, Cohort.draw(run, run.rounds_done), run.on_result) for run in runs}
    broken: dict[Run, UserError] = {}

    def each(step: Callable[[Run], None]) -> None:
        for run in list(rounds):
            try:
                step(run)
            except UserError as error:  # noqa: PERF203  each run's own
                broken[run] = error
                run.restore(snapshots[run])
                del rounds[run]

    def aggregate(run: Run) -> None:
        phase, results = phases[run], taken[run]
        phase.aggregate(results)
        if phase.last:
            rounds[run].apply()
            run.close_round(rounds[run].metrics())
            run.clients.commit()
            del rounds[run]

    try:
        each(lambda run: rounds[run].start())
        coming = {run: round_.phases() for run, round_ in rounds.items()}
        while rounds:
            phases = {run: next(coming[run]) for run in rounds}
            jobs = {run: phase.jobs() for run, phase in phases.items()}
            results = iter(list(engine.train([job for run in phases for job in jobs[run]])))
            taken = {run: list(islice(results, len(jobs[run]))) for run in phases}
            each(aggregate)
    except BaseException:
        for run in rounds:
            run.restore(snapshots[run])
        raise
    return broken


def _show(runs: Sequence[Run], broken: dict[Run, UserError]) -> None:
    """Prints the last metrics of all runs, with mean and standard deviation."""
    shown = [name for name in COLUMNS if any(name in run.metrics for run in runs)]
    table = Table("seed", *runs[0].varied, *(COLUMNS[name] for name in shown), title=f"{len(runs)} runs")
    whole = [run for run in runs if run not in broken]
    for run in runs:
        cells = [f"{run.metrics[name]:.4f}" if name in run.metrics else "" for name in shown]
        own = [f"{value:g}" for value in run.varied.values()]
        table.add_row(f"{run.seed}{' (broke off)' * (run in broken)}", *own, *cells)
    if len(whole) > 1 and not runs[0].varied:
        found = [[run.metrics[name] for run in whole if name in run.metrics] for name in shown]
        table.add_row("mean ± sd", *(f"{mean(v):.4f} ± {stdev(v):.4f}" if len(v) > 1 else "" for v in found))
    console = Console()
    console.print(table)
    for run in runs:
        console.print(f"results: {run.folder.path}", soft_wrap=True, highlight=False)
