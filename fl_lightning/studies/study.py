"""A study: its methods are trained in each column with each seed, and kept as rows of a store, which has its rules.

A method with ranges is tuned: it tries its published settings and as many draws as the others, each with several seeds,
and is judged on held-out training data. A row is one run of its own; draws may be trained as one program. What the
store has is not trained again: rows, and the draws of a method.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import UserError, ensure, make_folder, write_atomically
from fl_lightning.results import differences
from fl_lightning.results.rows import ABOUT, Line, Store, alone
from fl_lightning.studies import tuning
from fl_lightning.studies.store import add, portable
from fl_lightning.studies.suite import RUNNER_UP, Suite, about_of, frozen
from fl_lightning.sweeps.trials import Build, Check, Trial, outcome, run_trials


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        about: What ``about.yaml`` says.
        folder: The folder of its runs.
        store: The folder of its store.
        build: Makes the run of a trial.
        check: Returns the resolved config of a trial.
    """

    about: Mapping[str, Any]
    folder: Path
    store: Path
    build: Build
    check: Check

    @classmethod
    def read(cls, place: Path, *attributes: Any) -> "Study":
        """Returns the study in a folder, with the other attributes.

        Raises:
            UserError: If the folder has none, or it is not whole.
        """
        about = about_of(place)
        ensure("methods" in about, f"study = {place}: no {ABOUT} with methods there; write one as in ledger/digits")
        ranges = {name for method in about["methods"].values() for name in method[1:]}
        needed = ["fit", "rows", "columns", "seeds", *(["draws", "tuning", "ranges"] if ranges else [])]
        missing = [key for key in needed if key not in about]
        missing = missing or [f"ranges.{name}" for name in sorted(ranges - {*about.get("ranges", ())})]
        ensure(not missing, f"{place / ABOUT}: {', '.join(missing)}: missing; write it as in ledger/digits")
        Suite.of(place)
        return cls(about, *attributes)

    def run(self, methods: Sequence[str] | None = None) -> Iterator[Path]:
        """Tunes methods, trains the rows that the store lacks, and yields each that is added.

        Args:
            methods: Some of the methods; None: all.

        Raises:
            UserError: If a setting is wrong, a row's run breaks off, or the store has rows of other rules.
        """
        if not (self.store / ABOUT).is_file():
            text = yaml.safe_dump(self.about, sort_keys=False, width=1000)
            write_atomically(make_folder(self.store, "into") / ABOUT, text)
        rules = frozen(self.about)
        others = {line["about"].get("suite", rules) for line in Store(self.store).lines} - {rules}
        remedy = "give new rules a new suite.name, and another store by --into"
        ensure(not others, f"suite = {rules}: {self.store} has rows of {', '.join(sorted(others))}; {remedy}")
        unknown = {*(methods or ())} - {*self.about["methods"]}
        ensure(
            not unknown,
            f"methods = {', '.join(sorted(unknown))}: not in {ABOUT}; it has {', '.join(self.about['methods'])}",
        )
        for name in methods or self.about["methods"]:
            for end in ["", RUNNER_UP] if name in self.about.get("runner_up", ()) else [""]:
                stored = {line["row"] for line in Store(self.store).lines}
                if missing := [row for row in self.rows(name + end) if row not in stored]:
                    if not self.tuned(name):
                        self.tune(name)
                    for row in missing:
                        self.train(row, self.args(name + end, row))
                        yield self.store / row

    def rows(self, method: str) -> dict[str, list[str]]:
        """Returns the rows of a method, and the settings of their columns and seeds."""
        return {
            f"{column.replace(' ', '_')}/{method}/seed_{seed}": [*shlex.split(arguments), *_of(seed)]
            for column, arguments in self.about["columns"].items()
            for seed in self.about["seeds"]
        }

    def args(self, method: str, row: str) -> list[str]:
        """Returns the arguments of a row: those of its method with its tuned settings, and of its column and seed."""
        name = method.removesuffix(RUNNER_UP)
        tried = tuning.read(self.store).get(name)
        best = tuning.chosen(tried, rank=method != name) if tried else {}
        return [
            *self._args(name, "rows"), *(f"--{key}={value}" for key, value in best.items()), *self.rows(method)[row],
        ]  # fmt: skip

    def mark(self, store: Store, rows: Sequence[str]) -> None:
        """Notes the rules of the study in the rows of a store that are as the study trains them.

        Raises:
            UserError: If such a row cannot be made here, as when its class is not found.
        """
        rules = frozen(self.about)
        for line in (line for line in store.lines if line["row"] in rows and line["about"].get("suite") != rules):
            if self.follows(line, store.config(line)):
                line["about"]["suite"] = rules

    def follows(self, line: Line, config: Mapping[str, Any]) -> bool:
        """Returns whether a line and its config are those of a row of the study."""
        row, method = line["row"], line["method"]
        name = method.removesuffix(RUNNER_UP)
        if name not in self.about["methods"] or row not in self.rows(method) or not self.tuned(name):
            return False
        stored, expected = map(portable, (config, self.check(Trial(row, tuple(self.args(method, row))))))
        return not differences(stored, expected) and stored["trainer"]["callbacks"] == expected["trainer"]["callbacks"]

    def tuned(self, name: str) -> bool:
        """Returns whether a method has no ranges, or its settings have been tried."""
        return not self.about["methods"][name][1:] or name in tuning.read(self.store)

    def tune(self, name: str) -> None:
        """Trains a method with each setting that it tries and each seed of the tuning, and keeps the results.

        Raises:
            UserError: If a setting is wrong, two would be correlated over the draws, a run breaks off for another
                reason than divergence, or fewer than two settings have finished; then nothing is kept of the method.
        """
        settings, args = tuning.tried(self.about, name), self._args(name, "tuning")
        trials = [
            [
                Trial(
                    f"{name}/{k}/seed_{seed}",
                    (*args, *(f"--{key}={value}" for key, value in setting.items()), *_of(seed)),
                )
                for seed in self.about.get("tuning_seeds", [0])
            ]
            for k, setting in enumerate(settings)
        ]
        for repeats in trials:
            self.check(repeats[0])
        all_trials = [trial for repeats in trials for trial in repeats]
        folder, runs = self.folder / "tuning", dict[str, Path | None]()
        for trained in run_trials(all_trials, folder, self.build, check=self.check):
            has_ended = outcome(trained.trial, folder) is not None  # a run that has diverged has ended, too
            ensure(has_ended, f"{trained.trial.name}: {trained.error}")
            runs[trained.trial.name] = None if trained.error else trained.folder
        lines = tuning.judged(name, settings, [[runs[trial.name] for trial in repeats] for repeats in trials])
        tuning.chosen([dict(zip(tuning.HEAD, line, strict=True)) for line in lines])
        with alone(self.store):
            tuning.write(self.store, lines, [*self.about["methods"]])

    def train(self, row: str, args: Sequence[str]) -> None:
        """Trains a row, and adds it to the store.

        Raises:
            UserError: If its run breaks off.
        """
        for trained in run_trials([Trial(row, tuple(args))], self.folder / "rows", self.build, check=self.check):
            if trained.error is not None or trained.folder is None:
                raise UserError(f"{row}: {trained.error}")
            with Store.edited(self.store) as store:
                add(trained.folder, store, row, frozen(self.about))

    def _args(self, name: str, length: str) -> list[str]:
        return shlex.split(" ".join([self.about["fit"], self.about["methods"][name][0], self.about[length]]))


def _of(seed: int) -> list[str]:
    """Returns the arguments of a seed: that of training, and that of the partition and of what is held out."""
    return [f"--trainer.seed={seed}", f"--data.seed={seed}"]
