"""The federated trainer, and what it checks before the first round; the rounds are in `loop`. It knows no algorithm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Annotated, Any

import torch
from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import check_owners
from fl_lightning.core import (
    LATER,
    Inputs,
    UserError,
    checked,
    contents_kept,
    ensure,
    generator,
    map_tensors,
    named_tensors,
    variance_needed,
)
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer import resume
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.callbacks import Callback, EventLog, PrivacyMonitor, with_defaults
from fl_lightning.trainer.centralized import check_centralized, train_centrally
from fl_lightning.trainer.evaluation import MISFIT, why
from fl_lightning.trainer.loggers import CSVLogger, RunLogger
from fl_lightning.trainer.loop import train
from fl_lightning.trainer.measurements.clients import evaluate
from fl_lightning.trainer.participation.samplers import check_repeats
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.settings import Kind, Settings


class FederatedTrainer(Settings):
    """Runs the rounds of a federated experiment on Lightning Fabric.

    Results depend on the seed and the config alone, neither on the number of processes nor on interruptions. The engine
    that "auto" chooses by time is written to the config in the run folder, which repeats the run to the bit.

    Args:
        loggers: Loggers in addition to ``metrics.csv``: WandbLogger, TensorBoardLogger,
            your own, or one of Lightning's; a list, or a single one.
        callbacks: FlatnessMonitor, Trajectory, Checkpoints, ..., your own, or Lightning's EarlyStopping.
        enable_progress_bar: Show the live progress and the summary, and draw the run's figure at its end.
        **settings: As for `Settings`.

    Attributes:
        run: The last run.
        make_run: Makes the run of `fit`. Another one lets clients train elsewhere; see `fl_lightning.flower`.
    """

    run: Run
    make_run: Callable[..., Run] = staticmethod(Run)

    def __init__(
        self,
        loggers: list[RunLogger | Logger] | RunLogger | Logger | None = None,
        callbacks: list[Annotated[Callback | EarlyStopping, LATER]] | None = None,
        enable_progress_bar: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        monitors: list[Callback] = [PrivacyMonitor()] if isinstance(self.aggregation, GaussianPrivacy) else []
        monitors += [EventLog()] if self.asynchronous else []
        self.callbacks: list[Callback] = with_defaults([*(callbacks or ()), *monitors], enable_progress_bar)
        extra = [loggers] if isinstance(loggers, Logger) else loggers or ()
        self.loggers: list[Logger] = [CSVLogger(), *(logger for logger in extra if not isinstance(logger, CSVLogger))]
        self._begun = False

    @checked
    def fit(self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None) -> Run:
        """Trains until ``max_rounds`` rounds are done.

        Args:
            model: The local objective, which names the algorithm. Afterwards its net holds the global model.
            datamodule: The clients' data.
            ckpt_path: A checkpoint to continue in its own run folder; or "last" or "best" of the newest run of this
                name.

        Returns:
            The run, with its final state.

        Raises:
            UserError: If config, data or checkpoint do not fit, or the model is that of an earlier run; nothing is
                written then. Or if training diverges.
        """
        with self.environment():
            run = self.start(model, datamodule, ckpt_path)
            check_fit(run)
            for error in train([run]).values():
                raise error
        return run

    @checked
    def centralized(self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None) -> Run:
        """Trains on the union of the clients' data under ``lightning.Trainer``: the papers' centralized references.

        ``max_rounds`` counts epochs; evaluation, flatness, callbacks and logs are those of `fit`. SGD is FedAvg, SAM
        and ASAM are FedSAM and FedASAM, S~AM is STildeAM, and SWA an ``averaging`` of any of them.

        Args:
            model: A local objective without federated state.
            datamodule: The data.
            ckpt_path: As in `fit`.

        Returns:
            The run.

        Raises:
            UserError: If the model keeps federated state, or config, data or checkpoint do not fit.
        """
        with self.environment():
            check_centralized(self, model)
            run = self.start(model, datamodule, ckpt_path, "centralized")
            check_fit(run)
            train_centrally(run)
        return run

    @checked
    def validate(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluates the global model on the validation part of the training data; without one, on all of them.

        Args:
            model: The local objective.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate, "last" or "best"; by default the model's own weights.

        Returns:
            ``server/val/acc`` and ``server/val/loss``, or ``server/train/...`` if nothing was held out.
        """
        with self.environment():
            run = self.load(model, datamodule, ckpt_path)
            return _report(run, run.evaluate("val" if datamodule.val_fraction else "train"))

    @checked
    def test(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluates the global model on the test set; arguments as for `validate`.

        Returns:
            ``server/test/acc`` and ``server/test/loss``; of clients' own models ``server/clients/acc``, and so on.
        """
        remedy = "give the run's ckpt_path, such as \"last\", which has the clients' own"
        ensure(ckpt_path is not None or not (model.personal and model.trained), f"ckpt_path = None: {remedy}")
        with self.environment():
            run = self.load(model, datamodule, ckpt_path, clients=model.personal)
            return _report(run, evaluate(run, "test"))

    @checked
    def start(
        self,
        model: LocalObjective,
        datamodule: FederatedDataModule,
        ckpt_path: str | None = None,
        kind: Kind = "federated",
        callbacks: Sequence[Callback] | None = None,
        varied: Mapping[str, float] | None = None,
    ) -> Run:
        """Makes a run before its first round, or restores one to continue it; nothing is written.

        Its callbacks begin as their constructors made them; one that another trainer has had, in its first state.

        Args:
            model: The local objective.
            datamodule: The data.
            ckpt_path: As in `fit`.
            kind: Federated or centralized training.
            callbacks: Those of the trainer's callbacks that the run has; None: all.
            varied: As for `Run`.

        Raises:
            UserError: If config, data or checkpoint do not fit.
        """
        name = type(model).__name__
        ensure(
            ckpt_path is not None or not model.trained,
            f"model = {name}: a run has trained it; make a new one, {name}(model.net) to begin with its weights, "
            "or give the run's ckpt_path to go on",
        )
        for callback in self.callbacks:
            callback.begin(self._begun)
        self._begun = True
        callbacks = self.callbacks if callbacks is None else callbacks
        self.run = self.make_run(self, callbacks, self.loggers, model, datamodule, kind, varied)
        resume.note_sources(self.run)
        if ckpt_path is not None:
            resume.restore(self.run, ckpt_path)
        rate, again = (model.lr(self.run.round_context(0)) for _ in range(2))
        ensure(
            rate == again,
            f"model.optimizer: gives the rate of round 1 as {rate}, and {again} when it is asked again; make it a "
            "function of the round",
        )
        if kind == "federated":
            self.sampler.check(self.max_rounds, datamodule.num_clients)
            check_repeats(self.sampler, datamodule.num_clients, self.seed)
            self.faults.check(datamodule.num_clients)
            check_aggregation(self.run)
        return self.run

    @checked
    def load(
        self, model: LocalObjective, datamodule: FederatedDataModule, ckpt_path: str | None, clients: bool = False
    ) -> Run:
        """Restores a run to look at it; nothing begins, and nothing is written.

        Args:
            model: The local objective.
            datamodule: The data.
            ckpt_path: The checkpoint, "last" or "best"; None: the model's own weights.
            clients: Whether to restore the clients' state, too, for dry rounds; the data must then be those of the run.

        Raises:
            UserError: If the checkpoint is unreadable or of another model; or if there is no global model to look at.
        """
        if not clients:
            model.check_global_model("this command")
        self.run = Run(self, self.callbacks, self.loggers, model, datamodule)
        if ckpt_path is not None:
            resume.restore(self.run, ckpt_path, resume=False, clients=clients)
        check_fit(self.run)
        return self.run


def _report(run: Run, metrics: dict[str, float]) -> dict[str, float]:
    run.note(metrics)
    untrained = run.checkpoint is None and not run.objective.trained
    source = "  (no ckpt_path: the weights that the model was made with)" if untrained else ""
    run.fabric.print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()) + source)
    return metrics


def check_fit(run: Run) -> None:
    """Passes one batch through net and loss.

    Raises:
        UserError: If the net does not take the data's samples or has another number of classes, the loss does not give
            one value per sample, BatchNorm would get a batch of one sample, or a callback does not suit the run.
    """
    objective, data, evaluator, fits = run.objective, run.data, run.evaluator, False
    net = type(objective.net).__name__
    suits = data.task.by_class or not objective.needs_classes
    ensure(suits, f"model = {type(objective).__name__}: for classes, these targets are none; choose another algorithm")
    x, y = next(iter(data.eval_batches("test", run.dtype)))
    try:
        logits = evaluator.logits(run.server.w, x)
        if isinstance(data.x_train, Tensor) and data.x_train.dtype == torch.int64:  # the largest token
            batch, row = x, data.x_train.flatten(1).amax(1).argmax()[None]
            x, _ = next(iter(data.eval_batches(row, run.dtype)))
            evaluator.logits(run.server.w, x)
            x = batch
        what = f"{type(logits).__name__}; its forward must return one tensor, the logits"
        ensure(isinstance(logits, Tensor), f"model.net = {net} returns a {what}")
        fits = data.task.fit(logits, y, data.num_classes)
    except UserError:
        raise
    except MISFIT as error:
        shape = map_tensors(lambda v: tuple(v.shape), x)
        tokens = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.bool)
        remedy = "choose a net for this data" + ", or give images as uint8 or float: whole numbers are tokens" * tokens
        raise UserError(f"model.net = {net} cannot take a batch of shape {shape} {why(error, remedy)}") from None
    sparse = [n for n, m in objective.net.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    ensure(not sparse, f"model.net = {net}: {', '.join(sparse)} has sparse gradients; set its sparse to false")
    _check_in_place(run, x)
    policy = objective.net_buffers.policy if objective.net_buffers else None
    if evaluator.by_batch or policy == "reset":
        kind, n = ("test", len(data.y_test)) if evaluator.by_batch else ("training", int(data.client_sizes.sum()))
        least = n % data.eval_batch_size or data.eval_batch_size
        of_source, _ = next(iter(data.eval_batches("test" if evaluator.by_batch else "train", run.dtype)))
        with variance_needed(
            f"data.eval_batch_size = {data.eval_batch_size} leaves a batch of one {kind} sample, in which BatchNorm "
            f"has no variance, and model.buffers = {policy} evaluates by its statistics; choose another size, such as 8"
        ):
            evaluator.logits(run.server.w, map_tensors(lambda v: v[:least], of_source), by_batch=True)
    remedy = f"set its num_classes to {data.num_classes}"
    if logits.ndim != y.ndim + data.task.by_class or "num_classes" not in signature(type(objective.net)).parameters:
        remedy = f"it must give {(len(y), data.num_classes, *y.shape[1:]) if data.task.by_class else tuple(y.shape)}"
    if (
        data.task.by_class
        and logits.ndim == y.ndim + 1
        and logits.shape[1] == data.num_classes - 1
        and 0 not in data.y_train
    ):
        remedy += ", or number the classes from 0: no sample has class 0"
    ensure(
        fits,
        f"model.net = {net} gives outputs of shape {tuple(logits.shape)} for {data.num_classes} {data.task.unit}; "
        f"{remedy}",
    )
    if data.task.by_class and logits.shape[1] > data.num_classes:
        more = logits.shape[1]
        rank_zero_warn(
            f"model.net = {net} has {more} outputs for {data.num_classes} classes; give it {data.num_classes}, or set "
            f"data.num_classes = {more} if all are meant",
            stacklevel=4,
        )
    evaluator.check_loss(logits, y)
    if objective.metrics:
        scores = objective.scores(data).to(run.fabric.device)
        scores.update(logits, y)
        scores.compute()
    # with Mixup the labels are probabilities
    x, y = next(iter(data.client_batches(0, 1, 1, generator(run.seed, "check"), run.dtype)))
    evaluator.check_loss(evaluator.logits(run.server.w, map_tensors(lambda v: v[:2], x)), y[:2])
    if data.val_fraction:
        objective.check_global_model(f"data.val_fraction = {data.val_fraction}, which must be 0")
    for callback in run.callbacks:
        callback.check(run)


def _check_in_place(run: Run, x: Inputs) -> None:
    """Checks that the net's forward changes neither its weights, which are the server's, nor its input."""
    net, samples = run.objective.net, map_tensors(lambda v: v[:2].clone(), x)
    versions = [p._version for p in net.parameters()]
    run.evaluator.logits(run.server.w, samples)
    ensure(
        versions == [p._version for p in net.parameters()],
        f"model.net = {type(net).__name__} changes its own weights in forward, as nn.Embedding(max_norm=...) does; "
        "they are the server's, too: leave it out",
    )
    originals = named_tensors(map_tensors(torch.clone, samples), "")
    run.evaluator.logits(run.server.w, samples)
    ensure(
        all(torch.equal(v, originals[name]) for name, v in named_tensors(samples, "").items()),
        f"model.net = {type(net).__name__} changes its input in place, which a step of SAM uses twice; compute new "
        "tensors, as x - 1 in place of x.sub_(1)",
    )


def check_aggregation(run: Run) -> None:
    """Checks the rule that combines the uploads of a cohort, before its first round.

    Raises:
        UserError: If processes, cohort or algorithm do not fit it.
    """
    rule, settings, objective = run.aggregation, run.settings, run.objective
    ensure(
        settings.asynchronous is None or not objective.needs_rounds,
        f"trainer.asynchronous = {type(settings.asynchronous).__name__}: {type(objective).__name__} needs rounds, "
        f"{objective.needs_rounds}; choose another algorithm, or rounds with trainer.clock.deadline_s",
    )
    m = run.data.num_clients - getattr(settings.sampler, "held_out", 0)
    at_once, buffer = (getattr(settings.asynchronous, name, None) for name in ("concurrency", "buffer"))
    ensure(
        at_once is None or at_once <= m,
        f"trainer.asynchronous.concurrency = {at_once}: only {m} of the clients take part; give at most {m}",
    )
    check_owners("server state", [("model", objective.server_inits()), ("trainer.aggregation", rule.server_state)])
    ensure(
        settings.deterministic or run.fabric.world_size == 1 or not rule.by_rows,
        f"trainer.deterministic = false: {type(rule).__name__} needs all uploads in one process; set it to true",
    )
    if not rule.by_rows or run.rounds_done:
        return
    rule.check(buffer or settings.wanted or len(settings.sampler(0, run.data.num_clients, run.seed)))
    rule.check_round()
    with contents_kept(objective.configured):
        for phase in range(objective.phases) if rule.empty else ():
            ctx = run.round_context(0, phase)
            sent = objective.begin_phase(run.server, ctx)
            known, like = objective.known(sent), run.server.w
            uploads = rule.uploads(objective, (), ctx, like)
            uploads.change(partial(_zeros, rule.shapes({}, known), like))
            objective.finish_phase(run.server, sent, uploads, ctx)


def _zeros(shapes: Mapping[str, list[int]], like: Tensor, name: str, _: object) -> Tensor:
    return like.new_zeros(2, *shapes[name])
