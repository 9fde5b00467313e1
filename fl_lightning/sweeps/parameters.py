"""Parameters of a sweep as W&B defines them: their values in a grid, and draws from their distributions."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, product
from statistics import NormalDist
from typing import Any

import numpy as np

from fl_lightning.core import Positive, check_values, ensure, imported, numpy_generator, require


def _beta(u: float, a: float, b: float) -> float:
    from scipy.stats import beta

    return float(beta.ppf(u, a, b))


def _log_uniform(u: float, low: float, high: float) -> float:
    return math.exp(low + u * (high - low))


def _log_uniform_values(u: float, low: float, high: float) -> float:
    return _log_uniform(u, math.log(low), math.log(high))


NUMBERS: dict[str, tuple[tuple[str, str], Callable[[float, Any, Any], float]]] = {
    "int_uniform": (("min", "max"), lambda u, low, high: low + min(int(u * (high - low + 1)), high - low)),
    "uniform": (("min", "max"), lambda u, low, high: low + u * (high - low)),
    "log_uniform": (("min", "max"), _log_uniform),
    "log_uniform_values": (("min", "max"), _log_uniform_values),
    "inv_log_uniform": (("min", "max"), lambda u, low, high: _log_uniform(u, -high, -low)),
    "inv_log_uniform_values": (("min", "max"), _log_uniform_values),
    "normal": (("mu", "sigma"), lambda u, mu, sigma: NormalDist(mu, sigma).inv_cdf(u)),
    "log_normal": (("mu", "sigma"), lambda u, mu, sigma: math.exp(NormalDist(mu, sigma).inv_cdf(u))),
    "beta": (("a", "b"), _beta),
}
"""Distributions of numbers: their settings, and the number below which a share u of the draws lies.

With q_ before the name, draws are rounded to multiples of q.
"""
QUANTIZED = ("uniform", "log_uniform", "log_uniform_values", "normal", "log_normal", "beta")
DEFAULTS = {"mu": 0.0, "sigma": 1.0, "a": 1.0, "b": 1.0, "q": 1.0}
FORMS = {
    "values": list,
    **dict.fromkeys(("min", "max", "mu"), float),
    **dict.fromkeys(("sigma", "a", "b", "q"), Positive),
}
"""What settings of a distribution may be."""
LISTS = {"constant": ("value",), "categorical": ("values",), "categorical_w_probabilities": ("values", "probabilities")}
LARGEST = 100_000
"""Settings of the largest grid."""
GRID = ("constant", "categorical", "int_uniform", "q_uniform")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a sweep.

    Attributes:
        key: The setting, such as ``model.rho``.
        distribution: W&B's name of its distribution; constant for a value, categorical for a list of values.
        options: Settings of the distribution, such as ``min`` and ``max``.
    """

    key: str
    distribution: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, key: str, entry: Any) -> "Parameter":
        """Returns a parameter from its entry in a sweep's file.

        Raises:
            UserError: If the entry is not one of W&B's.
        """
        where = f"parameters.{key}"
        require(isinstance(entry, Mapping), where, entry, "give a mapping, such as {values: [0.05, 0.1]}")
        kind = entry.get("distribution") or _default_distribution(entry)
        known = {name: names for name, (names, _) in NUMBERS.items()} | LISTS
        known |= {f"q_{name}": (*known[name], "q") for name in QUANTIZED}
        if str(kind) not in known and (inner := _nested(entry)):
            form = f"{key.rpartition('.')[2]}: {{parameters: {{{inner.partition('.')[0]}: ...}}}}"
            ensure(False, f"{where}: nested settings stand under parameters; write {form}, or {key}.{inner} as one key")
        require(str(kind) in known, where, dict(entry), "give value, values, min and max, or a distribution of W&B's")
        names = known[kind]
        if kind == "int_uniform":
            entry = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in entry.items()}
            for name, value in entry.items():
                require(not isinstance(value, float), f"{where}.{name}", value, "give a whole number")
        if extra := entry.keys() - {"distribution", *names}:
            ensure(False, f"{where}.{min(extra)} = {entry[min(extra)]}: {kind} has {', '.join(names)}")
        options = {name: entry.get(name, DEFAULTS.get(name)) for name in names}
        for name, value in options.items():
            ensure(name in entry or value is not None, f"{where}.{name}: missing; {kind} needs {', '.join(names)}")
        check_values(where, options, FORMS)
        if "values" in options:
            require(bool(options["values"]), f"{where}.values", options["values"], "give a list with a value")
        if "probabilities" in options:
            shares = options["probabilities"]
            numbers = isinstance(shares, list) and all(
                isinstance(share, (int, float)) and share >= 0 for share in shares
            )
            valid = numbers and len(shares) == len(options["values"]) and math.isclose(sum(shares), 1.0, abs_tol=1e-6)
            require(valid, f"{where}.probabilities", shares, "one for each value, none below 0, with sum 1")
        if "min" in options:
            low, high = options["min"], options["max"]
            require(low < high, f"{where}.min", low, f"less than max = {high}")
            require(not kind.endswith("_values") or low > 0, f"{where}.min", low, f"{kind} needs a positive one")
        return cls(key, kind, options)

    def grid(self) -> Sequence[Any]:
        """Returns all values, in order.

        Raises:
            UserError: If they are infinitely many, or too many.
        """
        require(
            self.distribution in GRID,
            f"parameters.{self.key}.distribution",
            self.distribution,
            "a grid takes values, integers from min to max, or q_uniform",
        )
        if self.choices is not None:
            return list(self.choices)
        low, high, step = self.options["min"], self.options["max"], self.options.get("q", 1)
        if self.distribution == "int_uniform":
            require(
                high - low < LARGEST,
                f"parameters.{self.key}",
                f"{low} to {high}",
                f"a grid takes at most {LARGEST:,} values",
            )
            return range(low, high + 1)
        require((high - low) / step <= LARGEST, f"parameters.{self.key}.q", step, "too small for a grid")
        return list(np.arange(low, high, step).tolist())

    @property
    def choices(self) -> list[Any] | None:
        """The values of a list without an order; None for a number."""
        return self.options.get("values", [self.options.get("value")]) if self.distribution in LISTS else None

    def quantile(self, u: float) -> Any:
        """Returns the value below which a share ``u`` of the draws lies, with ``u`` in (0, 1)."""
        if (choices := self.choices) is not None:
            n = len(choices)
            ends = [*list(accumulate(self.options.get("probabilities", [1 / n] * n)))[:-1], 1.0]
            return choices[next(i for i, end in enumerate(ends) if u <= end)]
        names, quantile = NUMBERS[self.distribution.removeprefix("q_")]
        x = quantile(u, *(self.options[name] for name in names))
        return round(x / self.options["q"]) * self.options["q"] if "q" in self.options else x


def _default_distribution(entry: Mapping[str, Any]) -> str:
    """Returns the distribution that W&B assumes for an entry without ``distribution``."""
    if "value" in entry:
        return "constant"
    if "values" in entry:
        return "categorical_w_probabilities" if "probabilities" in entry else "categorical"
    if "min" in entry and "max" in entry:
        return "int_uniform" if all(type(entry[name]) is int for name in ("min", "max")) else "uniform"
    return ""


def _nested(entry: Any) -> str:
    """Returns the dotted key of the first parameter that is nested in an entry; empty if it has no further ones."""
    if not isinstance(entry, Mapping) or not entry or not all(isinstance(value, Mapping) for value in entry.values()):
        return ""
    first = next(iter(entry))
    deeper = "" if {"value", "values"} & {*entry[first]} else _nested(entry[first])
    return f"{first}.{deeper}".rstrip(".")


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the entries of ``parameters`` by dotted key; nested entries are parts of a setting.

    Args:
        mapping: The mapping of a sweep's file.
        prefix: Key of the part that it is nested in, with a dot.

    Raises:
        UserError: If it is not a mapping.
    """
    require(isinstance(mapping, Mapping), f"parameters.{prefix}".rstrip("."), mapping, "give parameters by their keys")
    entries: dict[str, Any] = {}
    for key, entry in mapping.items():
        if isinstance(entry, Mapping) and "parameters" in entry:
            entries |= flatten(entry["parameters"], f"{prefix}{key}.")
        else:
            entries[f"{prefix}{key}"] = entry
    return entries


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
    settings = combinations({parameter.key: parameter.grid() for parameter in ordered})
    return Search(settings[:count], f"grid of {len(settings)}")


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
        optuna = imported("optuna", "method = bayes: needs Optuna; pip install 'fl-lightning[sweeps]'")
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
