"""Which settings a sweep tries next: all of a grid, random draws, or those that Optuna asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

from fl_lightning.core import UserError, numpy_generator
from fl_lightning.sweeps.parameters import Parameter

Settings = dict[str, Any]
"""A value for each parameter, by key."""


class Search(Protocol):
    """Proposes settings."""

    about: str
    """How, in a line."""

    def propose(self, n: int) -> list[Settings]:
        """Up to ``n`` further settings; none at the end."""

    def observe(self, settings: Mapping[str, Any], value: float | None) -> None:
        """Takes note of what settings led to; smaller is better, and None is a failure."""


class Listed:
    """Settings that are known from the start.

    Args:
        settings: They, in their order.
        about: How they were found.
    """

    def __init__(self, settings: Iterator[Settings], about: str) -> None:
        self._settings, self.about = settings, about

    def propose(self, n: int) -> list[Settings]:
        return [settings for _, settings in zip(range(n), self._settings, strict=False)]

    def observe(self, settings: Mapping[str, Any], value: float | None) -> None:
        pass


def grid(parameters: Sequence[Parameter], count: int | None) -> Listed:
    """All combinations, parameters sorted by key, the last changing first, as W&B's controller orders them.

    Args:
        parameters: The parameters.
        count: At most so many; None: all.
    """
    ordered = sorted(parameters, key=lambda parameter: parameter.key)
    values = [parameter.grid() for parameter in ordered]
    found = [dict(zip([p.key for p in ordered], chosen, strict=True)) for chosen in product(*values)]
    return Listed(iter(found[:count]), f"grid of {len(found)}")


def draws(parameters: Sequence[Parameter], count: int, seed: int) -> Listed:
    """Independent draws from the parameters' distributions.

    Args:
        parameters: The parameters.
        count: Their number.
        seed: Of the draws; each depends on it and on its own number alone.
    """

    def draw(i: int) -> Settings:
        rng = numpy_generator(seed, "sweep", i)
        return {parameter.key: parameter.quantile(1 - rng.random()) for parameter in parameters}

    return Listed((draw(i) for i in range(count)), f"{count} random draws, seed {seed}")


class Bayes:
    """Settings by Optuna's tree-structured Parzen estimator; asked again in the same order, it answers the same.

    Args:
        parameters: The parameters.
        count: Number of settings.
        seed: Of the sampler.

    Raises:
        UserError: If Optuna is not installed.
    """

    def __init__(self, parameters: Sequence[Parameter], count: int, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError("method = bayes: needs Optuna; pip install 'fl-lightning[sweeps]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters, self._left, self._optuna = parameters, count, optuna
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: list[tuple[Settings, Any]] = []
        self.about = f"{count} settings by Optuna's {type(sampler).__name__}, seed {seed}"

    def propose(self, n: int) -> list[Settings]:
        n = min(n, self._left)
        self._left -= n
        found = []
        for _ in range(n):
            trial = self._study.ask()
            settings = {parameter.key: self._suggest(trial, parameter) for parameter in self._parameters}
            self._asked.append((settings, trial))
            found.append(settings)
        return found

    def observe(self, settings: Mapping[str, Any], value: float | None) -> None:
        trial = next(trial for asked, trial in self._asked if asked is settings)
        state = self._optuna.trial.TrialState
        self._study.tell(trial, value, state.FAIL if value is None else state.COMPLETE)

    @staticmethod
    def _suggest(trial: Any, parameter: Parameter) -> Any:
        if (choices := parameter.choices) is not None:
            return choices[trial.suggest_categorical(parameter.key, range(len(choices)))] if choices[1:] else choices[0]
        # the quantile, so that a logarithmic parameter is searched evenly in its logarithm
        return parameter.quantile(trial.suggest_float(parameter.key, 1e-9, 1 - 1e-9))
