"""The privacy budget of a run."""

from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.run import Callback, Run


class PrivacyMonitor(Callback):
    """Logs ``privacy/epsilon`` in every round, and ends the run before the round that would exceed the budget."""

    def on_fit_start(self, run: Run) -> None:
        rule = run.aggregation
        if isinstance(rule, GaussianPrivacy):
            accountant = rule.accountant
            run.fabric.print(
                f"privacy: epsilon {accountant.epsilon(run.max_rounds):.4g} after {run.max_rounds} rounds at delta "
                f"{rule.delta:g} ({accountant.adjacency}; {accountant.method}; noise multiplier "
                f"{rule.noise_multiplier_of_run:.4g}), of the model, while the seed is secret. Not private: "
                "training losses, other metrics of clients and their data, checkpoints with clients' state"
            )
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
