"""All state of a run in one object, and the hooks that listen to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from torch import Tensor

from fl_lightning import engine as engines
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    Checked,
    ClientContext,
    FlatNet,
    RoundContext,
    State,
    UserError,
    check_interruption,
    generator,
)
from fl_lightning.core.frozen import constants, digest
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.minibatches import Minibatches
from fl_lightning.engine import Engine, EngineName, LocalResult
from fl_lightning.results.metrics import Mode
from fl_lightning.trainer import divergence, incidents
from fl_lightning.trainer.aggregation import Aggregation, Mean, Plan
from fl_lightning.trainer.client_store import ClientStore
from fl_lightning.trainer.evaluation import Evaluator, Split
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.run_folder import RunFolder
from fl_lightning.trainer.settings import Kind, Settings


class Callback(Checked, key="trainer.callbacks: {}"):
    """Base class of callbacks: override the hooks that you need.

    They are called in the order given. A hook leaves the run as it is; the only thing that it may set is
    ``run.should_stop``. Every process calls every hook, except `on_local_end`, which only the process calls that
    trained the client.
    """

    def check(self, run: Run) -> None:
        """Called before the run has a folder: raises a `UserError` if the callback does not suit the run."""

    def on_fit_start(self, run: Run) -> None:
        """Called when the state is initialized or restored: ``run.rounds_done`` rounds are done."""

    def on_round_start(self, run: Run, ctx: RoundContext, cohort: list[int]) -> None:
        """Called when a cohort has been drawn."""

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        """Called when a client has trained."""

    def on_round_end(self, run: Run) -> None:
        """Called when the server has its new state and evaluation, if due, is done; add metrics by ``run.log``."""

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called when all metrics of the round have gone to the loggers."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when the run breaks off; ``run`` holds the state after its last whole round.

        The last callback is called first: the run is saved before others have their turn.
        """

    def on_fit_end(self, run: Run) -> None:
        """Called when all rounds are done."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two rounds. Later rounds replace its values and never change them in place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; not called if that was empty."""


def state_keys(objects: Sequence[object]) -> list[str]:
    """A key for the state of each object: its class, numbered from the second of the same class on."""
    names = [type(x).__name__ for x in objects]
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [name if not n else f"{name}.{n}" for name, n in zip(names, counts, strict=True)]


def _shared(fabric: Fabric, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors with the values of rank 0, through the CPU."""
    for value in values.values() if fabric.world_size > 1 else ():
        value.copy_(fabric.broadcast(value.cpu()))
    return values


Snapshot = tuple[dict[str, Any], list[dict[str, Any]]]
"""A run's state between two rounds, and that of its callbacks; see `Run.snapshot`."""


class Run:
    """All state of a run. Callbacks get it, and ``FederatedTrainer.fit`` returns it.

    Making one launches the processes, sets up the data, and moves the objective to its device; it writes nothing.

    Args:
        settings: The trainer's settings.
        callbacks: The callbacks, in the order of their calls.
        loggers: The loggers.
        objective: The local objective.
        data: The clients' data.
        kind: Federated or centralized training.

    Attributes:
        fabric: Devices and processes.
        seed: Seed of the run.
        max_rounds: Number of rounds, T.
        dtype: Dtype of weights and state.
        net: The flat view of the objective's net.
        frozen: Hash of the net's frozen parameters, "" if it has none.
        evaluator: Evaluates weights.
        engine: Runs local training.
        engine_name: Its name; "auto" until it is chosen.
        aggregation: Makes one of the cohort's uploads.
        server: The server's state.
        clients: The clients' state; rank 0 holds it.
        rounds_done: Number of rounds done.
        total_floats: Numbers sent and uploaded so far.
        metrics: The latest value of every metric.
        client_losses: Training loss of each client of the last round whose upload was accepted, ``(clients,)``; empty
            in centralized training.
        incidents: How often clients were refused, dropped or late.
        norms: Norms of the server's vectors after each of the last rounds.
        should_stop: Ends the run after this round; a callback may set it.
        checkpoint: The checkpoint that the run was restored from.
        restored: Its content, without the clients' rows, which would lie in memory twice.
        folder: The run's folder, from the start on; of a restored run, that of the checkpoint.
        varied: Settings of the objective that differ between runs trained as one program, by name.
        training_state: Called for further state of a checkpoint; centralized training sets it.
        upload_shapes: Shapes of what a client uploads, by phase and name.
        mean_samples: Mean number of samples of a client.
        callback_s: Seconds spent in callbacks.
        saved_rounds: Rounds done when a checkpoint was last written.
        config: The resolved config with the engine's name, from the start on; empty without the command line.

    Raises:
        UserError: If the data do not fit.
    """

    STATE = ("server", "rounds_done", "total_floats", "metrics", "training_state", "incidents", "norms")
    """What a round replaces, in addition to the clients' state."""
    folder: RunFolder

    def __init__(
        self,
        settings: Settings,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
        objective: LocalObjective,
        data: FederatedDataModule,
        kind: Kind = "federated",
    ) -> None:
        settings.launch()
        self.settings, self.callbacks, self.loggers = settings, list(callbacks), list(loggers)
        self.objective, self.data, self.kind = objective, data, kind
        self.fabric: Fabric = settings.fabric
        self.seed, self.max_rounds, self.dtype = settings.seed, settings.max_rounds, settings.dtype
        self.name = settings.run_name(objective, data, kind)
        self.checkpoint: Path | None = None
        self.restored: dict[str, Any] = {}

        fabric = self.fabric
        if fabric.local_rank == 0:
            data.prepare_data()
        fabric.barrier()
        data.setup("fit")
        data.to(fabric.device)
        objective.to(device=fabric.device, dtype=self.dtype)
        self.net = FlatNet(objective.net)
        self.frozen = digest(_shared(fabric, constants(objective.net)))
        # through the CPU: what is broadcast keeps the device of rank 0
        w0 = fabric.broadcast(self.net.w.cpu()).to(fabric.device, copy=True)
        if objective.net_buffers is not None:
            objective.net_buffers.take(objective.net)
            objective.net_buffers.first = fabric.broadcast(objective.net_buffers.first.cpu()).to(w0)
        self.evaluator = Evaluator(fabric, objective, data, self.net, self.dtype, self.seed)
        self.engine_name: EngineName = settings.engine
        self.engine = self.make_engine("sequential")
        steps = settings.local_steps if settings.faults.stragglers is None else None
        plan = Plan(objective, settings.sampler, data.num_clients, settings.max_rounds, steps)
        self.aggregation: Aggregation = settings.aggregation.bind(plan) if kind == "federated" else Mean()
        inits = {**objective.server_inits(), **self.aggregation.server_state}
        self.server = State({"w": w0, **State.initial(inits, w0, w0)})
        self.clients = ClientStore(objective.client_inits(), w0, settings.client_memory)
        self.rounds_done, self.total_floats, self.should_stop = 0, 0, False
        self.metrics: dict[str, float] = {}
        self.client_losses = torch.zeros(0)
        self.incidents: incidents.Incidents = {}
        self.norms: divergence.Norms = ()
        self.varied: dict[str, float] = {}
        self.training_state: Callable[[], dict[str, Any]] = dict
        self.upload_shapes: dict[int, dict[str, list[int]]] = {}
        self.mean_samples = float(data.client_sizes.double().mean())
        self.callback_s = 0.0
        self._opened = time.monotonic()
        self._round_metrics: dict[str, float] = {}
        self.saved_rounds = -1
        self.config: dict[str, Any] = {}

    # State

    @property
    def global_model(self) -> Tensor:
        """The weights that evaluation, flatness and export use, ``(d,)``: of SWA the average, else the server's."""
        averaging = self.objective.averaging
        return self.server.w if averaging is None else averaging.model(self.server)

    @property
    def next_round(self) -> int:
        """The round to come, from 0; after the last one, the last one."""
        return min(self.rounds_done, self.max_rounds - 1)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, those before it was resumed included."""
        before: float = self.restored.get("elapsed", 0.0)
        return before + time.monotonic() - self._opened

    @property
    def how_to_continue(self) -> str:
        """What continues the run from its last checkpoint."""
        command = "fit" if self.kind == "federated" else "centralized"
        newest = self.folder.newest_config
        config = f" --config {newest}" if newest.exists() else ""
        return f"fl-lightning {command}{config} --ckpt_path {self.folder.last}"

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or rank 0 finds that the run should stop; every process must ask."""
        limit = self.settings.max_time
        stop = self.should_stop or (limit is not None and self.elapsed >= limit)
        if self.fabric.world_size > 1:
            stop = bool(self.fabric.broadcast(stop))
        self.should_stop = stop
        return stop or self.rounds_done >= self.max_rounds

    def round_context(self, t: int, phase: int = 0) -> RoundContext:
        """The context of round ``t``."""
        return RoundContext(t, self.max_rounds, self.data.num_clients, self.objective.flat, phase)

    def minibatches(self, client: int, ctx: ClientContext) -> Minibatches:
        """What a client trains on in a phase, a function of (seed, round, phase, client)."""
        draw = generator(self.seed, "batches", ctx.t, ctx.phase, client)
        return self.data.client_batches(client, self.settings.local_epochs, ctx.K, draw, self.dtype)

    def make_engine(self, name: EngineName) -> Engine:
        """An engine for this run's objective."""
        settings = self.settings
        return engines.make(
            name, self.objective, self.net, self.fabric.autocast, settings.client_block, settings.compile
        )

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to this round's; names say what was measured where, as in ``server/test/acc``."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._round_metrics.update(metrics)
        self.metrics = {**self.metrics, **metrics}

    def log_clients(self, name: str, values: Sequence[float] | Tensor) -> None:
        """Shows the loggers a number of each client, for its distribution."""
        for logger in self.loggers if self.fabric.is_global_zero and len(values) else ():
            if isinstance(logger, RunLogger):
                logger.log_clients(name, [float(value) for value in values], self.rounds_done)

    def monitored(self, callback: str, name: str, metrics: Mapping[str, float]) -> float | None:
        """This round's value of a metric that a callback monitors; None if it was not measured.

        Args:
            callback: The callback, for the message.
            name: The metric.
            metrics: All metrics of the round.

        Raises:
            UserError: If everything has been measured once, and the metric was not among it.
        """
        every = [self.settings.eval_every, *(getattr(c, "every_n_rounds", 1) for c in self.callbacks)]
        if name not in self.metrics and self.rounds_done >= min(max(every), self.max_rounds):
            known = ", ".join(sorted(self.metrics))
            raise UserError(f"trainer.callbacks: {callback}.monitor = {name}: no such metric; choose from {known}")
        return metrics.get(name)

    def call(self, hook: str, **arguments: Any) -> None:
        """Calls a hook of every callback."""
        started = time.perf_counter()
        for callback in self.callbacks:
            getattr(callback, hook)(self, **arguments)
        self.callback_s += time.perf_counter() - started

    def on_result(self, result: LocalResult) -> None:
        """Calls the callbacks' `on_local_end`."""
        self.call("on_local_end", result=result)

    @cached_property
    def directions(self) -> dict[str, Mode]:
        """Whether large or small values of what is evaluated are good, by the metric's name, the data's first."""
        return self.objective.scores(self.data).directions()

    def evaluate(self, split: Split, w: Tensor | None = None) -> dict[str, float]:
        """Loss and metric of weights on a split; see `Evaluator.evaluate`.

        Args:
            split: "train", "val" or "test".
            w: Weights, ``(d,)``; by default the global model.
        """
        return self.evaluator.evaluate(split, self.global_model if w is None else w, self.server.get("buffers"))

    def evaluate_batches(self, batches: Any) -> dict[str, float]:
        """Loss and metric of the global model on batches ``(x, y)``, such as those of ``data.eval_batches``."""
        values = self.evaluator.measure(batches, self.global_model, self.server.get("buffers"))
        return {name.removeprefix("/"): value for name, value in values.items()}

    def load_statistics(self, w: Tensor) -> None:
        """Loads the buffers that weights ``w``, ``(d,)``, are evaluated with into the net; every process must call."""
        self.evaluator.load_statistics(w, self.server.get("buffers"))

    # A round

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing: an error restores the run and its callbacks, unless a checkpoint has been written."""
        check_interruption()
        snapshot = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(snapshot)
            raise
        self.clients.commit()

    def snapshot(self) -> Snapshot:
        """The state between two rounds, by reference: later rounds replace it and change nothing in place."""
        return {name: getattr(self, name) for name in self.STATE}, [c.state_dict() for c in self.callbacks]

    def restore(self, snapshot: Snapshot) -> None:
        """Returns to a snapshot; after a checkpoint of a later round, the run stays there."""
        state, callbacks = snapshot
        self._round_metrics = {}
        if self.saved_rounds > state["rounds_done"]:
            self.clients.commit()
            return
        vars(self).update(state)
        self.clients.rollback()
        for callback, its in zip(self.callbacks, callbacks, strict=True):
            if its:
                callback.load_state_dict(its)

    def apply(
        self, server: State, rows: Mapping[int, State], floats: int, failed: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Takes over what a round has changed.

        Args:
            server: The server's next state.
            rows: On rank 0 the clients' new states, by id.
            floats: Numbers that went over the wire.
            failed: Clients that were refused, dropped or late, by kind.
        """
        self.incidents = incidents.counted(self.incidents, failed or {})
        self.norms = (*self.norms[1 - divergence.ROUNDS :], divergence.norms(server, self.objective.flat.d))
        self.server, self.rounds_done, self.total_floats = server, self.rounds_done + 1, self.total_floats + floats
        self.clients.stage(rows)

    def close_round(self, metrics: Mapping[str, float]) -> None:
        """Logs a round's metrics, evaluates if it is due, and calls callbacks and loggers."""
        self.log(metrics)
        settings = self.settings
        if self.rounds_done % settings.eval_every == 0 or self.rounds_done > self.max_rounds - settings.eval_last:
            for split in ("val", "test") if self.data.val_fraction else ("test",):
                self.log(self.evaluate(split))
            self.log_clients("client/train/loss", self.client_losses)
        self.call("on_round_end")
        logged, self._round_metrics = self._round_metrics, {}
        for logger in self.loggers:
            logger.log_metrics(metrics=logged, step=self.rounds_done)
        self.call("on_round_logged", metrics=logged)
