"""A sweep's file in W&B's format."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul, truediv
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from fl_lightning.core import Checked, Interval, PositiveInt, UserError, check_values, ensure, folded, require
from fl_lightning.results import SUFFIX, best_of, headline, load_yaml, read_run
from fl_lightning.sweeps.parameters import LARGEST, Bayes, Parameter, Search, draws, flatten, grid

Entry = TypeVar("Entry", bound=Checked)


class Hyperband(Checked, key="early_terminate"):
    """Hyperband's rule (Li et al. 2018) in the form of W&B.

    A trial is compared at brackets, which are numbers of evaluations. It ends if its metric at a bracket is worse than
    the metric of the best ``1/eta`` of those that have reached the bracket: itself and the trials before it.

    Args:
        type: The rule's name in W&B's files.
        min_iter: The first bracket; each further one is eta times as far.
        max_iter: Alternative to ``min_iter``: the brackets are at ``max_iter / eta**k`` for k = 1, ..., s.
        s: Number of these brackets.
        eta: Of ``eta`` trials, one goes on.
        strict: Whether the value at the bracket counts; else the best one so far.
    """

    def __init__(
        self,
        type: Literal["hyperband"],
        min_iter: PositiveInt | None = None,
        max_iter: PositiveInt | None = None,
        s: PositiveInt | None = None,
        eta: Annotated[float, Interval("(1, inf)")] = 3.0,
        strict: bool = True,
    ) -> None:
        key = self.config_key
        ensure((min_iter is None) != (max_iter is None), f"{key}: give either min_iter, or max_iter and s")
        ensure(max_iter is None or s is not None, f"{key}.s: missing; max_iter needs it")
        self.min_iter, self.max_iter, self.s, self.eta, self.strict = min_iter, max_iter, s or 0, eta, strict
        ensure(bool(self.brackets(10**9)), f"{key} = {self}: no bracket; take a larger max_iter or a smaller s")

    def brackets(self, evaluations: int) -> list[int]:
        """Returns the brackets up to a number of evaluations, ascending."""
        if self.max_iter is not None:
            points = [*accumulate([self.eta] * self.s, truediv, initial=float(self.max_iter))][:0:-1]
        else:
            points = [*accumulate([self.eta] * 99, mul, initial=float(self.min_iter or 1))]
        return [int(point) for point in points if 1 <= point < evaluations + 1]

    def stops(self, history: Sequence[float], histories: Sequence[Sequence[float]]) -> bool:
        """Returns whether a trial ends.

        Args:
            history: The metric of the trial at each evaluation; smaller is better.
            histories: The histories that it is compared with, including this one.
        """
        reached = self.brackets(len(history))
        if not reached:
            return False
        bracket = reached[-1]
        compared = sorted(values[bracket - 1] for values in histories if len(values) >= bracket)
        return (history[bracket - 1] if self.strict else min(history)) > compared[int(len(compared) / self.eta)]


KEYS = {
    "method": Literal["grid", "random", "bayes"],
    "metric": dict | None,
    "parameters": Any,
    "early_terminate": dict | None,
    "run_cap": Annotated[int, Interval(f"[1, {LARGEST}]")] | None,
    "command": Any,
}
"""Keys of a sweep's file that count here, and the forms of their values, as far as nothing else checks these."""
LABELS = ("program", "name", "description", "project", "entity")
"""Keys that name the sweep on W&B, or concern W&B's agent alone."""
COMMANDS = ("fit", "centralized")
ARGUMENTS = ("${args}", "${args_no_boolean_flags}")
"""W&B's macros for the parameters that the command line understands."""
BEFORE = ("${env}", "${interpreter}", "${program}")


class Objective(Checked, key="metric"):
    """The metric that a sweep optimises.

    Args:
        name: A column of ``metrics.csv``, whose last value counts. With ``.max`` or ``.min`` after it, as W&B has them,
            its largest or smallest value; with ``_headline``, as our `WandbLogger` has it, its headline.
        goal: What the sweep does with it; null: minimize, as W&B does, unless the column is known as an accuracy.
        target: A value that ends the sweep.

    Attributes:
        column: The column of ``metrics.csv``.
        sign: A factor by which smaller is better.

    Raises:
        UserError: If there is no goal, and the column is known as an accuracy.
    """

    def __init__(
        self, name: str, goal: Literal["minimize", "maximize"] | None = None, target: float | None = None
    ) -> None:
        self.name, self.target = name, target
        self.column = re.sub(rf"(\.max|\.min|{SUFFIX})$", "", name)
        self.sign = -1 if goal == "maximize" else 1
        ensure(
            goal is not None or not re.search(r"/(acc|miou)(_|$)", self.column),
            f"metric.goal: missing, and W&B would minimize {name}; give goal: maximize (or minimize)",
        )

    def value(self, folder: Path | None) -> float | None:
        """Returns the metric of a run so far; None if it was not measured, NaN if it is not finite.

        Args:
            folder: The run folder, if there is one.
        """
        pairs = read_run(folder).get(self.column)
        if folder is None or not pairs:
            return None
        match self.name.removeprefix(self.column):
            case ".max" | ".min":
                return best_of(pairs, "max" if self.name.endswith(".max") else "min")[1]
            case "":
                return float(pairs[-1][1])
            case _:
                return headline(folder, self.column)


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        name: Its name: that of the file, unless it has one.
        method: grid, random or bayes.
        parameters: The parameters.
        objective: The metric that is optimised; None: the file names none.
        early: The rule that ends trials early; None: none.
        run_cap: Largest number of settings.
        command: The subcommand, fit or centralized.
        args: Its fixed arguments.
    """

    name: str
    method: str
    parameters: tuple[Parameter, ...]
    objective: Objective | None
    early: Hyperband | None
    run_cap: int | None
    command: str
    args: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Returns the sweep of a file.

        Raises:
            UserError: If it is not a sweep that runs here; the line names the key.
        """
        try:
            content = load_yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = str(error).replace('in "<unicode string>", ', "")
            raise UserError(f"sweep = {path}: {folded(reason)}; give a YAML file") from None
        ensure(isinstance(content, Mapping), f"sweep = {path}: no mapping; give method, parameters and command")
        ensure(
            "parameters" in content or "model" not in content,
            f"sweep = {path}: no sweep, it has no parameters; give a file such as sweeps/digits",
        )
        for key in content:
            require(
                key in (*KEYS, *LABELS),
                str(key),
                content[key],
                f"not supported here; {path} may have {', '.join((*KEYS, *LABELS))}",
            )
        content = {**dict.fromkeys(KEYS), **content}
        check_values("", content, KEYS)
        method, cap = content["method"], content["run_cap"]
        ensure(
            cap is not None or method == "grid",
            f"run_cap: missing; {method} has no end, give the number of settings to try",
        )
        entries = flatten(content["parameters"] or {})
        ensure(bool(entries), "parameters: missing; give at least one")
        objective, early = _entry(Objective, content), _entry(Hyperband, content)
        for key, present in (("early_terminate", early is not None), ("method = bayes", method == "bayes")):
            ensure(objective is not None or not present, f"metric: missing; {key} needs it")
        command, args = _command(content["command"])
        parameters = tuple(Parameter.of(key, entry) for key, entry in entries.items())
        for parameter in parameters if method == "grid" else ():
            parameter.grid()
        name, remedy = str(content.get("name") or path.stem), "at most 150 letters in one line, without slashes"
        require(bool(re.fullmatch(r"[^/\\\0\n]{1,150}", name)) and name not in (".", ".."), "name", repr(name), remedy)
        return cls(name, method, parameters, objective, early, cap, command, args)

    def search(self, seed: int) -> Search:
        """Returns the search, which proposes settings.

        Args:
            seed: Seed of the draws.
        """
        if self.method == "grid":
            return grid(self.parameters, self.run_cap)
        assert self.run_cap is not None
        return (draws if self.method == "random" else Bayes)(self.parameters, self.run_cap, seed)


def _entry(kind: type[Entry], content: Mapping[str, Any]) -> Entry | None:
    """Returns what the entry under the key of a class describes; None: there is no such entry."""
    settings = content[kind.config_key]
    return None if settings is None else kind(**{str(name): value for name, value in settings.items()})


def _command(command: Any) -> tuple[str, tuple[str, ...]]:
    """Returns the subcommand and its fixed arguments, from ``command`` of a sweep's file."""
    example = "[${env}, fl-lightning, fit, --config, quickstart, ${args}]"
    ensure(command is not None, f"command: missing; give {example}")
    require(isinstance(command, list), "command", command, f"give a list, such as {example}")
    words = [re.sub(r"\$\{envvar:(\w+)\}", lambda m: os.environ.get(m[1], m[1]), str(word)) for word in command]
    ensure(any(word in ARGUMENTS for word in words), f"command = {words}: no ${{args}}; give {example}")
    start = next((i for i, word in enumerate(words) if word in COMMANDS), None)
    if start is None:
        raise UserError(f"command = {words}: neither fit nor centralized; give {example}")
    for word in words:
        require(
            word in (*BEFORE, *ARGUMENTS) or not re.search(r"\$\{.*\}", word),
            "command",
            word,
            f"choose from {', '.join((*BEFORE, *ARGUMENTS, '${envvar:NAME}'))}",
        )
    return words[start], tuple(word for word in words[start + 1 :] if word not in (*BEFORE, *ARGUMENTS))
