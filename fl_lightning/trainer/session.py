"""A run on disk, from its start to its end: folder, lock, loggers and callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.core import Interruption, UserError
from fl_lightning.core.errors import add_note
from fl_lightning.core.files import disk_error
from fl_lightning.trainer import provenance
from fl_lightning.trainer.collectives import on_rank_zero
from fl_lightning.trainer.lock import RunLock
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.output import unbroken_output
from fl_lightning.trainer.run import Run, state_keys
from fl_lightning.trainer.run_folder import RunFolder


@contextmanager
def session(run: Run) -> Iterator[None]:
    """Opens the run, and ends it, however it ends."""
    its = Session(run)
    with Interruption(), unbroken_output():
        its.open()
        try:
            run.call("on_fit_start")
            yield
            its.end()
        except BaseException as error:
            if (shown := its.fail(error)) is not error:
                raise shown from None
            raise


class Session:
    """Opens a run, and ends it; every process does.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lock: RunLock | None = None

    def open(self) -> None:
        """Creates the folder, or opens that of the checkpoint; restores callbacks and starts loggers.

        Raises:
            UserError: If it cannot be opened; a new folder is then removed, and one of a checkpoint as it was.
        """
        try:
            self._restore_callbacks()
            self._prepare_folder()
            self._start_loggers()
        except BaseException:
            self._give_up()
            raise

    def end(self) -> None:
        """Ends the run: the net holds the global model."""
        run = self.run
        run.net.move_to(run.global_model.clone())
        run.load_statistics(run.global_model)
        run.call("on_fit_end")
        self._close("success")

    def fail(self, error: BaseException) -> BaseException:
        """Ends the run by an error, after its last whole round; returns the error to raise.

        Every callback is called, the one that saves first. Their own errors go into notes to the first one.
        """
        found: list[BaseException] = []
        steps = [partial(callback.on_exception, self.run, error) for callback in reversed(self.run.callbacks)]
        for step in (*steps, partial(self._close, "failed")):
            try:
                step()
            except BaseException as another:  # noqa: PERF203  the others' turn comes all the same
                found.append(another)
        if not isinstance(error, Exception) and found and isinstance(found[0], UserError):
            return found[0]  # it was to end, and could not be saved
        if isinstance(error, OSError):
            error = disk_error(error, self.run.folder.path) or error
        for one in found:
            add_note(error, f"{type(one).__name__}: {one}")
        return error

    def _restore_callbacks(self) -> None:
        run = self.run
        states = run.restored.get("callbacks", {})
        for key, callback in zip(state_keys(run.callbacks), run.callbacks, strict=True):
            if states.get(key):
                try:
                    callback.load_state_dict(states[key])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise UserError(
                        f"ckpt_path = {run.checkpoint}: its state of {key} is not one ({error!r}); take another"
                    ) from None

    def _prepare_folder(self) -> None:
        """Creates or checks the folder, locks it, and writes what the run is made with; rank 0 does."""
        run, settings = self.run, self.run.settings
        if settings.config:
            run.config = {**settings.config}
            run.config["trainer"] = {**run.config["trainer"], "engine": run.engine_name}

        def prepare() -> str:
            if run.checkpoint is None:
                run.folder = RunFolder.create(settings.default_root_dir, run.name)
            self._lock = RunLock(run.folder.path)
            for logger, state in self._logger_states() if run.rounds_done else ():
                logger.check(run.folder.path, state, run.rounds_done)
            if run.config and (said := run.folder.write_config(run.config, run.rounds_done)):
                run.fabric.print(said)
            self._write_origin()
            return str(run.folder.path)

        run.folder = RunFolder(Path(on_rank_zero(run.fabric, prepare)))
        run.clients.open(run.folder.clients)

    def _write_origin(self) -> None:
        """Writes what the run is made with, and of a new one how its data are divided."""
        run = self.run
        path, fabric, engine = run.folder.path, run.fabric, None if run.kind == "centralized" else run.engine_name
        config = run.folder.newest_config.name if run.config else None
        provenance.write(
            path, run.rounds_done, fabric.device, fabric.world_size,
            engine=engine, precision=run.settings.precision, config=config,
        )  # fmt: skip
        provenance.write_directions(path, run.directions)
        if run.checkpoint is None:
            provenance.write_partition(path, run.data)

    def _start_loggers(self) -> None:
        run = self.run
        about, rank0 = run.settings.about(run.objective, run.data, run.kind), run.fabric.is_global_zero
        states = dict(self._logger_states())
        for logger in run.loggers:
            if isinstance(logger, RunLogger):
                logger.start(run.folder.path, states[logger], run.rounds_done, about)
                if rank0 and not run.rounds_done:
                    logger.log_partition(run.data)
            with suppress(NotImplementedError):  # Fabric's own CSVLogger logs none
                logger.log_hyperparams(run.config)

    def _logger_states(self) -> list[tuple[RunLogger, dict[str, Any]]]:
        states, loggers = self.run.restored.get("loggers", {}), self.run.loggers
        keyed = zip(state_keys(loggers), loggers, strict=True)
        return [(logger, states.get(key, {})) for key, logger in keyed if isinstance(logger, RunLogger)]

    def _give_up(self) -> None:
        """Leaves nothing behind of a run that could not be opened."""
        run = self.run
        with suppress(Exception):
            self._close("failed")
        if run.checkpoint is None and run.fabric.is_global_zero and hasattr(run, "folder"):
            run.folder.remove(run.settings.default_root_dir)

    def _close(self, status: str) -> None:
        run = self.run
        run.data.read_ahead(())
        run.clients.close()
        try:
            for logger in run.loggers:
                logger.finalize(status)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
