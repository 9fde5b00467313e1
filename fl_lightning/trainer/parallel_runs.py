"""Several runs of one config as one batched program: other seeds, or other values of a setting."""

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import Interruption, UserError, ensure
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Engine
from fl_lightning.trainer.callbacks.progress import Progress
from fl_lightning.trainer.checks import check_fit
from fl_lightning.trainer.choose import choose_engine, seconds_left
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.output import unbroken_output
from fl_lightning.trainer.round import Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.session import Session
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
    with trainers[0].environment():
        runs = start(trainers, models, datamodule, [ckpt_path] * len(trainers))
        broken = train(runs)
    if broken:
        run, error = next(iter(broken.items()))
        raise type(error)(f"{len(broken)} of {len(runs)} runs broke off; {run.folder.path}: {error}")
    return runs


def start(
    trainers: Sequence[FederatedTrainer],
    models: Sequence[LocalObjective],
    datamodule: FederatedDataModule,
    ckpt_paths: Sequence[str | None],
) -> list[Run]:
    """Makes runs before their next round; nothing is written. Arguments as for `fit`, with a checkpoint for each.

    Raises:
        UserError: If they cannot be one program.
    """
    first = trainers[0]
    ensure(
        first.fabric.world_size <= 1,
        f"trainer.devices: {first.fabric.world_size} processes; parallel runs take one, set it to 1",
    )
    for model in models:
        model.optimizer.check_batched("parallel runs")
    names = differing(models)
    made = zip(trainers, models, ckpt_paths, strict=True)
    runs = [trainer.start(model, datamodule, ckpt_path) for trainer, model, ckpt_path in made]
    ensure(
        len({run.frozen for run in runs}) <= 1,
        "model.net: its frozen parameters differ between the runs, and one program has one net; start them one by one",
    )
    for run in runs:
        check_fit(run)
        run.varied = {name: float(attrgetter(name)(run.objective)) for name in names}
        if run is not runs[0]:
            run.callbacks = [c for c in run.callbacks if not isinstance(c, Progress)]
    return runs


def pays(runs: Sequence[Run]) -> bool:
    """Whether the runs are faster as one program than one after another; a round of both is measured."""
    going = [run for run in runs if not run.finished]
    return len(going) > 1 and seconds_left(going) < len(going) * seconds_left(going[:1])


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


def train(runs: Sequence[Run]) -> dict[Run, UserError]:
    """Trains runs of `start` to their ends; returns those that broke off, and why."""
    choose_engine(runs)
    with Interruption(), unbroken_output():
        return _train(runs, runs[0].engine)


def _train(runs: Sequence[Run], engine: Engine) -> dict[Run, UserError]:
    broken, active = dict[Run, UserError](), dict[Run, Session]()
    try:
        for run in runs:
            session = Session(run)
            session.open()
            active[run] = session
            run.call("on_fit_start")
        while active:
            # resumed runs may have stopped in different rounds: those furthest behind go first
            behind = min(run.rounds_done for run in active)
            broken |= _train_round([run for run in active if run.rounds_done == behind and not run.finished], engine)
            for run in [run for run in active if run in broken or run.finished]:
                session = active.pop(run)
                session.fail(broken[run]) if run in broken else session.end()
    except BaseException as error:
        if others := [shown for session in active.values() if (shown := session.fail(error)) is not error]:
            raise others[0] from None
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
