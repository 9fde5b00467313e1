"""The engine of a run, and the loop over its rounds; the local training of several runs may be one program."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

from fl_lightning import engine
from fl_lightning.core import UserError, contents_kept, ensure
from fl_lightning.engine import EngineName, Job, LocalResult
from fl_lightning.trainer import program
from fl_lightning.trainer.callbacks import Checkpoints, Progress
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.measurements.clients import evaluate_round
from fl_lightning.trainer.round import Phase, Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import Interruption, unbroken_output
from fl_lightning.trainer.session import session, transaction

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
    round = Round(run, cohort, partial(run.call, "on_local_end"))
    run.call("on_round_start", run.round_context(cohort.t), cohort.clients)
    for phase in round.phases():
        results = yield phase.send()
        phase.receive(results)
        phase.step()
    round.apply()
    return round.metrics(), round.losses.tolist()


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
    for checkpoints in (callback for callback in run.callbacks if isinstance(callback, Checkpoints)):
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
                job_counts = {run: len(jobs[run]) for run in _together([run for run in runs if run in jobs])}
                own_numbers = _own_numbers(runs)
                all_jobs = [replace(job, settings=own_numbers[run]) for run in job_counts for job in jobs[run]]
                results = iter(runs[0].engine.train(all_jobs))
                if len(job_counts) > 1:  # what breaks one run off leaves the results of the others
                    results = iter(list(results))
                for run, count in job_counts.items():
                    advance(run, islice(results, count))
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
    names = {name for settings in others for name, v in settings.items() if v != first.get(name)} | {*runs[0].varied}
    numbers = {run: run.objective.local_numbers() for run in runs}
    fixed = [name for name in names if name not in numbers[runs[0]]]
    ensure(
        not fixed,
        f"model.{', '.join(fixed)}: runs of one program must have the same, and a callback has changed it in some of "
        "them; start them one by one",
    )
    return {run: {name: values[name] for name in names} for run, values in numbers.items()}


def _break_off(steps: Sequence[Steps], error: BaseException) -> None:
    """Ends all runs that go on by an error; raises the first other error that a run ends with, such as a full disk."""
    others: list[BaseException] = []
    for generator in steps:
        try:
            generator.throw(error)
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
    first, fabric, setting = runs[0], runs[0].fabric, runs[0].settings.engine
    chosen: EngineName = first.restored.get("engine", "auto") if setting == "auto" else setting
    if chosen == "auto" and first.finished:
        chosen = "sequential"
    if chosen == "auto":
        reason = ""
        if fabric.is_global_zero:
            rounds = (first.max_rounds - first.rounds_done) * first.objective.phases
            with _sample(runs) as jobs:
                chosen, reason, _ = engine.choose(first.make_engine, jobs, rounds, first.settings.compile)
        chosen, reason = fabric.broadcast((chosen, reason))
        if reason and any(isinstance(callback, Progress) for callback in first.callbacks):
            fabric.print(f"engine: {chosen} ({reason})")
    new_engine = first.make_engine(chosen)
    several = new_engine.trains_several or chosen not in engine.ENGINES
    if not first.finished and not (several and setting == "auto"):
        with _sample(runs) as jobs:
            if several:
                engine.check(new_engine, first.engine, jobs)
            elif isinstance(new_engine, engine.SequentialEngine):
                engine.check_repeatable(first.engine, jobs)
    for run in runs:
        run.engine_name, run.engine = chosen, new_engine


def seconds_left(runs: Sequence[Run]) -> float:
    """Returns the seconds that the rest of these runs trains as one program, estimated from one measured round.

    Nothing is compiled for that: it would take longer than many a run.
    """
    run = runs[0]
    rounds = (run.max_rounds - run.rounds_done) * run.objective.phases
    make = partial(run.make_engine, compile=False)
    with _sample(runs) as jobs:
        if run.settings.engine == "auto":
            return engine.choose(make, jobs, rounds, compile=False).seconds
        return rounds * engine.seconds(make(run.settings.engine), jobs)


@contextmanager
def _sample(runs: Sequence[Run]) -> Iterator[list[Job]]:
    """Yields the jobs of this process in the first phase of the next round, of the runs that train at once next.

    On exit, hooks have kept nothing of it.
    """
    together = _together(runs)
    with contents_kept([owner for run in together for owner in run.objective.configured]):
        rounds = [Round(run, Cohort.drawn(run, run.rounds_done)) for run in together]
        yield [job for round in rounds for job in Phase(round, round.cohort).send()]
