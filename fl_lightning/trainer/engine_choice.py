"""The engine of a run."""

from collections.abc import Sequence
from functools import partial

from fl_lightning import engine
from fl_lightning.engine import EngineName, Job
from fl_lightning.trainer.callbacks.defaults import Progress
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.round import Phase, Round
from fl_lightning.trainer.run import Run


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
    """Returns the jobs of this process in the first phase of the next round, of the runs that are furthest behind."""
    behind = min(run.rounds_done for run in runs)
    rounds = [Round(run, Cohort.drawn(run, behind)) for run in runs if run.rounds_done == behind]
    return [job for each in rounds for job in Phase(each, each.cohort).send()]
