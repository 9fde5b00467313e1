"""A study: its methods are trained in each column with each seed, and kept as rows of a store, which has its rules.

A method with ranges is tuned: it draws its settings at random, as often as the others, and is judged on held-out
training data. A row is one run of its own; draws may be trained as one program. What the store has is not trained
again: rows, and the draws of a method if one of them is the best.
"""

import csv
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import UserError, ensure, grouped, make_folder, write_atomically
from fl_lightning.results import headline, write_table
from fl_lightning.results.configs import flatten
from fl_lightning.results.rows import ABOUT, Store, alone
from fl_lightning.studies.store import add
from fl_lightning.studies.suite import RUNNER_UP, Suite, about_of, frozen
from fl_lightning.sweeps.controller import Controller
from fl_lightning.sweeps.file import Sweep
from fl_lightning.sweeps.trials import Build, Check, Trial, run_trials

TUNING = "tuning.csv"
"""In a store: all draws."""
METRIC, LOSS = "server/val/acc", "server/val/loss"
"""What the draws are judged by; the data evaluate both."""
CORRELATED, SEEDS = 0.3, 1000
"""Largest rank correlation of two settings over the draws of a method, and how many seeds of draws are tried."""


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        given: What ``about.yaml`` says.
        folder: The folder of its runs.
        store: The folder of its store.
        build: Makes the run of a trial.
        check: Returns the resolved config of a trial.
    """

    given: Mapping[str, Any]
    folder: Path
    store: Path
    build: Build
    check: Check

    @classmethod
    def read(cls, place: Path, *of: Any) -> "Study":
        """Returns the study in a folder, with the other attributes.

        Raises:
            UserError: If the folder has none, or it is not whole.
        """
        given = about_of(place)
        ensure("methods" in given, f"study = {place}: no {ABOUT} with methods there; write one as in ledger/digits")
        ranges = {each for method in given["methods"].values() for each in method[1:]}
        needed = ["fit", "rows", "columns", "seeds", *(["draws", "tuning", "ranges"] if ranges else [])]
        missing = [key for key in needed if key not in given]
        missing = missing or [f"ranges.{each}" for each in sorted(ranges - {*given.get("ranges", ())})]
        ensure(not missing, f"{place / ABOUT}: {', '.join(missing)}: missing; write it as in ledger/digits")
        Suite.of(place)
        return cls(given, *of)

    def run(self, methods: Sequence[str] | None = None) -> Iterator[Path]:
        """Tunes methods, trains the rows that the store lacks, and yields each that is added.

        Args:
            methods: Some of the methods; None: all.

        Raises:
            UserError: If a setting is wrong, a row's run breaks off, or the store has rows of other rules.
        """
        if not (self.store / ABOUT).is_file():
            text = yaml.safe_dump(self.given, sort_keys=False, width=1000)
            write_atomically(make_folder(self.store, "into") / ABOUT, text)
        own = frozen(self.given)
        others = {line["about"].get("suite", own) for line in Store(self.store).lines} - {own}
        remedy = "give new rules a new suite.name, and another store by --into"
        ensure(not others, f"suite = {own}: {self.store} has rows of {', '.join(sorted(others))}; {remedy}")
        unknown = {*(methods or ())} - {*self.given["methods"]}
        ensure(
            not unknown,
            f"methods = {', '.join(sorted(unknown))}: not in {ABOUT}; it has {', '.join(self.given['methods'])}",
        )
        for name in methods or self.given["methods"]:
            for end in ["", RUNNER_UP] if self.given.get("runner_up") and self._ranges(name) else [""]:
                if missing := self.missing(name + end):
                    chosen = [f"--{key}={value}" for key, value in self.chosen(name, end).items()]
                    for row, args in missing.items():
                        self.train(row, [*self._args(name, "rows"), *chosen, *args])
                        yield self.store / row

    def missing(self, name: str) -> dict[str, list[str]]:
        """Returns the rows of a method that the store lacks, and the settings of their columns and seeds."""
        kept = {line["row"] for line in Store(self.store).lines}
        rows = {
            f"{column.replace(' ', '_')}/{name}/seed_{seed}": [
                *shlex.split(more), f"--trainer.seed={seed}", f"--data.seed={seed}"
            ]
            for column, more in self.given["columns"].items()
            for seed in self.given["seeds"]
        }  # fmt: skip
        return {row: args for row, args in rows.items() if row not in kept}

    def chosen(self, name: str, end: str = "") -> dict[str, str]:
        """Returns the tuned settings of a method: those of its rows, else its best draw, or the second-best one.

        Args:
            name: The method.
            end: ``RUNNER_UP`` for the second-best draw.
        """
        keys = [self.given["ranges"][each]["key"] for each in self._ranges(name)]
        store = Store(self.store)
        if not keys or (kept := [line for line in store.lines if line["method"] == name + end]):
            config = flatten(store.config(kept[0])) if keys else {}
            return {key: config[key if key in config else _in_list(key, config)] for key in keys}
        if name not in self._tuning():
            self.tune(name)
        tried = [row for row in self._tuning()[name] if row[1] == "finished"]
        tried.sort(key=lambda row: -float(row[2]))  # stable: the file has the better one of equals first
        return dict(each.split("=", 1) for each in shlex.split(tried[bool(end)][3]))

    def tune(self, name: str) -> None:
        """Trains the draws of a method, and writes them to ``tuning.csv``, of equal ones that with less loss first.

        Raises:
            UserError: If two settings would be correlated over the draws, or fewer than two draws have finished.
        """
        parameters = {}
        for each in map(self.given["ranges"].__getitem__, self._ranges(name)):
            log = {} if "values" in each else {"distribution": "log_uniform_values"}
            parameters[each["key"]] = {**log, **{key: value for key, value in each.items() if key != "key"}}
        text = {
            "program": "fl-lightning",
            "method": "random",
            "run_cap": self.given["draws"],
            "metric": {"name": METRIC, "goal": "maximize"},
            "parameters": parameters,
            "command": ["fl-lightning", "fit", *self._args(name, "tuning"), "${args}"],
        }
        file = make_folder(self.folder / "tuning") / f"{name}.yaml"
        write_atomically(file, yaml.safe_dump(text, sort_keys=False))
        sweep = Sweep.read(file)
        sweep = replace(sweep, args=(*sweep.args, "--trainer.loggers=[]"))
        seed = next((seed for seed in range(SEEDS) if correlation(sweep, seed) <= CORRELATED), None)
        problem = f"two settings of {name} have a rank correlation above {CORRELATED} with each of {SEEDS} seeds"
        ensure(seed is not None, f"draws = {self.given['draws']}: {problem}; give more draws")
        for _ in Controller(sweep, file.with_suffix(""), [0], seed or 0).run(self.build, check=self.check):
            pass  # one that diverges is a result, too
        draws = [*csv.DictReader((file.with_suffix("") / "sweep.csv").read_text(encoding="utf-8").splitlines())]
        tried = [draw for draw in draws if draw["state"] == "finished" and draw[METRIC]]
        remedy = "set data.val_fraction in tuning, or give other ranges"
        few = f"{name}: {len(tried)} draws have {METRIC}, and two are needed, see {file.with_suffix('')}"
        ensure(len(tried) > 1, f"{few}; {remedy}")
        draws.sort(key=lambda draw: headline(Path(draw["folder"]), LOSS) or 0.0 if draw in tried else 0.0)
        own = [[name, d["state"], d[METRIC], shlex.join(f"{key}={d[key]}" for key in parameters)] for d in draws]
        with alone(self.store):
            known = self._tuning() | {name: own}
            rows = [row for each in self.given["methods"] for row in known.get(each, ())]
            write_table(self.store / TUNING, ["method", "state", METRIC, "settings"], rows)

    def train(self, row: str, args: Sequence[str]) -> None:
        """Trains a row, and adds it to the store.

        Raises:
            UserError: If its run breaks off.
        """
        for found in run_trials([Trial(row, tuple(args))], self.folder / "rows", self.build, check=self.check):
            if found.error is not None or found.folder is None:
                raise UserError(f"{row}: {found.error}")
            with Store.edited(self.store) as store:
                add(found.folder, store, row, frozen(self.given))

    def _ranges(self, name: str) -> list[str]:
        return list(self.given["methods"][name][1:])

    def _args(self, name: str, length: str) -> list[str]:
        return shlex.split(" ".join([self.given["fit"], self.given["methods"][name][0], self.given[length]]))

    def _tuning(self) -> dict[str, list[list[str]]]:
        """Returns the lines of ``tuning.csv`` by method."""
        path = self.store / TUNING
        rows = [*csv.reader(path.read_text(encoding="utf-8").splitlines())][1:] if path.is_file() else []
        return grouped((row[0], row) for row in rows)


def _in_list(key: str, config: Mapping[str, Any]) -> str:
    """Returns the key that a setting of the last entry of a list has in a flat config: MAN's stands below its name."""
    of, _, name = key.rpartition(".")
    return f"{of}.{config[of].rpartition(', ')[2]}.{name}"


def correlation(sweep: Sweep, seed: int) -> float:
    """Returns the largest absolute rank correlation of two settings over the draws of a sweep with a seed."""
    from scipy.stats import spearmanr  # takes a second to import

    draws = sweep.search(seed).propose(sys.maxsize)
    of = [[draw[parameter.key] for draw in draws] for parameter in sweep.parameters]
    of = [values for values in of if len({*values}) > 1]
    return max((abs(float(spearmanr(a, b).statistic)) for a, b in combinations(of, 2)), default=0.0)
