"""A run: its state, its objects, and the hooks of its callbacks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    Checked,
    Named,
    RoundContext,
    State,
    UserError,
    config_of,
    ensure,
    seeded,
    similar,
)
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import EngineName, LocalResult, dry_step
from fl_lightning.engine.rounds import Rounds
from fl_lightning.results import group_id, is_protected, only_python
from fl_lightning.trainer.evaluation import Split
from fl_lightning.trainer.experiment import Experiment, Timing
from fl_lightning.trainer.loggers import About, RunLogger
from fl_lightning.trainer.settings import Kind, Settings
from fl_lightning.trainer.storage import ClientStore, RunFolder, RunState, by_key

COUNTERS = {
    "client/diverged", "client/passes", "client/steps", "clock/time_s", "comm/total_bits", "comm/transmissions",
}  # fmt: skip
"""Metrics that a round adds to."""


class Callback(Checked, key="trainer.callbacks: {}"):
    """Base class of callbacks: override the hooks that you need.

    They are called in the order given. A hook leaves the run as it is, but ``run.log`` adds metrics to the round's, and
    ``run.should_stop = True`` ends the run. Every process calls every hook, except `on_local_end`: only of its clients.
    """

    _made: tuple[tuple[Any, ...], dict[str, Any]]
    _begins_as: Mapping[str, Any] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        callback = super().__new__(cls)
        callback._made = args, kwargs
        return callback

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = [name for name in dir(Callback) if name.startswith("on_")]
        for name in (name for name in vars(cls) if name.startswith("on_") and name not in hooks):
            suggestions = " or ".join(similar(name, hooks) or hooks)
            rank_zero_warn(f"{cls.__name__}.{name}: no hook, nothing calls it; did you mean {suggestions}?")

    def reset(self) -> None:
        """Forgets an earlier run when a trainer begins one: calls the constructor once more with the same arguments."""
        args, kwargs = arguments = self._made
        vars(self).clear()
        self._made = arguments
        type(self).__init__(self, *args, **kwargs)

    def begin(self, again: bool) -> None:
        """Takes the state with which it began its first run; for another run of one trainer it is made again first."""
        if again:
            self.reset()
        if self._begins_as:
            self.load_state_dict(deepcopy(self._begins_as))
        else:
            with suppress(AttributeError):  # of a state that `on_fit_start` makes
                self._begins_as = deepcopy(self.state_dict())

    def needs_round(self, t: int) -> bool:
        """Returns whether the callback needs round ``t``, from 0: its local models, or the run at its end.

        By default it needs every round if it overrides a hook that a round calls, otherwise none. Rounds that nobody
        needs may run as one program, which ends with one that somebody needs. A callback that overrides
        `on_round_start` or `on_local_end` has that round to itself if it needs it, and else none of its hooks is called
        but `on_round_logged`.
        """
        return self.overrides("on_round_start", "on_local_end", "on_round_end", "on_round_logged")

    def overrides(self, *hooks: str) -> bool:
        """Returns whether the callback overrides one of some hooks."""
        return any(hook in vars(self) or getattr(type(self), hook) is not getattr(Callback, hook) for hook in hooks)

    def check(self, run: Run) -> None:
        """Called before the run has a folder: raises a `UserError` if the callback does not suit the run."""

    def on_fit_start(self, run: Run) -> None:
        """Called when the state is initialized or restored: ``run.rounds_done`` rounds are done."""

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
        """Called when a cohort has been drawn."""

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        """Called when a client has trained."""

    def on_round_end(self, run: Run) -> None:
        """Called when the server has its new state and evaluation, if due, is done; add metrics by ``run.log``.

        This is the place to set ``run.should_stop``. Set later, it ends the run after the next round.
        """

    def on_last_round(self, run: Run) -> None:
        """Called after `on_round_end` if this round has become the last one before ``max_rounds``.

        Evaluation is done. A callback that measures some rounds only measures this one now.
        """

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called when all metrics of the round have gone to the loggers."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when the run breaks off; ``run`` holds the state after its last whole round.

        The last callback is called first: the run is saved before others have their turn.
        """

    def on_fit_end(self, run: Run) -> None:
        """Called when the run has ended: after all rounds, or earlier if something has stopped it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two rounds. Later rounds replace its values and never change them in place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; not called if that was empty."""


class Run(Experiment):
    """A run, which callbacks get and ``FederatedTrainer.fit`` returns: an experiment, and how far it is.

    The constructor does what that of `Experiment` does. A round replaces `state` and the clients' rows, nothing else.

    Args:
        settings: The trainer's settings.
        callbacks: The callbacks, in the order of their calls.
        loggers: The loggers.
        objective: The local objective.
        data: The clients' data.
        kind: Federated or centralized training.
        varied: Settings of the objective that differ between runs trained as one program, by name.

    Attributes:
        engine: Runs local training.
        rounds: Trains programs of rounds with the engine; None before the first.
        engine_name: Name of the engine; "auto" until one is chosen.
        upload_shapes: Shapes of what a client uploads, by phase and name.
        state: The state after the rounds so far.
        clients: The state of the clients that this process owns.
        contract: What a dry step has shown of each phase.
        timing: The seconds of clients; None: there is no clock.
        before: While a round goes on, the state before it, and those of the callbacks.
        round_metrics: Metrics of the current round so far.
        should_stop: Ends the run; a callback may set it.
        checkpoint: The checkpoint that the run was restored from.
        first_settings: The objective's plain settings when the run was made; callbacks may change them.
        sources: Hash of samples, code and files as they were when the run began; None: not under privacy.
        first_round: Rounds done when this process began.
        restored: Content of that checkpoint, without the clients' rows, which would lie in memory twice.
        unsaved: Numbers and text of callbacks without a ``state_dict``, as they were when this process began, by name.
        folder: The run's folder; of a restored run, that of the checkpoint.
        callback_s: Seconds spent in callbacks.
        evaluation_s: Seconds of the last evaluation; 0 before the first.
        saved_rounds: Rounds done when a checkpoint was last written.
    """

    folder: RunFolder

    def __init__(
        self,
        settings: Settings,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
        objective: LocalObjective,
        data: FederatedDataModule,
        kind: Kind = "federated",
        varied: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(settings, objective, data, kind, varied)
        self.callbacks, self.loggers = list(callbacks), list(loggers)
        self.engine_name: EngineName = settings.engine
        self.engine = self.make_engine("sequential")
        self.rounds: Rounds | None = None
        self.upload_shapes: dict[int, dict[str, list[int]]] = {}
        w0 = self.fabric.broadcast(self.net.w.cpu()).to(self.fabric.device, copy=True)  # the same on every process
        inits = {**objective.server_inits(), **self.aggregation.server_state}
        self.state = RunState(State({"w": w0, **State.initial(inits, w0, w0)}))
        with seeded(w0.device, self.seed, "dry step"):
            self.contract = dry_step(self.engine, self.server, w0, data.num_classes, self.round_context(0))
        clock = settings.clock
        self.timing = None if clock is None else Timing(settings, clock, objective, data, self.contract)
        place = self.fabric.global_rank, self.fabric.world_size
        self.clients = ClientStore(objective.client_inits(), w0, settings.client_memory, *place)
        self.before: tuple[RunState, list[dict[str, Any]]] = self.state, []
        self.round_metrics: dict[str, float] = {}
        self.checkpoint: Path | None = None
        self.sources: str | None = None
        self.first_round, self.restored, self.unsaved = 0, dict[str, Any](), dict[str, Any]()
        self.first_settings = objective.named_settings()
        self.should_stop = self._stopped = False
        self.saved_rounds, self._opened = -1, time.monotonic()
        self.callback_s = self.evaluation_s = 0.0

    def __repr__(self) -> str:
        """Returns name, size and progress."""
        return (
            f"Run({self.name}: {self.data.num_clients:,} clients, {self.net.w.numel():,} weights, round "
            f"{self.rounds_done:,} of {self.max_rounds:,})"
        )

    @property
    def server(self) -> State:
        """The server's state."""
        return self.state.server

    @property
    def rounds_done(self) -> int:
        """Number of rounds done."""
        return self.state.round

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest value of every metric."""
        return Named(self.state.metrics)

    @property
    def global_model(self) -> Tensor:
        """Weights ``(d,)`` that evaluation, flatness and export use: the average under SWA, otherwise the server's."""
        averaging = self.objective.averaging
        return self.server.w if averaging is None else averaging.model(self.server)

    @property
    def next_round(self) -> int:
        """The round to come, from 0; after the last one, the last one."""
        return min(self.rounds_done, self.max_rounds - 1)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, those before it was resumed included."""
        return float(self.restored.get("elapsed", 0.0)) + time.monotonic() - self._opened

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config with the engine's name; without the command line that of the objects."""
        return {**self._config, "trainer": {**self._config["trainer"], "engine": self.engine_name}}

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self.settings.config or config_of(self.settings, self.objective, self.data)

    @property
    def about(self) -> About:
        """What loggers sort runs by."""
        kind: Kind = self.restored.get("kind", self.kind)
        tags = (type(self.objective).__name__, type(self.data).__name__)
        group = "-".join([*tags, group_id(self._config)])
        return About("fit" if kind == "federated" else kind, group, tags, self.settings.eval_last, self.private)

    @property
    def run_loggers(self) -> dict[RunLogger, dict[str, Any]]:
        """The loggers that survive a resumption, each with its state in the checkpoint, which is empty in a new run."""
        states = self.restored.get("loggers", {})
        return {x: states.get(key, {}) for key, x in by_key(self.loggers).items() if isinstance(x, RunLogger)}

    @property
    def own_loggers(self) -> dict[RunLogger, dict[str, Any]]:
        """Those of `run_loggers` that get everything: of a private run the ones that publish nothing."""
        return {logger: state for logger, state in self.run_loggers.items() if not (self.private and logger.publishes)}

    @property
    def failure_kinds(self) -> tuple[str, ...]:
        """Names of what is counted by client, in addition to refused uploads."""
        return ("dropped", "late") if self.timing and self.timing.uneven else self.settings.faults.kinds

    @property
    def how_to_continue(self) -> list[str]:
        """The shell command that resumes the run; none if the program must that has made its objects."""
        if not self.settings.config and (self.frozen or only_python(self._config)):
            return []
        command, newest = "fit" if self.kind == "federated" else "centralized", self.folder.newest_config
        return ["fl-lightning", command, "--config", str(newest), "--ckpt_path", str(self.folder.last)]

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or one of them was found to be the last."""
        return self._stopped or self.rounds_done >= self.max_rounds

    def stops(self) -> bool:
        """Returns whether a callback or a clock ends the run before ``max_rounds``.

        Rank 0 decides; every process must call.
        """
        limit = self.settings.max_time
        stop = self.should_stop or (limit is not None and self.elapsed >= limit)
        stop = stop or (self.timing is not None and self.timing.clock.max_time_s <= self.metrics.get("clock/time_s", 0))
        stop = bool(self.fabric.broadcast(stop))
        self.should_stop = self._stopped = stop
        return stop and self.rounds_done < self.max_rounds

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to this round's; names say what was measured where, as in ``server/test/acc``.

        Raises:
            UserError: If one is no number by name, or has the name of a counter of the trainer.
        """
        counters = COUNTERS & {*metrics}
        ensure(not counters, f"run.log: {', '.join(counters)} is counted by the trainer; give your metric another name")
        self.note(metrics)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of the trainer's own to this round's."""
        try:
            metrics = {"" + name: float(value) for name, value in metrics.items()}  # names are text
        except (AttributeError, TypeError, ValueError):
            raise UserError(f"run.log: {metrics!r:.80}: give numbers by name") from None
        ensure("round" not in metrics, "run.log: round is the column of the rounds; give your metric another name")
        self.round_metrics.update(metrics)
        self.state = replace(self.state, metrics={**self.metrics, **metrics})

    def write_metrics(self) -> Mapping[str, float]:
        """Gives the round's metrics to the loggers, and returns them; later ones belong to the next round.

        Times have three digits, as nobody can repeat more of them.
        """
        metrics, self.round_metrics = self.round_metrics, {}
        logged = {key: float(f"{value:.3g}") if key.startswith("time/") else value for key, value in metrics.items()}
        published = {name: value for name, value in logged.items() if is_protected(name)} if self.private else logged
        own_loggers = self.own_loggers
        for logger in self.loggers:
            logger.log_metrics(metrics=logged if logger in own_loggers else published, step=self.rounds_done)
        return logged

    def call(self, hook: str, *arguments: Any, but: Sequence[str] = ()) -> None:
        """Calls a hook of every callback, but for those that override one of other hooks."""
        started = time.perf_counter()
        for callback in self.callbacks:
            if not callback.overrides(*but):
                getattr(callback, hook)(self, *arguments)
        self.callback_s += time.perf_counter() - started

    def needs_round(self, t: int) -> bool:
        """Returns whether round ``t``, from 0, is the last one, a callback needs it, or it is evaluated and seen.

        Of evaluated rounds those are seen in which clients' own models are evaluated, and all of a run with a callback
        that sees local training in some rounds.
        """
        evaluated = self.evaluates(t + 1) and (
            self.objective.personal or any(c.overrides("on_round_start", "on_local_end") for c in self.callbacks)
        )
        return evaluated or t + 1 >= self.max_rounds or any(c.needs_round(t) for c in self.callbacks)

    def needs_local_models(self, t: int) -> bool:
        """Returns whether a callback is called before and in local training of round ``t``, from 0."""
        return any(c.needs_round(t) and c.overrides("on_round_start", "on_local_end") for c in self.callbacks)

    def evaluate(self, split: Split, w: Tensor | None = None) -> dict[str, float]:
        """Returns loss and metric of weights ``(d,)``, by default the global model; see `Evaluator.evaluate`."""
        return self.evaluator.evaluate(split, self.global_model if w is None else w, self.server.get("buffers"))

    def evaluate_batches(self, batches: Any) -> dict[str, float]:
        """Returns loss and metric of the global model on batches ``(x, y)``, such as those of ``data.eval_batches``."""
        values = self.evaluator.measure(batches, self.global_model, self.server.get("buffers"))
        return {name.removeprefix("/"): value for name, value in values.items()}

    def hand_over_model(self) -> None:
        """Puts the global model into the objective's net; every process must call."""
        self.net.move_to(self.global_model.clone())
        self.load_statistics(self.global_model)

    def load_statistics(self, w: Tensor) -> None:
        """Loads the buffers that weights ``w``, ``(d,)``, are evaluated with into the net; every process must call."""
        self.evaluator.load_statistics(w, self.server.get("buffers"))

    def apply(self, state: RunState, rows: Mapping[int, State]) -> None:
        """Takes over the state after a round, and the new rows of the clients that this process owns, by id."""
        self.state = state
        self.clients.stage(rows)

    def enter(self, folder: RunFolder) -> None:
        """Takes a folder that exists as the run's own; rows beyond the memory budget go there."""
        self.folder = folder
        self.clients.open(folder.clients)
