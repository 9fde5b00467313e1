"""The privacy budget of a run."""

from fl_lightning.core import ensure
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.loggers import WandbLogger
from fl_lightning.trainer.run import Callback, Run


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
