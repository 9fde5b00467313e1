"""The events of an asynchronous server, in ``events.csv`` of the run folder."""

from collections.abc import Mapping

from fl_lightning.trainer.flight import EVENTS, Event
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.storage import records


class EventLog(Callback):
    """Writes a line for each event; the columns are those of `Event`."""

    def on_fit_start(self, run: Run) -> None:
        path = run.folder.path / EVENTS
        if run.fabric.is_global_zero:
            records.drop_later_rounds(path, run.rounds_done)

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        path = run.folder.path / EVENTS
        if run.fabric.is_global_zero:
            records.append_rows(path, Event._fields, run.state.training["events"])
