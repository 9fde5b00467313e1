"""The federated trainer; its loop over rounds is in `loop`. It knows no algorithm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.callbacks import EarlyStopping

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import LATER, checked, ensure
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer import resume
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.callbacks import Callback, EventLog, PrivacyMonitor, with_defaults
from fl_lightning.trainer.centralized import check_centralized, train_centrally
from fl_lightning.trainer.checks import check_aggregation, check_fit
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
        given = [loggers] if isinstance(loggers, Logger) else loggers or ()
        self.loggers: list[Logger] = [CSVLogger(), *(each for each in given if not isinstance(each, CSVLogger))]
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

        Its callbacks begin as their constructors made them, whatever runs this trainer has had before.

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
        for callback in self.callbacks if self._begun else ():
            callback.reset()
        self._begun = True
        self.run = self.make_run(
            self, self.callbacks if callbacks is None else callbacks, self.loggers, model, datamodule, kind, varied
        )
        resume.note_sources(self.run)
        if ckpt_path is not None:
            resume.restore(self.run, ckpt_path)
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
