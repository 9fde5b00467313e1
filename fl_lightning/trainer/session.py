"""A run on disk, from its start to its end: folder, lock, loggers and callbacks; a round as a transaction."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.algorithms.composed import same_setting
from fl_lightning.core import UserError, disk_error, folded
from fl_lightning.trainer import resume
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import check_interruption, on_rank_zero, undisturbed
from fl_lightning.trainer.storage import RunFolder, by_key, locked, provenance


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
            run.unsaved = resume.unsaved(run)
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
    if unsaved := run.restored.get("unsaved"):
        rank_zero_warn(
            f"trainer.callbacks: {', '.join(unsaved)} changed before the checkpoint, which lacks it, and begins anew; "
            "define state_dict and load_state_dict",
            stacklevel=4,
        )


def _prepare_folder(run: Run, lock: ExitStack) -> None:
    """Creates or checks the folder, locks it, and writes config and provenance, all on rank 0."""

    def prepare() -> str:
        if run.checkpoint is None:
            run.enter(RunFolder.create(run.settings.default_root_dir, run.name))
        lock.enter_context(locked(run.folder.path))
        for logger, state in run.run_loggers.items() if run.rounds_done else ():
            logger.check(run.folder.path, state, run.rounds_done)
        run.folder.check_records(run.rounds_done, run.restored.get("records", {}))
        if message := run.folder.write_config(run.config, run.rounds_done, run.restored.get("config", {})):
            run.fabric.print(message)
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
    for run_logger, state in run.run_loggers.items():
        run_logger.start(run.folder.path, state, run.rounds_done, run.about)
        if run.fabric.is_global_zero and not run.rounds_done and run_logger in run.own_loggers:
            run_logger.log_partition(run.data)
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
    errors: list[BaseException] = []
    steps = [partial(callback.on_exception, run, error) for callback in reversed(run.callbacks)]
    with undisturbed():  # torchrun, for one, sends a signal to the processes that have lost another one
        for step in (*steps, partial(_close, run, "failed")):
            try:
                step()
            except BaseException as another:
                errors.append(another)
    if not isinstance(error, Exception) and errors and isinstance(errors[0], UserError):
        return errors[0]  # the run was interrupted, and could not be saved
    if isinstance(error, OSError):
        error = disk_error(error, run.folder.path) or error
    for failure in errors:
        error.add_note(f"{type(failure).__name__}: {failure}")
    return error


def _close(run: Run, status: str) -> None:
    run.data.read_ahead(())
    run.clients.close()
    for logger in run.loggers:
        logger.finalize(status)


@contextmanager
def transaction(run: Run) -> Iterator[None]:
    """Does a round completely or not at all: an error restores the run, its callbacks, and the model's settings.

    If the round's checkpoint has been written, the run stays after the round.
    """
    check_interruption()
    run.objective.flat.check(run.objective.net)
    run.before = run.state, [callback.state_dict() for callback in run.callbacks]
    settings = run.objective.named_settings()
    try:
        yield
    except BaseException:
        state, callback_states = run.before
        run.round_metrics = {}
        if run.saved_rounds > state.round:
            run.clients.commit()
        else:
            run.state = state
            run.clients.rollback()
            for callback, callback_state in zip(run.callbacks, callback_states, strict=True):
                if callback_state:
                    callback.load_state_dict(callback_state)
            for name, value in run.objective.named_settings().items():
                if name in settings and not same_setting(settings[name], value):
                    run.objective.change_setting(name, settings[name])
        raise
    run.clients.commit()
