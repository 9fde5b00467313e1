"""A study: its methods are tuned alike, trained in each column with each seed, and kept as rows of a store.

Each method draws its settings at random, as often as the others, and is judged on held-out training data. A row is one
run of its own; draws may be trained as one program. What the store has is not trained again: rows, and the draws of a
method if one of them is the best.
"""

import csv
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core import UserError, ensure, folded, grouped, make_folder, write_atomically
from fl_lightning.results import headline, load_yaml, write_table
from fl_lightning.results.rows import ABOUT, Store
from fl_lightning.studies.store import add
from fl_lightning.sweeps.controller import Controller
from fl_lightning.sweeps.file import Sweep
from fl_lightning.sweeps.trials import Build, Check, Trial, run_trials

TUNING = "tuning.csv"
"""In a store: all draws."""
METRIC, LOSS = "server/val/acc", "server/val/loss"
"""What the draws are judged by; the data evaluate both."""


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        given: What its file says.
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
    def read(cls, file: Path, *of: Any) -> "Study":
        """Returns the study of a file, with the other attributes.

        Raises:
            UserError: If it is not readable.
        """
        try:
            return cls(load_yaml(file.read_text(encoding="utf-8")), *of)
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"study = {file}: {folded(error)}; give a YAML file, as in benchmarks/studies") from None

    def run(self, methods: Sequence[str] | None = None) -> Iterator[Path]:
        """Tunes methods, trains the rows that the store lacks, and yields each that is added.

        Args:
            methods: Some of the methods; None: all.

        Raises:
            UserError: If a setting is wrong, or a row's run breaks off.
        """
        about = {key: self.given[key] for key in ("title", "text", "reference")}
        text = yaml.safe_dump(about, sort_keys=False, width=1000)
        write_atomically(make_folder(self.store, "into") / ABOUT, text)
        for name in methods or self.given["methods"]:
            if missing := self.missing(name):
                best = self.known_best(name) or self.tune(name)
                self.write_tuning()
                for row, args in missing.items():
                    self.train(row, [*self._args(name, "rows"), *(f"--{k}={v}" for k, v in best.items()), *args])
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

    def known_best(self, name: str) -> dict[str, str] | None:
        """Returns the best draw of a method in ``tuning.csv``, if all are there, and no other is as accurate."""
        draws = self._tuning().get(name, [])
        tried = sorted(((float(acc), text) for _, state, acc, text in draws if state == "finished"), reverse=True)
        if len(draws) < self.given["draws"] or len(tried) < 2 or tried[0][0] == tried[1][0]:
            return None
        best = (setting.partition("=") for setting in shlex.split(tried[0][1]))
        return {key: value for key, _, value in best}

    def tune(self, name: str) -> dict[str, str]:
        """Returns the best draw of a method, of equal ones that with the smallest loss; all lie in the folder."""
        _, *ranges = self.given["methods"][name]
        parameters = {}
        for each in map(self.given["ranges"].__getitem__, ranges):
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
        for _ in Controller(sweep, file.with_suffix(""), [0], 0).run(self.build, check=self.check):
            pass  # one that diverges is a result, too
        tried = [draw for draw in self._draws(name) if draw["state"] == "finished"]
        ensure(bool(tried), f"{name}: no draw has finished, see {file.with_suffix('')}; give other ranges")
        best = max(tried, key=lambda draw: (float(draw[METRIC]), -(headline(Path(draw["folder"]), LOSS) or 0.0)))
        return {key: best[key] for key in parameters}

    def train(self, row: str, args: Sequence[str]) -> None:
        """Trains a row, and adds it to the store.

        Raises:
            UserError: If its run breaks off.
        """
        for found in run_trials([Trial(row, tuple(args))], self.folder / "rows", self.build, check=self.check):
            if found.error is not None or found.folder is None:
                raise UserError(f"{row}: {found.error}")
            store = Store(self.store)
            add(found.folder, store, row)
            store.write()

    def write_tuning(self) -> None:
        """Writes all draws so far; methods without draws in the folder keep those that the file has."""
        known = self._tuning()
        for name in self.given["methods"]:
            if draws := self._draws(name):
                known[name] = [
                    [name, d["state"], d[METRIC], shlex.join(f"{k}={v}" for k, v in d.items() if k[:6] == "model.")]
                    for d in draws
                ]
        rows = [row for name in self.given["methods"] for row in known.get(name, [])]
        write_table(self.store / TUNING, ["method", "state", METRIC, "settings"], rows)

    def _args(self, name: str, length: str) -> list[str]:
        return shlex.split(" ".join([self.given["fit"], self.given["methods"][name][0], self.given[length]]))

    def _draws(self, name: str) -> list[dict[str, str]]:
        """Returns the draws of a method in the folder; none if it has not been tuned there."""
        path = self.folder / "tuning" / name / "sweep.csv"
        return [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] if path.is_file() else []

    def _tuning(self) -> dict[str, list[list[str]]]:
        """Returns the lines of ``tuning.csv`` by method."""
        path = self.store / TUNING
        rows = [*csv.reader(path.read_text(encoding="utf-8").splitlines())][1:] if path.is_file() else []
        return grouped((row[0], row) for row in rows)
