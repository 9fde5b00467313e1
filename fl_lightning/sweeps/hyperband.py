"""Early termination of trials, as W&B's controller does it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core import ensure, require
from fl_lightning.results.metrics import FILE, read_run
from fl_lightning.trainer.run import Callback, Run

KEYS = ("type", "min_iter", "max_iter", "s", "eta", "strict")


@dataclass(frozen=True)
class Hyperband:
    """Hyperband's rule (Li et al. 2018) in the form of W&B.

    A trial is compared at brackets, which are numbers of evaluations. It ends if its metric at a bracket is worse than
    the metric of the best ``1/eta`` of all trials that have reached the bracket.

    Attributes:
        min_iter: The first bracket; each further one is eta times as far.
        max_iter: Alternative to ``min_iter``: the brackets are at ``max_iter / eta**k`` for k = 1, ..., s.
        s: Number of these brackets.
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
        """Returns the rule from ``early_terminate`` of a sweep's file.

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
            require(type(number) is int and number >= 1, f"{key}.{name}", number, "give an integer of at least 1")
        eta = given.get("eta", 3)
        require(isinstance(eta, (int, float)) and eta > 1, f"{key}.eta", eta, "more than 1")
        rule = cls(**{name: value for name, value in given.items() if name != "type"})
        ensure(bool(rule.brackets(10**9)), f"{key} = {dict(given)}: no bracket; take a larger max_iter or a smaller s")
        return rule

    def brackets(self, evaluations: int) -> list[int]:
        """Returns the brackets up to a number of evaluations, ascending."""
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
        """Returns whether a trial ends.

        Args:
            history: The metric of the trial at each evaluation; smaller is better.
            histories: The histories of all trials, including this one.
        """
        reached = self.brackets(len(history))
        if not reached:
            return False
        at = reached[-1]
        there = sorted(values[at - 1] for values in histories if len(values) >= at)
        return (history[at - 1] if self.strict else min(history)) > there[int(len(there) / self.eta)]


class StopEarly(Callback):
    """Ends a trial by Hyperband's rule; it reads the other trials from their ``metrics.csv``.

    A file is read again only when it has changed. A value that is not finite counts as the worst.

    Args:
        rule: The rule.
        metric: The metric, a column of ``metrics.csv``.
        sign: 1 if smaller is better, -1 if larger is.
        folders: The folders of all trials.
    """

    def __init__(self, rule: Hyperband, metric: str, sign: int, folders: Sequence[Path]) -> None:
        self.rule, self.metric, self.sign, self.folders = rule, metric, sign, folders
        self._read: dict[Path, tuple[tuple[int, int], list[float]]] = {}

    def on_round_end(self, run: Run) -> None:
        if self.metric not in run.round_metrics:
            return
        here = run.folder.metrics  # which lacks this round
        own = [*self._history(here), self._loss(run.round_metrics[self.metric])]
        if self.rule.brackets(len(own)):
            paths = sorted(path for folder in self.folders for path in folder.glob(f"version_*/{FILE}"))
            run.should_stop |= self.rule.stops(own, [own if path == here else self._history(path) for path in paths])

    def _history(self, path: Path) -> list[float]:
        try:
            found = path.stat()
        except FileNotFoundError:  # somebody has removed the run
            return []
        version = (found.st_mtime_ns, found.st_size)
        if self._read.get(path, ((), []))[0] != version:
            self._read[path] = version, [self._loss(value) for _, value in read_run(path.parent).get(self.metric, [])]
        return self._read[path][1]

    def _loss(self, value: float) -> float:
        """Returns a value that is to be small."""
        return self.sign * value if math.isfinite(value) else math.inf
