"""What a person sees while a run goes on, and at its end."""

import json
from collections.abc import Iterable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fl_lightning.core import NonNegative, Whole
from fl_lightning.results.metrics import mode_of, read_metrics
from fl_lightning.results.summary import Summary
from fl_lightning.results.verdict import flatness_verdict
from fl_lightning.trainer.callbacks.flatness_monitor import FlatnessMonitor
from fl_lightning.trainer.callbacks.results import FILE
from fl_lightning.trainer.measurements import PROTOCOL
from fl_lightning.trainer.run import Callback, Run

COLUMNS = {
    "server/test/acc": "test acc",
    "server/test/miou": "test mIoU",
    "server/test/loss": "test loss",
    "client/train/loss": "train loss",
    "flatness/lambda_max": "lambda_max",
    "flatness/discrepancy": "discrepancy",
}


def titles(names: Iterable[str]) -> dict[str, str]:
    """Titles of what is shown, by name: `COLUMNS`, and what else is evaluated on the test set.

    Args:
        names: Of metrics.
    """
    test = "server/test/"
    further = {name: f"test {name.removeprefix(test)}" for name in names if name.startswith(test)}
    return COLUMNS | {name: title for name, title in further.items() if name not in COLUMNS}


class Ending(Callback):
    """Prints the run folder when a run ends, and how to continue one that breaks off.

    It is all that is seen without the live progress.
    """

    def on_exception(self, run: Run, error: BaseException) -> None:
        _print_how_to_continue(run)

    def on_fit_end(self, run: Run) -> None:
        run.fabric.print(f"results: {run.folder.path}")


class Progress(Callback):
    """A live table of the last rounds with a bar, and a summary at the end; plain lines where there is no terminal.

    Args:
        rows: Rounds shown at a time.
        min_seconds: Least time between two plain lines.
    """

    def __init__(self, rows: Whole = 8, min_seconds: NonNegative = 1.0) -> None:
        self.rows, self.min_seconds = rows, min_seconds
        self.console = Console()
        self._live: Live | None = None
        self._recent: list[list[str]] = []
        self._last_line = 0.0

    def on_fit_start(self, run: Run) -> None:
        if not run.fabric.is_global_zero:
            return
        self._recent = []
        self._columns = titles(f"server/test/{name}" for name in run.directions)
        data = run.data
        self.console.print(
            f"[bold]{type(run.objective).__name__}[/] on {type(data).__name__}: {data.num_clients} clients, "
            f"{run.objective.flat.d:,} weights, {run.max_rounds} rounds"
            + (f", going on after round {run.rounds_done}" if run.rounds_done else ""),
            highlight=False,
        )
        self.console.print(f"run folder: {run.folder.path}", highlight=False, soft_wrap=True)
        self._bar = Bar(
            TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._bar.add_task("round", total=run.max_rounds, completed=run.rounds_done)
        if self.console.is_terminal:
            self._live = Live(self._view(), console=self.console, refresh_per_second=8)
            self._live.start()

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        if not run.fabric.is_global_zero:
            return
        self._bar.update(self._task, completed=run.rounds_done)
        row = [str(run.rounds_done), *(_number(metrics.get(name)) for name in self._columns)]
        self._recent = [*self._recent, row][-self.rows :]
        if self._live is not None:
            self._live.update(self._view())
        elif self._bar.get_time() - self._last_line >= self.min_seconds or run.rounds_done == run.max_rounds:
            self._last_line = self._bar.get_time()
            known = [(title, run.metrics[name]) for name, title in self._columns.items() if name in run.metrics]
            line = "  ".join([f"round {run.rounds_done}/{run.max_rounds}", *(f"{t} {_number(v)}" for t, v in known)])
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if run.fabric.is_global_zero:
            self._stop()
            self.console.print(f"stopped after round {run.rounds_done}", highlight=False)
        _print_how_to_continue(run)

    def on_fit_end(self, run: Run) -> None:
        if not run.fabric.is_global_zero:
            return
        self._stop()
        columns = read_metrics(run.folder.metrics)
        table = Table(title="Summary", show_header=True)
        for title in ("", "last", "best", "at round"):
            table.add_column(title, justify="left" if not title else "right")
        for name, title in self._columns.items():
            if name in columns:
                pick = max if mode_of(name, None, run.directions) == "max" else min
                at, best = pick(columns[name], key=lambda pair: pair[1])
                table.add_row(title, _number(columns[name][-1][1]), _number(best), str(at))
        self.console.print(table)
        if (run.folder.path / FILE).exists():
            found = Summary(**json.loads((run.folder.path / FILE).read_text()))
            name, spread = (
                self._columns.get(found.metric, found.metric),
                f" ± {_number(found.std)}" if found.std else "",
            )
            mean = f"mean {name} {_number(found.mean)}{spread} of {found.evaluations} evaluations"
            self.console.print(f"last {found.last} rounds: {mean}", highlight=False)
        seconds = sum(value for name in ("time/round_s", "time/flatness_s") for _, value in columns.get(name, ()))
        bits = run.metrics.get("comm/total_bits")
        wire = "" if bits is None else f", {bits / 8e6:,.1f} MB over the wire"
        self.console.print(f"{run.rounds_done} rounds in {seconds:.1f} s{wire}", highlight=False)
        if verdict := flatness_verdict(columns):
            self.console.print(f"flatness: {verdict}", highlight=False, soft_wrap=True)
        monitors = [callback for callback in run.callbacks if isinstance(callback, FlatnessMonitor)]
        if any(monitor.protocol for monitor in monitors):
            self.console.print(f"measured with: {PROTOCOL}; seed {run.seed}", highlight=False, soft_wrap=True)
        for line in (line for monitor in monitors for line in monitor.protocol):
            self.console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)
        self.console.print(f"results: {run.folder.path}", highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        table = Table("round", *self._columns.values(), box=None)
        for column in table.columns:
            column.justify, column.min_width = "right", 10
        for row in self._recent:
            table.add_row(*row)
        return Group(table, self._bar)


def _print_how_to_continue(run: Run) -> None:
    if run.folder.last.exists():
        run.fabric.print(f"to continue: {run.how_to_continue}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1000 or abs(value) < 1e-3 else f"{value:.4f}"
