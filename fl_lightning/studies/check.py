"""Rows trained again, and compared to the bit; a check signs the settings and metrics that it has compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fl_lightning.core import UserError, ensure
from fl_lightning.results.metrics import FILE, Pairs, read_metrics, tested
from fl_lightning.results.rows import CONFIG, Store, located
from fl_lightning.studies.store import about, digest, ran, starts

if TYPE_CHECKING:
    from fl_lightning.sweeps.trials import Build

COMMANDS = {"federated": "fit", "centralized": "centralized"}


@dataclass(frozen=True)
class Again:
    """A row trained again, beside the row.

    Attributes:
        start: What the bits of the new run depend on.
        apart: The metrics that differ, but for times, and their largest relative differences.
        same: Whether weights and metrics are equal to the bit.
        alike: Whether processor, torch and engine are those of the row.
        final: Absolute difference of the last evaluation; infinite if there is none.
    """

    start: Mapping[str, Any]
    apart: Mapping[str, float]
    same: bool
    alike: bool
    final: float

    def met(self, tolerance: float) -> bool:
        """Returns whether bits are equal; elsewhere, whether the last evaluation is within a tolerance."""
        return self.same or (not self.alike and self.final <= tolerance)

    def text(self) -> str:
        """Returns the comparison in a line."""
        if self.same:
            return "equal to the bit"
        far = ", ".join(f"{name} {value:.1e}" for name, value in self.apart.items()) or "its weights"
        place = "" if self.alike else f"on {self.start['cpu']}, torch {self.start['torch']}, which is not the row's: "
        return f"{place}the last evaluation is {self.final:.4f} away; relative differences: {far}"


def check(
    rows: Sequence[tuple[Path, str]], settings: Sequence[str], tolerance: float, build: "Build"
) -> Iterator[tuple[Path, Again]]:
    """Trains rows again, notes in their stores what was found, and yields it.

    Args:
        rows: Stores, and names of rows in them.
        settings: Settings of this machine, as arguments.
        tolerance: See `Again.met`.
        build: Makes the run of a trial.

    Raises:
        UserError: If a row cannot be trained, or its data are others.
    """
    from fl_lightning.sweeps.trials import Trial, run_trials  # takes seconds; a page needs none

    trials: dict[str, tuple[Path, str, Path]] = {
        (store / name).as_posix().strip("/.").replace("/", "_"): (store, name, located(store / name)[0])
        for store, name in rows
    }
    with TemporaryDirectory() as out:
        again = [
            Trial(trial, (f"--config={row / CONFIG}", *settings), COMMANDS[about(row)["kind"]])
            for trial, (_, _, row) in trials.items()
        ]
        for found in run_trials(again, Path(out), build, resume=False):
            store, name, row = trials[found.trial.name]
            if found.error is not None or found.folder is None:
                raise UserError(f"{store / name}: {found.error}")
            compared = compare_run(row, found.folder, store / name)
            note = {"same": compared.same, "met": compared.met(tolerance), "final": compared.final}
            kept = Store(store)
            (line,) = (line for line in kept.lines if line["row"] == name)
            line["about"]["checks"].append({**compared.start, **note, "digest": digest(row)})
            kept.write()
            yield store / name, compared


def compare_run(row: Path, run: Path, shown: Path) -> Again:
    """Compares a run of a row's config with the row.

    Args:
        row: The row's folder.
        run: The folder of the run.
        shown: What the row is called.

    Raises:
        UserError: If its data are others.
    """
    kept, trained = about(row), ran(run)
    ensure(kept["data"] == trained["data"], f"{shown}: was trained on other data; give its data by --data...")
    before, here = read_metrics(row / FILE), read_metrics(run / FILE)
    apart = {name: _apart(pairs, dict(here.get(name, ()))) for name, pairs in before.items() if name[:5] != "time/"}
    start = starts(run)[-1]
    alike = all(each[key] == start[key] for each in kept["starts"] for key in ("cpu", "device", "torch", "engine"))
    final = max((abs(before[name][-1][1] - here[name][-1][1]) for name in tested(before)[:1]), default=math.inf)
    far = {name: value for name, value in apart.items() if value}
    return Again(start, far, not far and kept["weights"] == trained["weights"], alike, final)


def verdict(row: Path) -> bool | None:
    """Returns what the newest check of a row found: equal to the bit, or wrong; None without one of its present files.

    A check on another kind of processor that was within the tolerance is neither.
    """
    newest = next(iter(reversed(about(row)["checks"])), None)
    if newest is None or newest.get("digest", now := digest(row)) != now:
        return None
    return True if newest["same"] else None if newest.get("met", True) else False


def _apart(before: Pairs, here: Mapping[float, float]) -> float:
    """Returns the largest relative difference of values by round; infinite, if one is missing or not finite."""
    pairs = [(value, here.get(at, math.inf)) for at, value in before]
    unequal = [(a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
    apart = (abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf for a, b in unequal)
    return max(apart, default=0.0)
