"""The callbacks that every run has, or needs, and which others a trainer accepts; a run's live progress is one."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.callbacks as theirs
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fl_lightning.core import (
    NonNegative,
    NonNegativeInt,
    UserError,
    callback_of_lightning,
    ensure,
    json_text,
    read_json,
    save_figure,
    write_atomically,
)
from fl_lightning.results import (
    SUMMARY,
    command,
    filled,
    fitting,
    flatness_verdict,
    plot_clients,
    plot_curves,
    read_clients,
    summarise,
    tested,
)
from fl_lightning.results.metrics import FILE, MEASUREMENTS, best_of, is_flatness, mode_of, read_metrics, shown, title
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.callbacks.checkpoints import Checkpoints, monitored
from fl_lightning.trainer.callbacks.flatness_monitor import FlatnessMonitor
from fl_lightning.trainer.flight import EVENTS, Event
from fl_lightning.trainer.loggers import WandbLogger
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
            self.console.print(
                f"round {run.rounds_done}/{run.max_rounds}",
                *(f"{title(name)} {_number(run.metrics[name])}" for name in self._columns),
                sep="  ",
                highlight=False,
                soft_wrap=not self.console.is_terminal,
            )

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
        if summary := read_json(run.folder.path / SUMMARY, dict):
            spread = f" ± {_number(summary['std'])}" if summary["std"] else ""
            mean = f"mean {title(summary['metric']).removeprefix('mean ')} {_number(summary['mean'])}{spread}"
            self.console.print(
                f"last {summary['last']} of {summary['rounds']} rounds: {mean} of {summary['evaluations']} evaluations",
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
        hidden = ", ".join(str(column.header) for part in more for column in part.columns[1:])
        return Group(first, *([f"too wide, see {FILE}: {hidden}"] if hidden else []), self._bar)


def _print_how_to_continue(run: Run) -> None:
    if run.folder.last.exists() and (words := run.how_to_continue):
        run.fabric.print(command(*words, before="to continue: "))
    elif run.folder.last.exists():
        method = "fit" if run.kind == "federated" else "centralized"
        run.fabric.print(f'to continue: trainer.{method}(model, data, ckpt_path="{run.folder.last}")')


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1000 or abs(value) < 1e-3 else f"{value:.4f}"


class EarlyStoppingAdapter(Callback):
    """Calls Lightning's ``EarlyStopping`` in each round in which its metric is measured; rank 0 decides for all.

    Args:
        inner: The callback; ``monitor`` is a metric of ours, such as ``server/test/loss``, and ``patience`` counts
            measurements.
    """

    def __init__(self, inner: theirs.EarlyStopping) -> None:
        self.inner = inner

    def begin(self, again: bool) -> None:
        self.load_state_dict(vars(self.inner).setdefault("_begins_as", self.state_dict()))

    def on_fit_start(self, run: Run) -> None:
        inner = self.inner
        waited = inner.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED and inner.wait_count >= inner.patience
        if waited and inner.stopped_epoch == run.rounds_done:
            run.should_stop = True
            run.fabric.print(
                f"stopped early in round {run.rounds_done}: to go on, give EarlyStopping more patience, or leave it out"
            )

    def on_round_end(self, run: Run) -> None:
        metrics = run.round_metrics
        if monitored(run, "EarlyStopping", self.inner.monitor, metrics) is None:
            return
        trainer: Any = SimpleNamespace(
            state=SimpleNamespace(fn=TrainerFn.FITTING),
            sanity_checking=False,
            fast_dev_run=False,
            callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
            strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
            should_stop=run.should_stop,
            current_epoch=run.rounds_done,
            val_check_interval=None,
            world_size=run.fabric.world_size,
            global_rank=run.fabric.global_rank,
        )
        self.inner.setup(trainer, run.objective, "fit")
        self.inner.on_train_epoch_end(trainer, run.objective)
        self.inner.on_validation_end(trainer, run.objective)
        run.should_stop = trainer.should_stop
        if run.should_stop and self.inner.stopping_reason_message:
            run.fabric.print(f"stopped early: {self.inner.stopping_reason_message.partition(' Signaling')[0]}")

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({**state, "patience": self.inner.patience})  # that of now


def with_defaults(callbacks: Sequence[Any], progress: bool) -> list[Callback]:
    """Returns the given callbacks and the default ones, in the order of their calls.

    Args:
        callbacks: Callbacks of this package, or Lightning's ``EarlyStopping``.
        progress: Whether to show live progress and draw a figure at the end; otherwise the run ends with one line.

    Raises:
        UserError: If an object is another callback of Lightning or no callback at all, or if a default callback is
            given twice.
    """
    accepted = [_accepted(callback) for callback in callbacks]
    for singleton in (Checkpoints, Curves, Progress, Results):
        count = sum(isinstance(callback, singleton) for callback in accepted)
        ensure(count <= 1, f"trainer.callbacks: {singleton.__name__} is there {count} times; give it once")
    needed = (Results, Checkpoints, *((Curves, Progress) if progress else (Ending,)))
    accepted += [default() for default in needed if not any(isinstance(callback, default) for callback in accepted)]
    # measurements come first; Progress shows what Results has written; Checkpoints saves when the others have run
    order = (Curves, Results, Progress, Ending, EarlyStoppingAdapter, Checkpoints)
    return sorted(accepted, key=lambda c: next((i + 1 for i, kind in enumerate(order) if isinstance(c, kind)), 0))


def _accepted(callback: Any) -> Callback:
    name = type(callback).__name__
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, theirs.EarlyStopping):
        return EarlyStoppingAdapter(callback)
    ensure(not isinstance(callback, theirs.Callback), callback_of_lightning(name))
    if isinstance(callback, type):
        raise UserError(
            f"trainer.callbacks: {callback.__name__} is a class; give an object, as {callback.__name__}(...)"
        )
    raise UserError(f"trainer.callbacks: {name} is not a callback; write a subclass of fl_lightning.Callback")


class EventLog(Callback):
    """Writes a line for each event; the columns are those of `Event`."""

    @rank_zero_only
    def on_fit_start(self, run: Run) -> None:
        run.folder.drop_later_rounds(EVENTS, run.rounds_done)

    @rank_zero_only
    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        run.folder.append_rows(EVENTS, Event._fields, run.state.training["events"])


class Results(Callback):
    """Writes ``summary.json`` when a run ends: an `fl_lightning.results.summary.Summary` of the data's metric.

    Its mean is the headline. It is taken over the last ``trainer.eval_last`` rounds if that is set and at most half of
    the run, otherwise over the last tenth of the rounds, at most 100. A value that is not finite becomes null.

    Args:
        target: Value that the metric should reach, such as an accuracy of 0.8; null: none.
    """

    def __init__(self, target: float | None = None) -> None:
        self.target = target

    def on_fit_end(self, run: Run) -> None:
        name, metrics = run.data.metric()[0], tested(run.metrics)
        metric = next((metric for metric in metrics if metric.endswith(f"/{name}")), None)
        if run.fabric.is_global_zero and metric:  # a run may stop before its first evaluation
            summary = summarise(run.folder.path, None, self.target, metric, eval_last=run.settings.eval_last)
            write_atomically(run.folder.path / SUMMARY, json_text(summary, indent=2))


class Curves(Callback):
    """Draws ``curves.png`` and ``curves.pdf`` when the run ends: accuracy, loss and flatness by round.

    If each client was evaluated, ``clients.png`` and ``clients.pdf`` show the last evaluation.
    """

    @rank_zero_only
    def on_fit_end(self, run: Run) -> None:
        figures = {"curves": plot_curves({run.folder.name: run.folder.metrics})}
        if clients := read_clients(run.folder.path):
            figures["clients"] = plot_clients({run.folder.name: [clients]})
        for name, figure in figures.items():
            _, png = save_figure(figure, run.folder.path / name)
            for logger in run.own_loggers:
                logger.log_figure(name, png, run.rounds_done)


class PrivacyMonitor(Callback):
    """Logs ``privacy/epsilon`` in every round, and ends the run before the round that would exceed the budget.

    Raises:
        UserError: (in a run) If a logger would publish checkpoints, which hold the key of the noise.
    """

    def check(self, run: Run) -> None:
        for logger in run.loggers:
            ensure(
                not (isinstance(logger, WandbLogger) and logger.log_model and logger.mode != "disabled"),
                "trainer.loggers: WandbLogger.log_model = true: under trainer.privacy checkpoints hold the key of the "
                "noise, and stay here; set it to false",
            )

    def on_fit_start(self, run: Run) -> None:
        rule = run.aggregation
        if isinstance(rule, GaussianPrivacy):
            accountant = rule.accountant
            run.fabric.print(
                f"privacy: epsilon {accountant.epsilon(run.max_rounds):.4g} after {run.max_rounds} rounds at delta "
                f"{rule.delta:g} ({accountant.adjacency}; {accountant.method}; noise multiplier "
                f"{rule.noise_multiplier_of_run:.4g}), of the model. Not private: training losses, other metrics of "
                "clients and their data, the run folder, which holds the noise's key and clients' state"
            )
            if rule.noise_seed is not None:
                run.fabric.print(f"privacy: noise_seed = {rule.noise_seed} makes the noise public: it protects nobody")
            self._check_budget(run, rule)

    def on_round_end(self, run: Run) -> None:
        rule = run.aggregation
        if isinstance(rule, GaussianPrivacy):
            run.log({"privacy/epsilon": rule.accountant.epsilon(run.rounds_done)})
            self._check_budget(run, rule)

    def _check_budget(self, run: Run, rule: GaussianPrivacy) -> None:
        if rule.within_budget(run.rounds_done + 1) or run.rounds_done >= run.max_rounds:
            return
        run.should_stop = True
        spent = rule.accountant.epsilon(run.rounds_done)
        run.fabric.print(
            f"privacy: stopped after round {run.rounds_done}: epsilon {spent:.4g}, and another round would exceed "
            f"trainer.privacy.epsilon = {rule.epsilon}"
        )
