"""Rows trained again, and compared to the bit; a check signs the settings and metrics that it has compared."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fl_lightning.core import UserError, ensure
from fl_lightning.results.metrics import FILE, Pairs, read_metrics, rounds_done, tested
from fl_lightning.results.rows import ABOUT, CONFIG, ROW, Line, Store, located
from fl_lightning.studies.store import about, digest, ran, starts
from fl_lightning.studies.suite import Suite, about_of, frozen

if TYPE_CHECKING:
    from fl_lightning.sweeps.trials import Build

COMMANDS = {"federated": "fit", "centralized": "centralized"}
MACHINE = ("cpu", "device", "torch", "engine")
"""What two starts must share for the same bits."""


@dataclass(frozen=True)
class Again:
    """A row trained again, beside the row.

    Attributes:
        start: What the bits of the new run depend on.
        apart: The metrics that differ, but for times, and their largest relative differences.
        same: Whether weights and metrics are equal to the bit.
        same_machine: Whether processor, torch and engine are those of the row.
        final: Absolute difference of the last evaluation; infinite if there is none.
        rounds: The rounds that were compared.
        complete: Whether these are all of the row; else there are no weights to compare.
    """

    start: Mapping[str, Any]
    apart: Mapping[str, float]
    same: bool
    same_machine: bool
    final: float
    rounds: int
    complete: bool

    def met(self, tolerance: float) -> bool:
        """Returns whether bits are equal; elsewhere, whether the last evaluation is within a tolerance."""
        return self.same or (not self.same_machine and self.final <= tolerance)

    def text(self) -> str:
        """Returns the comparison in a line."""
        if self.same:
            return "equal to the bit" + f" in its first {self.rounds} rounds" * (not self.complete)
        far = ", ".join(f"{name} {value:.1e}" for name, value in self.apart.items()) or "its weights"
        place = (
            ""
            if self.same_machine
            else f"on {self.start['cpu']}, torch {self.start['torch']}, which is not the row's: "
        )
        return f"{place}the last evaluation is {self.final:.4f} away; relative differences: {far}"


def check(
    rows: Sequence[tuple[Path, str]],
    settings: Sequence[str],
    tolerance: float,
    build: "Build",
    minutes: int | None = None,
) -> Iterator[tuple[Path, Again]]:
    """Trains rows again, notes in their stores what was found, and yields it.

    Args:
        rows: Stores, and names of rows in them.
        settings: Settings of this machine, as arguments.
        tolerance: See `Again.met`.
        build: Makes the run of a trial.
        minutes: A run ends after so many, and its rounds are compared; None: each row is trained to its end.

    Raises:
        UserError: If a row cannot be trained, or its data are others.
    """
    from fl_lightning.sweeps.trials import Trial, run_trials  # takes seconds; a page needs none

    trials: dict[str, tuple[Path, str, Path]] = {
        (store / name).as_posix().strip("/.").replace("/", "_"): (store, name, located(store / name)[0])
        for store, name in rows
    }
    limit = [] if minutes is None else [f"--trainer.max_time=00:{minutes // 60:02}:{minutes % 60:02}:00"]
    with TemporaryDirectory() as folder:
        reruns = [
            Trial(trial, (f"--config={row / CONFIG}", *settings, *limit), COMMANDS[about(row)["kind"]])
            for trial, (_, _, row) in trials.items()
        ]
        for trained in run_trials(reruns, Path(folder), build, resume=False):
            store, name, row = trials[trained.trial.name]
            if trained.error is not None or trained.folder is None:
                raise UserError(f"{store / name}: {trained.error}")
            compared = compare_run(row, trained.folder, store / name)
            note = {"same": compared.same, "met": compared.met(tolerance), "final": compared.final}
            note |= {} if compared.complete else {"rounds": compared.rounds}
            with Store.edited(store) as edited:
                (line,) = (line for line in edited.lines if line["row"] == name)
                line["about"]["checks"].append({**compared.start, **note, "digest": digest(row)})
            yield store / name, compared


def compare_run(row: Path, run: Path, shown: Path) -> Again:
    """Compares a run of a row's config with the row, as far as the run goes.

    Args:
        row: The row's folder.
        run: The folder of the run.
        shown: What the row is called.

    Raises:
        UserError: If its data are others.
    """
    stored, trained = about(row), ran(run)
    ensure(stored["data"] == trained["data"], f"{shown}: was trained on other data; give its data by --data...")
    metrics = read_metrics(run / FILE)
    rounds = rounds_done(metrics)
    row_metrics = {
        name: kept_pairs
        for name, pairs in read_metrics(row / FILE).items()
        if (kept_pairs := [pair for pair in pairs if pair[0] <= rounds])
    }
    differences = {
        name: _apart(pairs, dict(metrics.get(name, ()))) for name, pairs in row_metrics.items() if name[:5] != "time/"
    }
    start = starts(run)[-1]
    last = (
        (value, dict(metrics.get(name, ())).get(round, math.inf))
        for name in tested(row_metrics)
        for round, value in row_metrics[name][-1:]
    )
    final = next((abs(a - b) for a, b in last), math.inf)
    unequal, complete = {name: value for name, value in differences.items() if value}, rounds >= stored["rounds"]
    return Again(
        start,
        unequal,
        not unequal and (not complete or stored["weights"] == trained["weights"]),
        _alike(stored, start),
        final,
        rounds,
        complete,
    )


def added(store: Store, before: Store) -> list[Line]:
    """Returns the rows that a store has beyond an earlier state of it, if they and the others follow its rules.

    Raises:
        UserError: If the rules or a row have changed, a row is missing, or a new one is not of the suite.
    """
    study, lines = about_of(store.folder), {line["row"]: line for line in store.lines}
    rules, measures = frozen(study), Suite.of(store.folder).measures
    ensure(
        not before.lines or rules == frozen(about_of(before.folder)),
        f"{store.folder / ABOUT}: its rules have changed; give new ones a new suite.name and a store of their own",
    )
    for line in before.lines:
        present = lines.pop(line["row"], None)
        ensure(
            present is not None and _unsigned(store.files(present)) == _unsigned(before.files(line)),
            f"{store.folder / line['row']}: is missing, or is not what it was; put it back",
        )
    for name, line in lines.items():
        metrics = store.files(line)[FILE].partition("\n")[0].strip().split(",")
        about, columns = line["about"], [column.replace(" ", "_") for column in study.get("columns", ())]
        wrong = {
            "it was not trained by these rules": about.get("suite") != rules,
            "its column or seed is not one of the study": line["column"] not in columns
            or line["seed"] not in study["seeds"],
            f"it lacks one of {', '.join(measures)}": not {*measures} <= {*metrics},
            "its code was not committed": any(start["changed"] for start in about["starts"]),
        }
        problem = next((text for text, is_so in wrong.items() if is_so), None)
        ensure(problem is None, f"{store.folder / name}: {problem}; train it by fl-lightning study run {store.folder}")
    return [*lines.values()]


def _unsigned(files: Mapping[str, str]) -> dict[str, Any]:
    """Returns the files of a row without its checks."""
    return {**files, ROW: {**json.loads(files[ROW]), "checks": []}}


def verdict(row: Path) -> bool | None:
    """Returns what checks of a row's present files found: equal to the bit, or wrong; None if they decide nothing.

    The newest one counts that was equal to the bit, or was made on the row's own kind of machine. Without one, the
    newest from elsewhere does: wrong beyond the tolerance, and neither within it.
    """
    stored, signature = about(row), digest(row)
    checks = [check for check in stored["checks"] if check.get("digest", signature) == signature]
    bits = [check for check in checks if check["same"] or _alike(stored, check)]
    for newest in (bits or checks)[-1:]:
        return True if newest["same"] else None if newest["met"] else False
    return None


def _alike(about: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Returns whether a start has the kind of machine of a row."""
    return all(row_start[key] == start[key] for row_start in about["starts"] for key in MACHINE)


def _apart(stored: Pairs, trained: Mapping[float, float]) -> float:
    """Returns the largest relative difference of values by round; infinite, if one is missing or not finite."""
    pairs = ((value, trained.get(round, math.inf)) for round, value in stored)
    unequal = ((a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b)))
    differences = (abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf for a, b in unequal)
    return max(differences, default=0.0)
