"""A run from its start to its end: folder, engine, and the loop over its rounds, each a transaction.

The local training of several runs may be one program.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from fl_lightning import engine
from fl_lightning.core import UserError, disk_error, ensure, folded
from fl_lightning.engine import EngineName, Job, LocalResult
from fl_lightning.trainer import program, resume
from fl_lightning.trainer.callbacks import Checkpoints, Progress
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.measurements.clients import evaluate_round
from fl_lightning.trainer.round import Phase, Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import Interruption, check_interruption, on_rank_zero, unbroken_output, undisturbed
from fl_lightning.trainer.storage import RunFolder, by_key, locked, provenance

Steps: TypeAlias = Generator[list[Job], Iterable[LocalResult], None]
"""Gives the jobs of one phase after another, and takes their results."""
Trained: TypeAlias = tuple[Mapping[str, float], Sequence[float]]
"""The metrics of a round that has been trained, and the training loss of each client."""


def rounds(run: Run, alone: bool) -> Steps:
    """Trains a run until it is finished; whoever iterates does the local training.

    Args:
        run: The run.
        alone: Whether no other run is trained with it; then rounds that nobody needs run as one program.
    """
    with session(run):
        while not run.finished:
            with transaction(run):
                trained = program.train(run) if alone else None
                close(run, *(trained or (yield from one_round(run))), is_program=trained is not None)


def one_round(run: Run) -> Generator[list[Job], Iterable[LocalResult], Trained]:
    """Trains a round; whoever iterates does the local training. Returns its metrics, and each client's loss."""
    cohort = Cohort.draw(run, run.rounds_done)
    this = Round(run, cohort, partial(run.call, "on_local_end"))
    run.call("on_round_start", run.round_context(cohort.t), cohort.clients)
    for phase in this.phases():
        results = yield phase.send()
        phase.receive(results)
        phase.step()
    this.apply()
    return this.metrics(), this.losses.tolist()


def close(run: Run, metrics: Mapping[str, float], losses: Sequence[float] = (), is_program: bool = False) -> None:
    """Ends a round: evaluates, calls the callbacks, logs, and saves.

    Args:
        run: The run, which has taken over the result of the round.
        metrics: Metrics of the training.
        losses: Training loss of each client.
        is_program: Whether it has ended a program: callbacks that see a round from its start have not seen it.
    """
    run.note(metrics)
    evaluated = run.evaluates(run.rounds_done)
    if evaluated:
        evaluate_round(run, losses)
    run.call("on_round_end", but=("on_round_start", "on_local_end") if is_program else ())
    if run.stops():  # so this round is the last one
        if not evaluated:
            evaluate_round(run, losses)
        run.call("on_last_round")
    logged = run.write_metrics()
    run.call("on_round_logged", logged)
    for checkpoints in (each for each in run.callbacks if isinstance(each, Checkpoints)):
        checkpoints.save(run, logged)


def train(
    runs: Sequence[Run], on_break: Callable[[Run, UserError], object] = lambda run, error: None
) -> dict[Run, UserError]:
    """Chooses the engine of runs, and trains them to their ends: the jobs of a phase of all runs are one program.

    Args:
        runs: The runs. Those in one round end it in this order.
        on_break: Called with a run that breaks off, and its error, while the others go on.

    Returns:
        The runs that broke off by an error of their own, and the error.

    Raises:
        UserError: If the engine cannot run the objective, or one of the runs cannot begin.
    """
    choose_engine(runs)
    steps = {run: rounds(run, alone=len(runs) == 1) for run in runs}
    jobs: dict[Run, list[Job]] = {}
    broken: dict[Run, UserError] = {}

    def advance(run: Run, results: Iterable[LocalResult] | None = None) -> None:
        """Takes the results of a run's phase, and gets the jobs of its next one."""
        jobs.pop(run, None)
        try:
            jobs[run] = next(steps[run]) if results is None else steps[run].send(results)
        except StopIteration:
            pass
        except UserError as error:
            broken[run] = error
            if results is not None:
                on_break(run, error)

    with Interruption(), unbroken_output():
        try:
            for run in runs:
                advance(run)
            for error in broken.values():  # a run that cannot begin ends all
                raise error
            while jobs:
                together = {run: len(jobs[run]) for run in _together([each for each in runs if each in jobs])}
                own = _own_numbers(runs)
                todo = [replace(job, settings=own[run]) for run in together for job in jobs[run]]
                results = iter(runs[0].engine.train(todo))
                if len(together) > 1:  # what breaks one run off leaves the results of the others
                    results = iter(list(results))
                for run, number in together.items():
                    advance(run, islice(results, number))
        except BaseException as error:
            _break_off([steps[run] for run in runs], error)
            raise
    return broken


def _together(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs whose clients train at once next: hooks see one round, and one number of rounds.

    Resumed runs may have stopped in different rounds: those furthest behind go first.
    """
    first = min((run.rounds_done, run.max_rounds) for run in runs)
    return [run for run in runs if (run.rounds_done, run.max_rounds) == first]


def _own_numbers(runs: Sequence[Run]) -> dict[Run, Mapping[str, float]]:
    """Returns the numbers in which the objectives of runs differ, for each run; callbacks may have changed them.

    Raises:
        UserError: If they differ in other settings of local training: all train by the objective of the first run.
    """
    first, *others = [run.objective.local_settings() for run in runs]
    differ = {name for each in others for name, value in each.items() if value != first.get(name)} | {*runs[0].varied}
    numbers = {run: run.objective.local_numbers() for run in runs}
    fixed = [name for name in differ if name not in numbers[runs[0]]]
    ensure(
        not fixed,
        f"model.{', '.join(fixed)}: runs of one program must have the same, and a callback has changed it in some of "
        "them; start them one by one",
    )
    return {run: {name: its[name] for name in differ} for run, its in numbers.items()}


def _break_off(steps: Sequence[Steps], error: BaseException) -> None:
    """Ends all runs that go on by an error; raises the first other error that a run ends with, such as a full disk."""
    others: list[BaseException] = []
    for each in steps:
        try:
            each.throw(error)
        except BaseException as shown:
            others += [shown] * (shown is not error)
    if others:
        raise others[0] from None


def choose_engine(runs: Sequence[Run]) -> None:
    """Makes the engine that trains all of these runs; "auto" takes that of the checkpoint, or measures on rank 0.

    Args:
        runs: One run, or several that are trained as one program.

    Raises:
        UserError: If the engine cannot run this objective.
    """
    run, fabric, given = runs[0], runs[0].fabric, runs[0].settings.engine
    chosen: EngineName = run.restored.get("engine", "auto") if given == "auto" else given
    if chosen == "auto" and run.finished:
        chosen = "sequential"
    if chosen == "auto":
        jobs, reason = _sample(runs), ""
        if fabric.is_global_zero:
            rounds = (run.max_rounds - run.rounds_done) * run.objective.phases
            chosen, reason, _ = engine.choose(run.make_engine, jobs, rounds, run.settings.compile)
        chosen, reason = fabric.broadcast((chosen, reason))
        if reason and any(isinstance(callback, Progress) for callback in run.callbacks):
            fabric.print(f"engine: {chosen} ({reason})")
    made = run.make_engine(chosen)
    if given != "auto" and (made.trains_several or chosen not in engine.ENGINES) and not run.finished:
        engine.check(made, run.engine, _sample(runs))
    for each in runs:
        each.engine_name, each.engine = chosen, made


def seconds_left(runs: Sequence[Run]) -> float:
    """Returns the seconds that the rest of these runs trains as one program, estimated from one measured round.

    Nothing is compiled for that: it would take longer than many a run.
    """
    run = runs[0]
    jobs, rounds = _sample(runs), (run.max_rounds - run.rounds_done) * run.objective.phases
    make = partial(run.make_engine, compile=False)
    if run.settings.engine == "auto":
        return engine.choose(make, jobs, rounds, compile=False).seconds
    return rounds * engine.seconds(make(run.settings.engine), jobs)


def _sample(runs: Sequence[Run]) -> list[Job]:
    """Returns the jobs of this process in the first phase of the next round, of the runs that train at once next."""
    rounds = [Round(run, Cohort.drawn(run, run.rounds_done)) for run in _together(runs)]
    return [job for each in rounds for job in Phase(each, each.cohort).send()]


@contextmanager
def session(run: Run) -> Iterator[None]:
    """Opens a run, and closes it, whether it ends or breaks off. Every process calls.

    Opening creates the folder, or takes that of the checkpoint, locks it, restores callbacks and starts loggers.

    Raises:
        UserError: If the run cannot be opened, or a mistake ends it before its first round; a new folder is then
            removed.
    """
    with ExitStack() as lock:
        try:
            _restore_callbacks(run)
            _prepare_folder(run, lock)
            _start_loggers(run)
        except BaseException:
            with suppress(Exception):
                _close(run, "failed")
            lock.close()
            _remove(run)
            raise
        run.objective.trained = True
        try:
            run.call("on_fit_start")
            resume.states(run)  # else no checkpoint could be read
            run.stops()  # before the first round, too
            yield
            run.hand_over_model()
            run.call("on_fit_end")
            _close(run, "success")
        except BaseException as error:
            shown = _fail(run, error)
            if isinstance(error, UserError) and error.exit_code == 1 and not run.rounds_done:
                lock.close()
                _remove(run)
            if shown is not error:
                raise shown from None
            raise


def _restore_callbacks(run: Run) -> None:
    states = run.restored.get("callbacks", {})
    for key, callback in by_key(run.callbacks).items():
        if states.get(key):
            try:
                callback.load_state_dict(states[key])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"ckpt_path = {run.checkpoint}: its state of {key} is not one ({folded(repr(error), 120)}); "
                    "take another"
                ) from None


def _prepare_folder(run: Run, lock: ExitStack) -> None:
    """Creates or checks the folder, locks it, and writes config and provenance, all on rank 0."""

    def prepare() -> str:
        if run.checkpoint is None:
            run.enter(RunFolder.create(run.settings.default_root_dir, run.name))
        lock.enter_context(locked(run.folder.path))
        for logger, state in run.run_loggers.items() if run.rounds_done else ():
            logger.check(run.folder.path, state, run.rounds_done)
        run.folder.check_records(run.rounds_done, run.restored.get("records", {}))
        if said := run.folder.write_config(run.config, run.rounds_done, run.restored.get("config", {})):
            run.fabric.print(said)
        provenance.write(
            run.folder.path, run.rounds_done, run.fabric.device, run.fabric.world_size,
            engine=None if run.kind == "centralized" else run.engine_name,
            precision=run.settings.precision,
            config=run.folder.newest_config.name,
            made_by="a config" if run.settings.config else "a program",
        )  # fmt: skip
        provenance.write_directions(run.folder.path, run.directions)
        if run.checkpoint is None:
            provenance.write_partition(run.folder.path, run.data)
        return str(run.folder.path)

    run.enter(RunFolder(Path(on_rank_zero(run.fabric, prepare))))


def _start_loggers(run: Run) -> None:
    for own, state in run.run_loggers.items():
        own.start(run.folder.path, state, run.rounds_done, run.about)
        if run.fabric.is_global_zero and not run.rounds_done and own in run.own_loggers:
            own.log_partition(run.data)
    for logger in run.loggers:
        with suppress(NotImplementedError):  # Fabric's own CSVLogger logs none
            logger.log_hyperparams(run.config)


def _remove(run: Run) -> None:
    """Removes the folder of a run that has not begun, if it is a new one."""
    if run.checkpoint is None and run.fabric.is_global_zero and hasattr(run, "folder"):
        run.folder.remove(run.settings.default_root_dir)


def _fail(run: Run, error: BaseException) -> BaseException:
    """Ends the run by an error, after its last whole round, and returns the error to raise.

    All callbacks are called; the callback that saves the run comes first. Errors of callbacks become notes of the
    returned error.
    """
    found: list[BaseException] = []
    steps = [partial(callback.on_exception, run, error) for callback in reversed(run.callbacks)]
    with undisturbed():  # torchrun, for one, sends a signal to the processes that have lost another one
        for step in (*steps, partial(_close, run, "failed")):
            try:
                step()
            except BaseException as another:
                found.append(another)
    if not isinstance(error, Exception) and found and isinstance(found[0], UserError):
        return found[0]  # the run was interrupted, and could not be saved
    if isinstance(error, OSError):
        error = disk_error(error, run.folder.path) or error
    for one in found:
        error.add_note(f"{type(one).__name__}: {one}")
    return error


def _close(run: Run, status: str) -> None:
    run.data.read_ahead(())
    run.clients.close()
    for logger in run.loggers:
        logger.finalize(status)


@contextmanager
def transaction(run: Run) -> Iterator[None]:
    """Does a round completely or not at all: an error restores the run and its callbacks.

    If the round's checkpoint has been written, the run stays after the round.
    """
    check_interruption()
    run.objective.flat.check(run.objective.net)
    run.before = run.state, [callback.state_dict() for callback in run.callbacks]
    try:
        yield
    except BaseException:
        state, callbacks = run.before
        run.round_metrics = {}
        if run.saved_rounds > state.round:
            run.clients.commit()
        else:
            run.state = state
            run.clients.rollback()
            for callback, its in zip(run.callbacks, callbacks, strict=True):
                if its:
                    callback.load_state_dict(its)
        raise
    run.clients.commit()
