"""The settings that a sweep tries next: a whole grid, random draws, or settings that Optuna proposes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from typing import Any

from fl_lightning.core import UserError, ensure, numpy_generator
from fl_lightning.sweeps.parameters import LARGEST, Parameter

Settings = dict[str, Any]
"""A value for each parameter, by key."""


class Search:
    """Proposes the settings of a list one after another, whatever their values are.

    Args:
        settings: The settings, in their order.
        about: How they were found, in a line.
    """

    def __init__(self, settings: Iterable[Settings], about: str) -> None:
        self._settings, self.about = iter(settings), about

    def propose(self, n: int) -> list[Settings]:
        """Returns up to ``n`` further settings; none at the end."""
        return list(islice(self._settings, n))

    def observe(self, settings: Mapping[str, Any], value: float | None) -> None:
        """Records the value of settings; smaller is better, and None or a value that is not finite is a failure."""


def grid(parameters: Sequence[Parameter], count: int | None) -> Search:
    """Returns all combinations, parameters sorted by key, the last changing first, as W&B's controller orders them.

    Args:
        parameters: The parameters.
        count: At most so many; None: all.

    Raises:
        UserError: If there are more than `LARGEST`.
    """
    ordered = sorted(parameters, key=lambda parameter: parameter.key)
    found = combinations({parameter.key: parameter.grid() for parameter in ordered})
    return Search(found[:count], f"grid of {len(found)}")


def combinations(values: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Returns all combinations of the values of each key, those of the last key changing first.

    Raises:
        UserError: If there are more than `LARGEST`.
    """
    size = math.prod(map(len, values.values()))
    ensure(
        size <= LARGEST, f"values: a grid of {size:,} settings; give at most {LARGEST:,}, or a sweep of method random"
    )
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def draws(parameters: Sequence[Parameter], count: int, seed: int) -> Search:
    """Returns independent draws from the parameters' distributions.

    Args:
        parameters: The parameters.
        count: Number of draws.
        seed: Seed of the draws; each depends on it and on its own number alone.
    """

    def draw(i: int) -> Settings:
        rng = numpy_generator(seed, "sweep", i)
        return {parameter.key: parameter.quantile(1 - rng.random()) for parameter in parameters}

    return Search((draw(i) for i in range(count)), f"{count} random draws, seed {seed}")


class Bayes(Search):
    """Proposes settings by Optuna's tree-structured Parzen estimator.

    Asked again for the same numbers of settings, with the same values observed, it proposes the same.

    Args:
        parameters: The parameters.
        count: Number of settings.
        seed: Seed of the sampler.

    Raises:
        UserError: If Optuna is not installed.
    """

    def __init__(self, parameters: Sequence[Parameter], count: int, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError("method = bayes: needs Optuna; pip install 'fl-lightning[sweeps]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters, self._states = parameters, optuna.trial.TrialState
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
        self._asked: list[tuple[Settings, Any]] = []
        super().__init__((self._ask() for _ in range(count)), f"{count} settings by Optuna's TPESampler, seed {seed}")

    def observe(self, settings: Mapping[str, Any], value: float | None) -> None:
        trial = next(trial for asked, trial in self._asked if asked is settings)
        finite = value is not None and math.isfinite(value)
        self._study.tell(trial, value if finite else None, self._states.COMPLETE if finite else self._states.FAIL)

    def _ask(self) -> Settings:
        trial = self._study.ask()
        settings = {parameter.key: self._suggest(trial, parameter) for parameter in self._parameters}
        self._asked.append((settings, trial))
        return settings

    @staticmethod
    def _suggest(trial: Any, parameter: Parameter) -> Any:
        if (choices := parameter.choices) is not None:
            return choices[trial.suggest_categorical(parameter.key, range(len(choices)))] if choices[1:] else choices[0]
        # the quantile, so that a logarithmic parameter is searched evenly in its logarithm
        return parameter.quantile(trial.suggest_float(parameter.key, 1e-9, 1 - 1e-9))
