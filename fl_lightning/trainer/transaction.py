"""All of a round or nothing: what an error in a round restores."""

from collections.abc import Iterator
from contextlib import contextmanager

from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.signals import check_interruption


@contextmanager
def transaction(run: Run) -> Iterator[None]:
    """Does a round completely or not at all: an error restores the run and its callbacks.

    If the round's checkpoint has been written, the run stays after the round.
    """
    check_interruption()
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


@contextmanager
def before_the_round(run: Run) -> Iterator[None]:
    """Within it, state and clients' rows are those before the round or program that has just been trained."""
    state, rows = run.state, run.clients.rollback()
    run.state = run.before[0]
    try:
        yield
    finally:
        run.state = state
        run.clients.stage(rows)
