"""``fl-lightning ledger``: finished runs as rows of a ledger, rows trained again, and the ledger as a page."""

import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fl_lightning.core import (
    PositiveInt,
    UserError,
    check_folder,
    checked,
    ensure,
    files,
    json_text,
    make_folder,
    render,
    write_atomically,
    write_together,
)
from fl_lightning.results import SUMMARY as ENDED
from fl_lightning.results import find_runs, ledger, say
from fl_lightning.trainer import RunFolder

SUMMARY = "Keep finished runs as rows of a ledger; train rows again and compare their bits; write the ledger's page."
COMMANDS = {"federated": "fit", "centralized": "centralized"}


@checked
def run(
    action: Literal["add", "check", "page"],
    folders: list[str],
    /,
    *settings: str,
    into: str = "ledger",
    count: PositiveInt = 1,
    tolerance: float = 0.02,
    out: str | None = None,
) -> None:
    """Adds runs to a ledger, trains some of its rows again, or writes its page.

    A row is a run folder without its checkpoints: config, evaluations, measurements, and row.json, which says whose
    bits they are. compare and report read rows as they read runs.

    Args:
        action: add, check or page.
        folders: For add: run folders, or folders above them. Else: rows, or folders above them.
        *settings: For check: settings of this machine, such as --data.path FILE.
        into: For add: the folder of the ledger.
        count: For check: number of rows, drawn at random.
        tolerance: For check: on another kind of processor, or with another torch, the final evaluation of a row may be
            so far away.
        out: For page: the file, beside which its figure lies; null: the page is printed.
    """
    if action == "add":
        for given in folders:
            found = find_runs([given])
            for folder in found:
                several = sum(other.parent == folder.parent for other in found) > 1
                say(f"added: {_add(folder, Path(given).resolve(), Path(into), several)}")
        return
    if out is not None:
        check_folder(Path(out).parent)
    found = [row for given in folders for row in ledger.rows(Path(given))]
    if action == "check":
        _check(random.sample(found, min(count, len(found))), settings, tolerance)
    else:
        text, figure = ledger.page(found)
        if out is None:
            print(text)
        else:
            path = Path(out)
            name = f"{path.stem}.png"
            written = {path: f"{text}\n\n![Curves of the runs, or a point for each run]({name})\n"}
            make_folder(path.parent)
            write_together({**written, path.parent / name: render(figure(), png={})[0]})


def _add(run: Path, given: Path, into: Path, several: bool) -> Path:
    """Writes the row of a run, and returns its folder; of ``several`` versions each is a row."""
    ensure((run / ENDED).is_file(), f"{run}: the run has not ended; let it end first")
    parts = [part for part in run.relative_to(given).parts if not part.startswith("version_")] or [RunFolder(run).name]
    row, about = into.joinpath(*parts, *[run.name] * several), _about(run)
    before = ledger.about(row) if (row / ledger.FILE).exists() else {}
    ensure(
        not before or before.get("weights") == about["weights"],
        f"{row}: a row with other weights; remove it, or give another folder by --into",
    )
    for name, text in ledger.row_files(run, about).items():
        if name == ledger.FILE and before:
            text = json_text({**json.loads(text), "checks": before["checks"]}, indent=1)
        write_atomically(make_folder((row / name).parent, "into") / name.rpartition("/")[2], text)
    return row


def _about(run: Path) -> dict[str, Any]:
    """Returns what the last checkpoint of a run knows of it."""
    path = RunFolder(run).last
    try:
        content = files.load(path)
        identity, server = content["identity"], content["server"]
        import torch  # takes seconds; a page needs none

        digest = sha256()
        for name in sorted(server):
            digest.update(name.encode() + server[name].contiguous().view(torch.uint8).numpy().tobytes())
        return {
            "kind": content["kind"],
            "method": identity["model"],
            "data": identity["data"],
            "rounds": content["round"],
            "weights": digest.hexdigest()[:16],
        }
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no checkpoint of a whole run ({error}); a row needs its run's last one") from None


def _check(rows: Sequence[Path], settings: Sequence[str], tolerance: float) -> None:
    """Trains rows again, prints how far they are apart, and writes that into each row."""
    from fl_lightning.commands.shared.trials import build
    from fl_lightning.sweeps.trials import Trial, run_trials

    by_name = {row.as_posix().strip("/.").replace("/", "_"): row for row in rows}
    wrong = 0
    with TemporaryDirectory() as place:
        trials = [
            Trial(name, (f"--config={row / 'config.yaml'}", *settings), COMMANDS[ledger.about(row)["kind"]])
            for name, row in by_name.items()
        ]
        for found in run_trials(trials, Path(place), build, resume=False):
            row = by_name[found.trial.name]
            if found.error is not None or found.folder is None:
                raise UserError(f"{row}: {found.error}")
            again = ledger.compare_run(row, found.folder, _about(found.folder))
            good = again.same or (not again.alike and again.final <= tolerance)
            wrong += not good
            say(f"{row}: {again.text()}{'' if good else ': WRONG'}")
            ledger.note(row, again)
    ensure(not wrong, f"{wrong} of {len(rows)} rows are not met; see the lines above")
