"""The federated orchestrator: who trains, when, and where. It knows no algorithm."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import torch
import yaml
from lightning.fabric.loggers.logger import Logger
from torch import Tensor
from torch.optim.swa_utils import update_bn

from fl_lightning import engine
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.buffers import Buffers
from fl_lightning.core.buffers import variance_needed
from fl_lightning.core.errors import UserError, require
from fl_lightning.core.flat import FlatNet
from fl_lightning.core.forward import logits
from fl_lightning.core.rng import generator, seeded
from fl_lightning.core.state import ClientContext, RoundContext, State, Uploads
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.minibatches import Minibatches
from fl_lightning.engine import ENGINES, EngineName, Job, LocalResult
from fl_lightning.trainer import centralized, checkpoint, collectives
from fl_lightning.trainer.callbacks import Callback, Checkpoints, Curves, Progress, Results
from fl_lightning.trainer.client_store import ClientStore
from fl_lightning.trainer.loggers import CSVLogger, RunLogger
from fl_lightning.trainer.memory import reuse_freed_memory
from fl_lightning.trainer.samplers import CohortSampler, UniformSampler

T = TypeVar("T")
Rounds = Generator[list[Job], Iterator[LocalResult], None]
"""Yields the jobs of an phase, and is sent their results."""
Split = Literal["train", "val", "test"]
CLIENTS = "clients"
"""Folder of a run where the clients' state goes that is too much for memory."""


class FederatedTrainer:
    """Runs the rounds of a federated experiment on Lightning Fabric.

    Results depend on the seed and the config alone: neither on the number of processes nor on where a run was
    interrupted. What engine "auto" takes, by the clock, stands in the config in the run folder: from there, to the bit.

    Args:
        max_rounds: Number of rounds, T.
        clients_per_round: Size of the cohort, S, when no ``sampler`` is given.
        sampler: Who takes part: UniformSampler, BernoulliSampler, ReplaySampler, or your own.
        local_epochs: Passes of a client over its data, E.
        local_steps: Steps of a client, K; it takes the place of ``local_epochs``.
        eval_every: Rounds between two evaluations.
        eval_last: Rounds at the end that are all evaluated; the papers take 100 where they average over them.
        accelerator: As for ``lightning.Fabric``: auto, cpu, gpu, ...
        strategy: As for ``lightning.Fabric``; with several devices "ddp" launches the processes (the model itself is
            never wrapped: each process trains its share of the cohort).
        devices: Number of devices (processes) per node.
        num_nodes: Number of nodes.
        precision: 32-true, 64-true, or bf16-mixed (float32 weights and state, bfloat16 forward passes).
        tf32: Let an Nvidia GPU round the factors of float32 products to 10 bits of mantissa, which is much faster.
        threads: CPU threads of each process; null: what torch takes. Small nets run best with 1.
        engine: How local training is run; the numbers are the same up to rounding. sequential: one client after
            another; batched: all at once, by vmap; graphed: the same with the local step recorded and replayed, on a
            GPU as a CUDA graph; debug: sequential, and it names the first value that is not finite; auto: what proves
            quickest at the start.
        client_block: Clients that the batched and graphed engines train at once; null: all of a process's share.
        compile: Let the graphed engine compile its record, which takes up to a minute (less when it was done before)
            and pays in long runs of tiny nets.
        deterministic: With several processes, sum up in cohort order whatever came from whom, so that any number of
            processes gives the same bits; otherwise one all-reduce for each uploaded name, which moves less.
        client_memory: Memory for the clients' state between rounds, in GiB; what is beyond goes to the run folder.
        seed: Of everything drawn during the run: initial weights (from the command line), cohorts, minibatches.
        loggers: Further loggers beside ``metrics.csv``: WandbLogger, or one of Lightning's.
        callbacks: FlatnessMonitor, Trajectory, Checkpoints, ..., or your own.
        default_root_dir: Where run folders go.
        name: Folder of this experiment's runs; by default model and data.
        enable_progress_bar: Show the live progress and the summary.
    """

    def __init__(
        self,
        max_rounds: int = 100,
        clients_per_round: int = 10,
        sampler: CohortSampler | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        eval_every: int = 1,
        eval_last: int = 1,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | str = 1,
        num_nodes: int = 1,
        precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true",
        tf32: bool = False,
        threads: int | None = None,
        engine: EngineName = "auto",
        client_block: int | None = None,
        compile: bool = False,
        deterministic: bool = True,
        client_memory: float = 1.0,
        seed: int = 0,
        loggers: list[RunLogger | Logger] | None = None,
        callbacks: list[Callback] | None = None,
        default_root_dir: str = "runs",
        name: str | None = None,
        enable_progress_bar: bool = True,
    ) -> None:
        for key, value in (
            ("max_rounds", max_rounds),
            ("local_epochs", local_epochs),
            ("local_steps", local_steps),
            ("eval_every", eval_every),
            ("eval_last", eval_last),
            ("threads", threads),
            ("client_block", client_block),
        ):
            require(value is None or value >= 1, f"trainer.{key}", value, "at least 1")
        require(client_memory >= 0, "trainer.client_memory", client_memory, "GiB, 0 or more")
        require(engine in ENGINES, "trainer.engine", engine, f"choose from {', '.join(ENGINES)}")
        require(not compile or engine in ("graphed", "auto"), "trainer.compile", compile, "only with engine graphed")
        choices = ("32-true", "64-true", "bf16-mixed")
        require(precision in choices, "trainer.precision", precision, f"choose from {', '.join(choices)}")
        require(name is None or ".." not in Path(name).parts, "trainer.name", name, "a folder below default_root_dir")
        self.max_rounds, self.seed = max_rounds, seed
        self.eval_every, self.eval_last = eval_every, eval_last
        self.sampler = UniformSampler(clients_per_round) if sampler is None else sampler
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.default_root_dir, self.name = Path(default_root_dir), name
        self.callbacks = self._with_defaults(list(callbacks or ()), enable_progress_bar)
        self.loggers = [CSVLogger(), *(loggers or ())]
        self.precision = precision
        self.engine_name: EngineName = engine
        """The engine; "auto" until it has been chosen."""
        self.client_block, self.compile = client_block, compile
        self.deterministic, self.client_memory = deterministic, client_memory
        self.threads = threads
        if threads is not None:
            torch.set_num_threads(threads)
        # not fp32_precision, which takes their place from torch 2.9 on: inductor still reads these (2.15), and fails if
        # the others have been set
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        try:
            self.fabric = L.Fabric(
                accelerator=accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=num_nodes,
                precision=precision,
                callbacks=self.callbacks,
                loggers=self.loggers,
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"trainer.accelerator = {accelerator}, devices = {devices}, strategy = {strategy}, precision = "
                f"{precision}: {' '.join(str(error).split())} (accelerator cpu, devices 1, strategy auto always work)"
            ) from None
        self.dtype = torch.float64 if precision == "64-true" else torch.float32
        self.config: dict[str, Any] = {}
        """The resolved config, saved by the command line and sent to the loggers."""
        self.round = 0
        """Number of rounds done."""
        self.metrics: dict[str, float] = {}
        """The latest value of every metric."""
        self.values: dict[str, float] = {}
        """Settings of the objective that differ between the runs of a `group`, by name."""
        self._launched = False
        self._undo: tuple[State, int, int, dict[str, float]] | None = None

    @staticmethod
    def _with_defaults(callbacks: list[Callback], progress: bool) -> list[Callback]:
        for default in (Curves, Results, Progress, Checkpoints):
            if (default is not Progress or progress) and not any(isinstance(c, default) for c in callbacks):
                callbacks.append(default())
        # what measures comes first; a checkpoint is taken when everything else has seen the round
        return sorted(callbacks, key=lambda c: isinstance(c, Progress) + 2 * isinstance(c, Checkpoints))

    # Entry points

    def fit(self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None) -> None:
        """Train for ``max_rounds`` rounds.

        Args:
            model: The local objective, which names the algorithm. After the run its net holds the final global model.
            datamodule: The clients' data.
            ckpt_path: A checkpoint to go on from, in its own run folder; or "last" for the newest run of this name.

        Raises:
            UserError: If config, data or checkpoint do not fit; nothing has been written then.
        """
        self._begin(model, datamodule, ckpt_path)
        self._train(self._rounds())

    def _begin(self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None) -> None:
        """All that comes before the first round."""
        path, restored = self._prepare(model, datamodule, ckpt_path)
        self._choose_engine(restored.get("engine"), self._sample_jobs)
        self._start_run(path, restored)

    def _prepare(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None
    ) -> tuple[Path | None, dict[str, Any]]:
        """The state before the first round, and that it can be trained; returns the checkpoint it is from, if any."""
        self._launch()
        path = self._resolve(ckpt_path, model, datamodule)
        restored = self._set_up(model, datamodule, path, resume=True)
        self.sampler.check(self.max_rounds, datamodule.num_clients)
        self._check_net()
        return path, restored

    def _train(self, rounds: Generator[list[Job], Iterator[LocalResult], T]) -> T:
        """Give rounds the local training that they ask for; returns what they return."""
        with closing(rounds):
            try:
                jobs = next(rounds)
                while True:
                    jobs = rounds.send(iter(self.engine.train(jobs) if jobs else ()))
            except StopIteration as end:
                returned: T = end.value
                return returned

    def _rounds(self) -> Rounds:
        """All rounds to come: they yield the jobs of an phase and are sent the results."""
        with self._listened_to():
            while self.round < self.max_rounds:
                yield from self._round()

    def centralized(self, model: LocalObjective, datamodule: FederatedDataModule) -> None:
        """Train on the union of the clients' data under lightning.Trainer: the papers' centralized references.

        ``max_rounds`` counts epochs; evaluation, flatness, callbacks and logs are those of `fit`. SGD is FedAvg, SAM
        and ASAM are FedSAM and FedASAM, S~AM is STildeAM, and SWA an ``averaging`` of any of them.

        Args:
            model: A local objective without federated state.
            datamodule: The data.

        Raises:
            UserError: If the model keeps federated state, or config and data do not fit.
        """
        self._launch()
        self._resolve(None, model, datamodule, "-centralized-")
        self._set_up(model, datamodule, None)
        self._check_net()
        centralized.check(self, model)
        self._start_run(None, {})
        with self._listened_to():
            centralized.train(self, model, datamodule)
            self.engine = self._engine("sequential")  # lightning.Trainer has moved the net about

    @contextmanager
    def _listened_to(self) -> Iterator[None]:
        """Callbacks and loggers from start to end, however it ends."""
        status = "failed"
        try:
            self.tell("on_fit_start")
            yield
            self.engine.net.move_to(self.global_model.clone())
            self.load_statistics(self.global_model)
            self.tell("on_fit_end")
            status = "success"
        except BaseException as error:
            self.tell("on_exception", error=error)
            raise
        finally:
            self.data.read_ahead(())
            self.clients.close()
            for logger in self.loggers:
                logger.finalize(status)

    def validate(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate the global model on training data: those held out (``data.val_fraction``), or if none are, all.

        Args:
            model: The local objective.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate, or "last"; by default the model's own weights.

        Returns:
            ``server/val/acc`` and ``server/val/loss``, or ``server/train/...`` if nothing was held out.
        """
        return self._evaluate_only(model, datamodule, ckpt_path, "val" if datamodule.val_fraction else "train")

    def test(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate the global model on the test set.

        Args:
            model: The local objective.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate, or "last"; by default the model's own weights.

        Returns:
            ``server/test/acc`` and ``server/test/loss``.
        """
        return self._evaluate_only(model, datamodule, ckpt_path, "test")

    def load(
        self, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None, clients: bool = False
    ) -> tuple[Path, dict[str, Any]]:
        """Bring model, data and a checkpoint in place to look at them; no run begins.

        Args:
            model: The local objective.
            data: The data.
            ckpt_path: The checkpoint, or "last"; None: the model's own weights.
            clients: Load the clients' state, too, for `rehearse`; the data must then be those of the run.

        Returns:
            The checkpoint's path (of none, a place in a run folder that is not there yet) and what it holds.

        Raises:
            UserError: If the checkpoint is unreadable or of another model.
        """
        self._launch()
        path = self._resolve(ckpt_path, model, data)
        restored = self._set_up(model, data, path, resume=clients and path is not None)
        self._check_net()
        return path or self.default_root_dir / self._run_name / "version_0" / checkpoint.LAST, restored

    # State of the run

    @property
    def global_model(self) -> Tensor:
        """The weights that evaluation, flatness and export use, ``(d,)``: of SWA the average, else the server's."""
        averaging = self.objective.averaging
        return self.server.w if averaging is None else averaging.model(self.server)

    @property
    def coming(self) -> int:
        """The round to come, from 0; after the last one, that."""
        return min(self.round, self.max_rounds - 1)

    def tell(self, hook: str, **what: Any) -> None:
        """Call a hook of every callback; ``fabric.call`` would inspect signatures, too slow for once a client."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, **what)

    def log(self, metrics: dict[str, float]) -> None:
        """Add metrics to this round's; names say what was measured where, as in ``server/test/acc``."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._logged.update(metrics)
        self.metrics = {**self.metrics, **metrics}

    def save_checkpoint(self, path: Path) -> None:
        """Write everything that the run needs to go on as if it had never stopped (rank 0 writes).

        Args:
            path: The file. Any but the run's last.ckpt stays valid when later ones are written.
        """
        kept = path != self.run_dir / checkpoint.LAST
        if self.fabric.is_global_zero:
            weights, buffers = self.objective.flat.split(self.global_model.cpu()), self.objective.net_buffers
            if buffers is not None:
                named = buffers.named(self.server.get("buffers", buffers.first).cpu())
                weights |= {name: v.cpu() for name, v in named.items() if name in self.objective.net.state_dict()}
            checkpoint.save(
                path,
                {
                    "round": self.round,
                    "identity": self._identity(),
                    "state_dict": {f"net.{name}": value.clone() for name, value in weights.items()},
                    "buffers": None if buffers is None else buffers.first.cpu(),
                    "server": {name: value.cpu() for name, value in self.server.items()},
                    "clients": self.clients.state_dict(pin=kept),
                    "engine": self.engine_name,
                    "total_floats": self.total_floats,
                    "metrics": self.metrics,
                    "loggers": {type(x).__name__: x.state_dict() for x in self.loggers if isinstance(x, RunLogger)},
                    "callbacks": {type(x).__name__: x.state_dict() for x in self.callbacks},
                },
            )
            self.clients.saved()
        self._undo = None  # what has been saved is not taken back

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, by config key."""
        return {
            **self._model_identity(),
            "trainer.seed": self.seed,
            "trainer.precision": self.precision,
            "data": self.data.fingerprint(),
        }

    def _model_identity(self) -> dict[str, Any]:
        flat = self.objective.flat
        return {
            "model": type(self.objective).__name__,
            "model.net (its parameters)": [(n, list(s)) for n, s in zip(flat.names, flat.shapes, strict=True)],
            "model (its client state)": sorted(self.objective.client_inits()),
            "model (its server state)": sorted(self.objective.server_inits()),
        }

    # Setting up

    def _launch(self) -> None:
        if not self._launched:
            self.fabric.launch()
            self._launched = True
            if self.threads is not None:  # Fabric has shared out the cores
                torch.set_num_threads(self.threads)
            if self.fabric.world_size > 1:
                atexit.register(collectives.shutdown)

    @staticmethod
    def default_name(model: LocalObjective, data: FederatedDataModule, middle: str = "-") -> str:
        """The folder of runs that are given no name."""
        return f"{type(model).__name__}{middle}{type(data).__name__}"

    def _resolve(
        self, ckpt_path: str | None, model: LocalObjective, data: FederatedDataModule, middle: str = "-"
    ) -> Path | None:
        """Name the run, and find the checkpoint that is meant."""
        self._run_name = self.name or self.default_name(model, data, middle)
        if ckpt_path is None:
            return None
        self.fabric.barrier()  # rank 0 may still be writing the checkpoint that is looked for
        return checkpoint.resolve(ckpt_path, self.default_root_dir, self._run_name)

    def _set_up(
        self, model: LocalObjective, data: FederatedDataModule, path: Path | None, resume: bool = False
    ) -> dict[str, Any]:
        """Bring data and model in place and make the first state, or that of the checkpoint, which is returned."""
        fabric = self.fabric
        restored = {} if path is None else checkpoint.load(path)
        self.objective, self.data = model, data
        if fabric.device.type == "cpu":
            reuse_freed_memory()
        if fabric.local_rank == 0:
            data.prepare_data()
        fabric.barrier()
        data.setup("fit")
        data.to(fabric.device)
        model.to(device=fabric.device, dtype=self.dtype)
        self.net = FlatNet(model.net)
        self.engine = self._engine("sequential")
        # through the CPU: what is broadcast keeps the device of rank 0
        w0 = fabric.broadcast(self.engine.net.w.cpu()).to(fabric.device, copy=True)
        if model.net_buffers is not None:
            model.net_buffers.take(model.net)
            model.net_buffers.first = fabric.broadcast(model.net_buffers.first.cpu()).to(w0)
        self.server = State({"w": w0, **State.initial(model.server_inits(), w0, w0)})
        self.clients = ClientStore(model.client_inits(), w0, self.client_memory)
        self._layouts: dict[int, dict[str, list[int]]] = {}
        self._shapes: dict[str, list[int]] | None = None
        self._estimated: tuple[Tensor, Tensor] | None = None
        self._undo = None
        self._training, self._listening = 0.0, 0.0
        self.round, self.total_floats, self.metrics = 0, 0, {}
        self._logged: dict[str, float] = {}
        self._n_mean = float(data.client_sizes.double().mean())
        if path is not None:
            checkpoint.check_identity(
                path, restored["identity"], self._identity() if resume else self._model_identity()
            )
            self.server = State({name: value.to(w0) for name, value in restored["server"].items()})
            if resume and fabric.is_global_zero:  # which keeps the clients' state
                self.clients.load_state_dict(restored["clients"], path.parent.parent / CLIENTS)
            self.clients.w0 = restored["clients"]["w0"].to(w0)
            if model.net_buffers is not None:
                model.net_buffers.first = restored["buffers"].to(w0)
            self.round, self.total_floats = restored["round"], restored["total_floats"]
            if resume and self.round > self.max_rounds:
                raise UserError(
                    f"trainer.max_rounds = {self.max_rounds}: {path} has done {self.round}; take at least as many"
                )
            self.metrics = restored["metrics"]
        return restored

    def _engine(self, name: EngineName) -> engine.Engine:
        """An engine by name."""
        return engine.make(name, self.objective, self.net, self.fabric.autocast, self.client_block, self.compile)

    def logits(self, w: Tensor, x: Tensor, by_batch: bool = False) -> Tensor:
        """The net's output at weights ``w``, ``(d,)``, in eval mode."""
        return logits(self.net, self.objective.net, w, x, self.fabric.autocast, by_batch)

    def _choose_engine(self, chosen: EngineName | None, sample: Callable[[], list[Job]]) -> None:
        """Make the engine; "auto" takes that of the checkpoint, or measures a sample of jobs on rank 0."""
        sequential = self.engine
        if self.engine_name == "auto":
            reason = ""
            if chosen is None and self.round < self.max_rounds:
                if self.fabric.is_global_zero:
                    rounds = (self.max_rounds - self.round) * self.objective.phases
                    chosen, reason = engine.choose(self._engine, sample(), rounds, self.compile)
                chosen, reason = self.fabric.broadcast((chosen, reason))
            self.engine_name = chosen or "sequential"
            if reason:
                self.fabric.print(f"engine: {self.engine_name} ({reason})")
            self.engine = self._engine(self.engine_name)
        else:
            self.engine = self._engine(self.engine_name)
            if self.engine_name in ("batched", "graphed") and self.round < self.max_rounds:
                engine.check(self.engine, sequential, sample())
        self._name_engine(self.engine_name)

    def _name_engine(self, name: EngineName) -> None:
        """Say which engine trains this run, for checkpoints and config."""
        self.engine_name = name
        if self.config:
            self.config = {**self.config, "trainer": {**self.config["trainer"], "engine": name}}

    def _sample_jobs(self) -> list[Job]:
        """What the first process would train in the next round; clients are taken as if they were never seen."""
        objective, m = self.objective, self.data.num_clients
        ctx = RoundContext(self.round, self.max_rounds, m, objective.flat)
        cohort = self.sampler(self.round, m, self.seed)
        sent = objective.broadcast(self.server, ctx).only(objective.wire[0])
        contexts = [self.client_context(k, ctx) for k in cohort]
        state = State.initial({**self.clients.rules, **objective.scratch_state}, self.clients.w0, sent.w)
        return [
            Job(cohort[p], state, sent, contexts[p], self.minibatches(cohort[p], contexts[p]), self.seed, self.values)
            for p in collectives.assign([c.K for c in contexts], self.fabric.world_size)[0]
        ]

    def _start_run(self, path: Path | None, restored: dict[str, Any]) -> None:
        """Open the run folder and the logs."""
        fabric = self.fabric
        if path is None:
            new = checkpoint.new_run_dir(self.default_root_dir, self._run_name) if fabric.is_global_zero else None
            self.run_dir = Path(str(fabric.broadcast(new)))
        else:
            self.run_dir = checkpoint.run_dir_of(path)
        self.clients.open(self.run_dir / CLIENTS)
        if self.config and fabric.is_global_zero:
            (self.run_dir / "config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))
        for callback in self.callbacks:
            callback.load_state_dict(restored.get("callbacks", {}).get(type(callback).__name__, {}))
        for logger in self.loggers:
            if isinstance(logger, RunLogger):
                logger.start(self.run_dir, restored.get("loggers", {}).get(type(logger).__name__, {}), self.round)
            with suppress(NotImplementedError):  # Fabric's own CSVLogger has none
                logger.log_hyperparams(self.config)

    def _check_net(self) -> None:
        """One batch through the net, so that a net that does not fit the data is told in one line."""
        net, data, fits = type(self.objective.net).__name__, self.data, False
        x, y = next(iter(data.eval_batches("test", self.dtype)))
        try:
            logits = self.logits(self.server.w, x)
            fits = logits.ndim == y.ndim + 1 and len(logits) == len(x) and logits.shape[1] >= data.num_classes
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"model.net = {net} cannot take a batch of shape {tuple(x.shape)} ({str(error).splitlines()[0]:.80}); "
                "choose a net for this data"
            ) from None
        if self.normalised_by_batch:
            least = len(data.y_test) % data.eval_batch_size or data.eval_batch_size
            with variance_needed(
                f"data.eval_batch_size = {data.eval_batch_size} leaves a batch of one test sample, in which BatchNorm "
                "has no variance, and model.buffers = local evaluates by its statistics; choose another size, such as 8"
            ):
                self.logits(self.server.w, x[:least], by_batch=True)
        if not fits:
            raise UserError(
                f"model.net = {net} gives outputs of shape {tuple(logits.shape)} for {data.num_classes} classes; "
                f"set its num_classes to {data.num_classes}"
            )
        self._check_loss(logits, y)
        draw = generator(self.seed, "check")
        x, y = next(iter(data.client_batches(0, 1, 1, draw, self.dtype)))  # with Mixup its labels are probabilities
        self._check_loss(self.logits(self.server.w, x[:2]), y[:2])

    def _check_loss(self, logits: Tensor, y: Tensor) -> None:
        loss = type(self.objective.loss).__name__
        try:
            shape = tuple(self.objective.loss(logits, y).shape)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"model.loss = {loss} cannot take logits {tuple(logits.shape)} and labels {tuple(y.shape)} "
                f"({str(error).splitlines()[0]:.80}); choose a loss for classes"
            ) from None
        if shape != (len(y),):
            raise UserError(
                f"model.loss = {loss} gives a value of shape {shape}; it must give one loss per sample, {(len(y),)}"
            )

    # A round

    def _round(self) -> Rounds:
        """One round: broadcast, local training, aggregation; then evaluation, callbacks, logs.

        A round that breaks off, be it while it is measured, leaves the state as it was; on resume it is run again.
        """
        started, self._training, self._listening = time.perf_counter(), 0.0, 0.0
        objective, fabric, t, m = self.objective, self.fabric, self.round, self.data.num_clients
        cohort = self.sampler(t, m, self.seed)
        self._listen("on_round_start", ctx=RoundContext(t, self.max_rounds, m, objective.flat), cohort=cohort)
        rows: dict[int, State] = {}
        server, losses, refused, floats = yield from self._phases(
            cohort, rows, lambda result: self._listen("on_local_end", result=result)
        )

        transmissions = self.metrics.get("comm/transmissions", 0.0) + floats / (len(cohort) * objective.flat.d)
        self._undo = self.server, self.round, self.total_floats, self.metrics
        try:
            self.server, self.round, self.total_floats = server, self.round + 1, self.total_floats + floats
            self.clients.stage(rows)
            if fabric.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started - self._listening
            self.close_round(
                {
                    "client/train/loss": float(losses.mean()),
                    "client/refused": refused,
                    "client/lr": objective.lr(RoundContext(t, self.max_rounds, m, objective.flat)),
                    "comm/total_bits": self.total_floats * server.w.element_size() * 8,
                    "comm/transmissions": transmissions,
                    "time/round_s": seconds,
                    "time/orchestration_s": seconds - self._training,
                    "time/clients_per_s": len(cohort) / seconds,
                }
            )
        except BaseException:
            if self._undo is not None:
                self.server, self.round, self.total_floats, self.metrics = self._undo
                self.clients.rollback()
            self._logged = {}
            raise
        self.clients.commit()

    def _listen(self, hook: str, **what: Any) -> None:
        """`tell`, on the callbacks' own time."""
        before = time.perf_counter()
        self.tell(hook, **what)
        self._listening += time.perf_counter() - before

    def _phases(
        self, cohort: list[int], rows: dict[int, State], heard: Callable[[LocalResult], None], clean: bool = False
    ) -> Generator[list[Job], Iterator[LocalResult], tuple[State, Tensor, int, int]]:
        """What a round does with a cohort; the trainer's own state stays as it is.

        Args:
            cohort: Ids of the clients.
            rows: On rank 0 the clients' new states, which are added.
            heard: Called with each result of this process.
            clean: Send the server's own model in place of one that the algorithm perturbs.

        Returns:
            The server's next state, the clients' losses ``(cohort,)``, how many uploads were refused, and how many
            numbers went over the wire.
        """
        objective, server, refused, floats = self.objective, self.server, 0, 0
        for phase in range(objective.phases):
            ctx = RoundContext(self.coming, self.max_rounds, self.data.num_clients, objective.flat, phase)
            sent = objective.broadcast(server, ctx).only(objective.wire[0])
            if clean:
                sent = sent.replace(w=server.w)
            uploads, losses = yield from self._train_cohort(cohort, sent, rows, ctx, heard)
            refused += len(cohort) - uploads.n
            after = objective.finish_phase(server, sent, uploads, ctx) if uploads.n else None
            if after is None or not after.finite():
                raise UserError(
                    f"round {ctx.t + 1}: {'the new global state' if uploads.n else 'every upload'} is not finite, "
                    "training has diverged; lower model.optimizer.lr or set model.optimizer.clip, or find where it "
                    "begins with trainer.engine = debug"
                )
            server = after
            uploaded = sum(math.prod(shape) for shape in self._layouts[phase].values())
            floats += (sum(v.numel() for v in sent.values()) + uploaded) * len(cohort)
        return objective.finish_round(server, self.server, ctx), losses, refused, floats

    def rehearse(self, cohort: list[int], heard: Callable[[LocalResult], None], clean: bool = False) -> State:
        """Train clients as the coming round would, and keep nothing of it: for what is measured on local models.

        After the last round it is that one's minibatches and learning rate once more. Every process must call. A round
        that follows is what it would have been.

        Args:
            cohort: Ids of the clients; needs memory for as many local models.
            heard: Called with the result of each client that this process trained, of the last phase only.
            clean: Send the server's own model in place of one that the algorithm perturbs.

        Returns:
            The state that the server would have next.

        Raises:
            UserError: If training diverges.
        """
        last = self.objective.phases - 1
        clocks = self._training, self._listening
        try:
            rehearsal = self._phases(cohort, {}, lambda r: heard(r) if r.ctx.phase == last else None, clean)
            return self._train(rehearsal)[0]
        finally:
            self._training, self._listening = clocks

    def _train_cohort(
        self,
        cohort: list[int],
        sent: State,
        rows: dict[int, State],
        ctx: RoundContext,
        heard: Callable[[LocalResult], None],
    ) -> Generator[list[Job], Iterator[LocalResult], tuple[Uploads, Tensor]]:
        """Local training of a cohort, each process its share.

        Args:
            cohort: Ids of the clients.
            sent: What they receive.
            rows: On rank 0 the clients' states in this round so far, to which the new ones are added.
            ctx: Where the round stands.
            heard: Called with each result of this process.

        Returns:
            Averages of what is finite, and the loss of each client, ``(cohort,)``: the same on every process.
        """
        fabric, objective = self.fabric, self.objective
        contexts = [self.client_context(k, ctx) for k in cohort]
        parts = collectives.assign([c.K for c in contexts], fabric.world_size)
        jobs = self._jobs(cohort, contexts, parts, sent, rows)
        if self.data.stream:
            self.data.read_ahead([*(job.minibatches for job in jobs), *self._upcoming(ctx)])
        if self.clients.on_disk and ctx.t + 1 < ctx.rounds and ctx.phase == objective.phases - 1:
            self.clients.read_ahead(self.sampler(ctx.t + 1, ctx.m, self.seed))
        results = []
        before = time.perf_counter()
        local = yield jobs
        self._training += time.perf_counter() - before
        while True:
            before = time.perf_counter()
            result = next(local, None)
            self._training += time.perf_counter() - before
            if result is None:
                break
            if result.buffers is not None and objective.net_buffers is not None:
                objective.net_buffers.load(objective.net, result.buffers)  # for what is measured on the local model
            heard(result)
            results.append(result)
        return self._aggregate(cohort, contexts, parts, results, rows, sent.w, ctx.phase)

    def _aggregate(
        self,
        cohort: list[int],
        contexts: list[ClientContext],
        parts: list[list[int]],
        results: list[LocalResult],
        rows: dict[int, State],
        like: Tensor,
        phase: int,
    ) -> tuple[Uploads, Tensor]:
        fabric, objective = self.fabric, self.objective
        if phase not in self._layouts:  # rank 0 always trains somebody
            layout = {name: list(v.shape) for name, v in results[0].upload.items()} if results else {}
            self._layouts[phase] = fabric.broadcast(layout)
        layout = self._layouts[phase]
        told = torch.zeros(2, len(cohort), dtype=torch.float64, device=like.device)  # is it finite, and the loss
        mine = torch.tensor(parts[fabric.global_rank], device=like.device)
        if results:
            finite = torch.tensor([float(r.finite) for r in results], device=like.device)
            told[:, mine] = torch.stack([finite, torch.stack([r.loss for r in results])]).double()
        if fabric.world_size > 1:
            torch.distributed.all_reduce(told)
        accepted = [bool(x) for x in told[0].tolist()]

        clients = [ctx for ctx, yes in zip(contexts, accepted, strict=True) if yes]
        uploads = Uploads(objective.wire[1], objective.weighting, clients, like)
        gathered = self.deterministic or fabric.world_size == 1
        if gathered:
            columns = {
                name: collectives.gather(fabric, [r.upload[name] for r in results], parts, shape, like)
                for name, shape in layout.items()
            }
            ours = range(len(cohort)) if fabric.is_global_zero else range(0)
        else:
            columns = {name: [r.upload[name] for r in results] for name in layout}
            ours = range(len(results))
        for i in ours:
            position = i if gathered else parts[fabric.global_rank][i]
            if accepted[position]:
                uploads.add({name: column[i] for name, column in columns.items()}, contexts[position].n_k)
        if clients:
            collectives.reduce(fabric, uploads, layout, like, self.deterministic)

        shapes = self._row_shapes(like)
        slots = {
            name: collectives.gather(fabric, [r.state[name] for r in results], parts, shape, like)
            for name, shape in shapes.items()
        }
        if fabric.is_global_zero and shapes:
            for position, client in enumerate(cohort):
                if accepted[position]:
                    rows[client] = State({name: column[position] for name, column in slots.items()})
        return uploads, told[1]

    def _jobs(
        self,
        cohort: list[int],
        contexts: list[ClientContext],
        parts: list[list[int]],
        sent: State,
        rows: Mapping[int, State],
    ) -> list[Job]:
        """What this process trains; rank 0 keeps the clients' state and sends the rows."""
        fabric, like = self.fabric, sent.w
        mine = parts[fabric.global_rank]
        scratch = self.objective.scratch_state
        if fabric.world_size == 1:
            states = [self.clients.get(k, like, scratch, rows.get(k)) for k in cohort]
        else:
            kept = [self.clients.get(k, like, {}, rows.get(k)) for k in cohort] if fabric.is_global_zero else []
            columns = {
                name: collectives.scatter(
                    fabric, torch.stack([k[name] for k in kept]) if kept else None, parts, shape, like
                )
                for name, shape in self._row_shapes(like).items()
            }
            fresh = State.initial(scratch, self.clients.w0, like)
            states = [State({**{n: c[i] for n, c in columns.items()}, **fresh}) for i in range(len(mine))]
        return [
            Job(cohort[p], state, sent, contexts[p], self.minibatches(cohort[p], contexts[p]), self.seed, self.values)
            for p, state in zip(mine, states, strict=True)
        ]

    def _row_shapes(self, like: Tensor) -> dict[str, list[int]]:
        """Shapes of the slots that a client keeps."""
        if self._shapes is None:
            first = State.initial(self.clients.rules, self.clients.w0, like)
            self._shapes = {name: list(v.shape) for name, v in first.items()}
        return self._shapes

    def minibatches(self, client: int, ctx: RoundContext) -> Minibatches:
        """A client's training batches in a round and phase."""
        draw = generator(self.seed, "batches", ctx.t, ctx.phase, client)
        return self.data.client_batches(client, self.local_epochs, self.local_steps, draw, self.dtype)

    def _upcoming(self, ctx: RoundContext) -> list[Minibatches]:
        """What this process trains on after this: in the next phase, or in the next round."""
        over = ctx.phase + 1 == self.objective.phases
        ctx = replace(ctx, t=ctx.t + 1, phase=0) if over else replace(ctx, phase=ctx.phase + 1)
        if ctx.t == ctx.rounds:
            return []
        cohort = self.sampler(ctx.t, ctx.m, self.seed)
        contexts = [self.client_context(k, ctx) for k in cohort]
        mine = collectives.assign([c.K for c in contexts], self.fabric.world_size)[self.fabric.global_rank]
        return [self.minibatches(cohort[p], contexts[p]) for p in mine]

    def client_context(self, client: int, ctx: RoundContext) -> ClientContext:
        """The context that a client trains in."""
        lr = self.objective.lr(ctx)
        steps = self.data.batches_per_client(client, self.local_epochs, self.local_steps)
        n_k = int(self.data.client_sizes[client])
        return ClientContext(**vars(ctx), lr=lr, K=steps, k_lr=steps * lr, n_k=n_k, n_mean=self._n_mean)

    def close_round(self, metrics: dict[str, float]) -> None:
        """A round's state is there: log ``metrics``, evaluate if it is time, let callbacks and loggers see it."""
        self.log(metrics)
        if self.round % self.eval_every == 0 or self.round > self.max_rounds - self.eval_last:
            for split in ("val", "test") if self.data.val_fraction else ("test",):
                self.log(self.evaluate(split))
        self.tell("on_round_end")
        metrics, self._logged = self._logged, {}
        for logger in self.loggers:
            logger.log_metrics(metrics=metrics, step=self.round)
        self.tell("on_round_logged", metrics=metrics)

    # Evaluation

    def evaluate(self, split: Split, w: Tensor | None = None) -> dict[str, float]:
        """Mean loss and the data's metric on a whole split: accuracy, unless the data say otherwise.

        Args:
            split: "train" (the union of the clients' data, not augmented), "val" or "test". With ``model.buffers`` =
                local each batch of it is normalised by its own statistics.
            w: Weights ``(d,)``; by default the global model.

        Returns:
            ``server/<split>/acc`` (or the metric's name) and ``server/<split>/loss``; the metric of a part of the test
            set, if the data name any, as ``server/test_<part>/acc``.
        """
        fabric, data, n = self.fabric, self.data, 0
        w = self.global_model if w is None else w
        self.load_statistics(w)
        rank, world = fabric.global_rank, fabric.world_size
        by_batch = self.normalised_by_batch  # then the processes share batches, which stay as they are; else samples
        sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # of losses (NaN stays NaN) and samples
        parts = data.test_parts() if split == "test" else {}
        metrics = {part: data.metric()[1].to(fabric.device) for part in ("", *parts)}
        members = {part: of if by_batch else of[rank::world] for part, of in parts.items()}
        for i, (x, y) in enumerate(data.eval_batches(split, self.dtype, (0, 1) if by_batch else (rank, world))):
            rows, n = slice(n, n + len(y)), n + len(y)
            if by_batch and i % world != rank:
                continue
            logits = self.logits(w, x, by_batch).to(self.dtype)
            sums += torch.stack([self.objective.evaluation_loss(logits, y).sum().double(), sums.new_tensor(len(y))])
            logits = logits[:, : data.num_classes]
            metrics[""].update(logits, y)
            for part, of in members.items():
                if (mine := of[rows].to(y.device)).any():
                    metrics[part].update(logits[mine], y[mine])
        sums = torch.as_tensor(fabric.all_reduce(sums, reduce_op="sum"))
        name = data.metric()[0]
        values = {f"server/{split}{part and '_'}{part}/{name}": float(m.compute()) for part, m in metrics.items()}
        return {**values, f"server/{split}/loss": float(sums[0] / sums[1])}

    @property
    def normalised_by_batch(self) -> bool:
        """Whether evaluation normalises each batch by its own statistics."""
        return self.objective.net_buffers is not None and self.objective.net_buffers.policy == "local"

    def load_statistics(self, w: Tensor) -> None:
        """Give the net the buffers that weights ``w``, ``(d,)``, are evaluated with; every process must call.

        With ``model.buffers`` = average the server's; reset: the initial ones with the statistics of BatchNorm
        estimated anew on the training data at ``w``; local: the initial ones.
        """
        buffers, net = self.objective.net_buffers, self.objective.net
        if buffers is None:
            return
        vector = self.server.get("buffers", buffers.first)
        if buffers.policy == "reset":
            if self._estimated is None or self._estimated[0] is not w:
                buffers.load(net, buffers.first)
                self._estimated = w, self._estimate(w, buffers)
            vector = self._estimated[1]
        buffers.load(net, vector)

    def _estimate(self, w: Tensor, buffers: Buffers) -> Tensor:
        """Buffers at ``w``, ``(b,)``, by torch's update_bn: means over all batches of each one's statistics."""
        fabric, net, seen = self.fabric, self.objective.net, 0

        def mine() -> Iterator[Tensor]:
            nonlocal seen
            for i, (x, _) in enumerate(self.data.eval_batches("train", self.dtype)):
                if i % fabric.world_size == fabric.global_rank:
                    seen += 1
                    yield x

        self.engine.net.move_to(w)
        with fabric.autocast(), seeded(fabric.device, self.seed, "statistics"):
            update_bn(mine(), net)
        sums = buffers.vector(net) * seen
        total = collectives.all_reduce_sum(fabric, torch.cat([sums, sums.new_tensor([seen])]))
        return total[:-1] / total[-1] if total[-1] else buffers.first  # no BatchNorm: no batch was asked for

    def _evaluate_only(
        self, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None, split: Split
    ) -> dict[str, float]:
        self.load(model, data, ckpt_path)
        self.metrics = self.evaluate(split)
        self.fabric.print("  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items()))
        return self.metrics
