"""The live progress of a run, and the summary at its end."""

from collections import deque
from collections.abc import Mapping

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fl_lightning.core import NonNegative, NonNegativeInt, read_json
from fl_lightning.results import SUMMARY, command, filled, fitting, flatness_verdict
from fl_lightning.results.metrics import FILE, MEASUREMENTS, best_of, is_flatness, mode_of, read_metrics, shown, title
from fl_lightning.trainer.callbacks.flatness_monitor import FlatnessMonitor
from fl_lightning.trainer.run import Callback, Run

MOST, AROUND = 200, 6
"""Most rounds of the live table; lines of the terminal that it leaves to its head, the bar and the lines above it."""


class Ending(Callback):
    """Prints the run folder when a run ends, and how to continue one that breaks off.

    It is the only output when the progress bar is off.
    """

    def on_exception(self, run: Run, error: BaseException) -> None:
        _print_how_to_continue(run)

    def on_fit_end(self, run: Run) -> None:
        run.fabric.print(f"results: {run.folder.path}")


class Progress(Callback):
    """A live table of the last rounds with a bar, and a summary at the end; plain lines where there is no terminal.

    Args:
        rows: Number of rounds that the table shows; null: as many as fit.
        min_seconds: Least time between two plain lines, in seconds.
    """

    def __init__(self, rows: NonNegativeInt | None = None, min_seconds: NonNegative = 1.0) -> None:
        self.rows, self.min_seconds = rows, min_seconds
        self.console = Console()
        self._live: Live | None = None

    def needs_round(self, t: int) -> bool:
        return False  # it shows the rounds that there are

    @rank_zero_only
    def on_fit_start(self, run: Run) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=MOST if self.rows is None else self.rows)
        self._columns: list[str] = []
        self._last_line = 0.0
        data = run.data
        self.console.print(
            f"[bold]{type(run.objective).__name__}[/] on {type(data).__name__}: {data.num_clients} clients, "
            f"{run.objective.flat.d:,} weights, {run.max_rounds} rounds"
            + (f", going on after round {run.rounds_done}" if run.rounds_done else ""),
            highlight=False,
            soft_wrap=not self.console.is_terminal,
        )
        self.console.print(f"run folder: {run.folder.path}", highlight=False, soft_wrap=True)
        self._bar = Bar(
            TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._bar.add_task("round", total=run.max_rounds, completed=run.rounds_done)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(self._view(), console=self.console, refresh_per_second=8)
            self._live.start()

    @rank_zero_only
    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=run.rounds_done)
        self._columns = shown(run.metrics)
        self._recent.append({**metrics, "round": run.rounds_done})
        if self._live is not None:
            self._live.update(self._view())
        elif self._bar.get_time() - self._last_line >= self.min_seconds or run.finished:
            self._last_line = self._bar.get_time()
            known = [f"{title(name)} {_number(run.metrics[name])}" for name in self._columns]
            line = "  ".join([f"round {run.rounds_done}/{run.max_rounds}", *known])
            self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

    @rank_zero_only
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._stop()
        self.console.print(f"stopped after round {run.rounds_done}", highlight=False)
        _print_how_to_continue(run)

    @rank_zero_only
    def on_fit_end(self, run: Run) -> None:
        self._stop()
        columns = read_metrics(run.folder.metrics)
        bests = {name: best_of(columns[name], mode_of(name, None, run.directions)) for name in shown(columns)}
        rows = [
            # of flatness no best: an untrained net is flat
            [title(n), _number(columns[n][-1][1]), *([] if is_flatness(n) else [_number(best), str(at)])]
            for n, (at, best) in bests.items()
        ]
        self.console.print(filled(["", "last", "best", "at round"], rows, box=None))
        if found := read_json(run.folder.path / SUMMARY, dict):
            spread = f" ± {_number(found['std'])}" if found["std"] else ""
            mean = f"mean {title(found['metric']).removeprefix('mean ')} {_number(found['mean'])}{spread}"
            self.console.print(
                f"last {found['last']} of {found['rounds']} rounds: {mean} of {found['evaluations']} evaluations",
                highlight=False,
            )
        seconds = sum(value for name in ("time/round_s", "time/flatness_s") for _, value in columns.get(name, ()))
        bits = run.metrics.get("comm/total_bits")
        wire = "" if bits is None else f", {bits / 8e6:,.1f} MB over the wire"
        protocol = f"; protocols: {MEASUREMENTS}" if any(isinstance(c, FlatnessMonitor) for c in run.callbacks) else ""
        self.console.print(f"{run.rounds_done} rounds in {seconds:.1f} s{wire}{protocol}", highlight=False)
        if verdict := flatness_verdict(columns):
            self.console.print(f"flatness: {verdict}", highlight=False, soft_wrap=not self.console.is_terminal)
        self.console.print(f"results: {run.folder.path}", highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _view(self) -> Group:
        rows = [
            [f"{row['round']:.0f}", *(_number(row.get(name)) for name in self._columns)]
            for row in list(self._recent)[-max(1, self.console.height - AROUND) :]
        ]
        table = filled(["round", *map(title, self._columns)], rows, left=0, box=None)
        first, *more = fitting(table, self.console.width)
        left = ", ".join(str(column.header) for part in more for column in part.columns[1:])
        return Group(first, *([f"too wide, see {FILE}: {left}"] if left else []), self._bar)


def _print_how_to_continue(run: Run) -> None:
    if run.folder.last.exists() and (words := run.how_to_continue):
        run.fabric.print(command(*words, before="to continue: "))
    elif run.folder.last.exists():
        method = "fit" if run.kind == "federated" else "centralized"
        run.fabric.print(f'to continue: trainer.{method}(model, data, ckpt_path="{run.folder.last}")')


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1000 or abs(value) < 1e-3 else f"{value:.4f}"
