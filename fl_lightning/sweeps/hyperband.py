"""Early termination of trials, as W&B's controller does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core import ensure, require
from fl_lightning.results.metrics import read_metrics
from fl_lightning.trainer.run import Callback, Run

KEYS = ("type", "min_iter", "max_iter", "s", "eta", "strict")


@dataclass(frozen=True)
class Hyperband:
    """Hyperband's rule (Li et al. 2018) in the form of W&B.

    A trial is compared at brackets, numbers of evaluations. It ends if its metric is worse there than that of the best
    ``1/eta`` of all trials that came as far.

    Attributes:
        min_iter: The first bracket; each further one is eta times as far.
        max_iter: Instead of it: the brackets are the ``s`` numbers ``max_iter / eta**k``.
        s: Their number.
        eta: Of ``eta`` trials, one goes on.
        strict: Whether the value at the bracket counts; else the best one so far.
    """

    min_iter: int | None = None
    max_iter: int | None = None
    s: int = 0
    eta: float = 3.0
    strict: bool = True

    @classmethod
    def of(cls, given: Any) -> Hyperband:
        """The rule from ``early_terminate`` of a sweep's file.

        Raises:
            UserError: If it is not W&B's.
        """
        key = "early_terminate"
        require(isinstance(given, Mapping), key, given, "give {type: hyperband, min_iter: ...}")
        for name in given:
            require(name in KEYS, f"{key}.{name}", given[name], f"choose from {', '.join(KEYS)}")
        require(given.get("type") == "hyperband", f"{key}.type", given.get("type"), "only hyperband is known")
        ensure(
            ("min_iter" in given) != ("max_iter" in given),
            f"{key} = {dict(given)}: give either min_iter, or max_iter and s",
        )
        ensure("max_iter" not in given or "s" in given, f"{key}.s: missing; max_iter needs it")
        for name in ("min_iter", "max_iter", "s"):
            number = given.get(name, 1)
            require(type(number) is int and number >= 1, f"{key}.{name}", number, "an integer of at least 1")
        eta = given.get("eta", 3)
        require(isinstance(eta, (int, float)) and eta > 1, f"{key}.eta", eta, "more than 1")
        rule = cls(**{name: value for name, value in given.items() if name != "type"})
        ensure(bool(rule.brackets(10**9)), f"{key} = {dict(given)}: no bracket; take a larger max_iter or a smaller s")
        return rule

    def brackets(self, evaluations: int) -> list[int]:
        """The brackets up to a number of evaluations, ascending."""
        found: list[float] = []
        if self.max_iter is not None:
            at = float(self.max_iter)
            for _ in range(self.s):
                at /= self.eta
                found.insert(0, at)
        else:
            at = float(self.min_iter or 1)
            while int(at) <= evaluations and len(found) < 100:
                found.append(at)
                at *= self.eta
        return [int(at) for at in found if 1 <= at < evaluations + 1]

    def stops(self, history: Sequence[float], histories: Sequence[Sequence[float]]) -> bool:
        """Whether a trial ends.

        Args:
            history: Its metric at each evaluation; smaller is better.
            histories: Those of all trials, its own included.
        """
        reached = self.brackets(len(history))
        if not reached:
            return False
        at = reached[-1]
        there = sorted(values[at - 1] for values in histories if len(values) >= at)
        threshold = there[int(len(there) / self.eta)]
        return (history[at - 1] if self.strict else min(history)) > threshold


class StopEarly(Callback):
    """Ends a trial by Hyperband's rule; it knows the other trials by their ``metrics.csv``.

    Args:
        rule: The rule.
        metric: The metric, a column of ``metrics.csv``.
        sign: 1 if smaller is better, -1 if larger is.
        folder: The folder of all trials.
    """

    def __init__(self, rule: Hyperband, metric: str, sign: int, folder: Path) -> None:
        self.rule, self.metric, self.sign, self.folder = rule, metric, sign, folder

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            return
        own = self._history(run.folder.metrics)
        if self.rule.brackets(len(own)):
            histories = [self._history(path) for path in sorted(self.folder.glob("*/version_*/metrics.csv"))]
            run.should_stop |= self.rule.stops(own, histories)

    def _history(self, path: Path) -> list[float]:
        return [self.sign * value for _, value in read_metrics(path).get(self.metric, [])]
