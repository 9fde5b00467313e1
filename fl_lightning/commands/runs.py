"""``fl-lightning runs``: the runs of a folder; needs neither torch nor Lightning."""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.markup import escape

from fl_lightning.core import UserError, ensure, read_json
from fl_lightning.results import (
    SUMMARY,
    config_of,
    console,
    filled,
    fitting,
    read_run,
    rounds_done,
    say,
    short_path,
    summarise,
    window,
)
from fl_lightning.trainer.storage.run_folder import in_use

STARTED = "provenance.json"
"""The file that every run folder has from the start."""
SECONDS = 2.0
"""Seconds between two looks at runs that train."""


@dataclass(frozen=True)
class Listed:
    """A run as the list shows it.

    Attributes:
        folder: The run folder.
        state: running, finished (all rounds are done), ended (it was stopped early) or interrupted.
        rounds: Rounds done, and those of the config.
        headline: The headline of the metric on the test set, if it was measured.
        last: Rounds at the end that it covers; 0 if it was not measured.
        minutes: Training time.
        size: Bytes of the folder.
        changed: When its files changed last, in seconds since 1970.
    """

    folder: Path
    state: str
    rounds: str
    headline: str
    last: int
    minutes: str
    size: int
    changed: float


def run(folders: list[str] | None = None, /, follow: bool = False, delete: bool = False, yes: bool = False) -> None:
    """Lists runs, the one that changed last at the end.

    Args:
        folders: Run folders, or folders above them; none: runs.
        follow: List again until none of the runs trains any more.
        delete: Delete these run folders, after a question; none that trains.
        yes: Do not ask.
    """
    ensure(bool(folders) or not delete, "delete: give the runs that are to go, such as runs/FedAvg-Digits/version_0")
    paths = folders or ["runs"]
    runs = find(paths)
    ensure(bool(runs), f"folders = {' '.join(paths)}: no run there; give another folder")
    if delete:
        _delete(runs, yes)
    elif follow:
        with Live(_table(runs), console=console()) as live:  # in a file or pipe, it shows the last table alone
            while any(run.state == "running" for run in runs):
                time.sleep(SECONDS)
                live.update(_table(runs := find(paths)))
    else:
        console().print(_table(runs))


def find(folders: list[str]) -> list[Listed]:
    """Returns the runs among and below the given folders, the one that changed last at the end.

    Raises:
        UserError: If a folder does not exist.
    """
    for folder in folders:
        ensure(Path(folder).is_dir(), f"folders = {folder}: no such folder; give run folders, or one above them")
    paths = {path.parent for folder in folders for path in Path(folder).resolve().rglob(STARTED)}
    return sorted(map(_listed, paths), key=lambda run: run.changed)


def _listed(folder: Path) -> Listed:
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    headline, last, minutes, done, max_rounds = "", 0, "", 0, None
    try:
        done = rounds_done(read_run(folder))
        if config := config_of(folder):
            max_rounds = config["trainer"]["max_rounds"]
        ended = read_json(folder / SUMMARY, dict, {}).get("rounds") == done
        state = "finished" if ended and max_rounds in (done, None) else "ended" if ended else "interrupted"
        if done:
            summary = summarise(folder)
            headline, last = f"{summary.mean:.4g}", summary.last
            minutes = "" if summary.minutes is None else f"{summary.minutes:.1f}"
    except (KeyError, TypeError):
        state = "damaged"
    except UserError as error:
        state = "damaged" if not str(error).startswith("metric = ") else state
    return Listed(
        folder, "running" if in_use(folder) else state,
        f"{done:,}" + ("" if max_rounds is None else f"/{max_rounds:,}"),
        headline, last, minutes, sum(stat.st_size for _, stat in files),
        max((stat.st_mtime for _, stat in files), default=0),
    )  # fmt: skip


def _table(runs: list[Listed]) -> Group:
    lasts = [run.last for run in runs if run.last]
    heads = ("run", "state", "rounds", window(lasts) if lasts else "headline", "minutes", "MB")
    rows = [
        [
            escape(short_path(run.folder)),
            run.state,
            run.rounds,
            run.headline,
            run.minutes,
            f"{run.size / 1e6:.1f}",
        ]
        for run in runs
    ]
    return Group(*fitting(filled(heads, rows, left=2, box=None, padding=(0, 1, 0, 0)), console().width))


def _delete(runs: list[Listed], yes: bool) -> None:
    """Removes run folders, and the folders right above them that are empty then."""
    busy = [run for run in runs if run.state == "running"]
    ensure(not busy, f"delete: {', '.join(short_path(run.folder) for run in busy)}: trains; end it, or leave it out")
    console().print(_table(runs))
    if not yes:
        ensure(sys.stdin.isatty(), "delete: nobody can be asked; give --yes")
        if input(f"delete {len(runs)} runs? [y/N] ").strip().lower() not in ("y", "yes"):
            say("nothing deleted")
            return
    for run in runs:
        shutil.rmtree(run.folder)
        if not any(run.folder.parent.iterdir()):
            run.folder.parent.rmdir()
    say(f"deleted: {len(runs)} runs, {sum(run.size for run in runs) / 1e6:.1f} MB")
