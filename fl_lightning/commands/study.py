"""``fl-lightning study``: methods tuned alike; rows in a store, trained again; pages of rows and of claims."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fl_lightning.core import (
    PositiveInt,
    UserError,
    check_folder,
    checked,
    ensure,
    json_text,
    make_folder,
    render,
    require,
    write_atomically,
)
from fl_lightning.results import ROWS, Store, extract, find_runs, located, say, short_path, store_of


@checked
def run(
    action: Literal["run", "add", "remove", "check", "extract", "page", "claims"],
    paths: list[str],
    /,
    *settings: str,
    into: str | None = None,
    count: PositiveInt = 1,
    seed: int = 0,
    tolerance: float = 0.02,
    methods: str | None = None,
    beyond: str | None = None,
    minutes: PositiveInt | None = None,
    out: str | None = None,
) -> None:
    """Runs a study, adds runs to a store, trains rows again, unpacks them, or writes a page.

    A store has two files for all of its rows. A row has config, metrics, measurements, and says whose bits they are.
    compare and report read a store, or rows of it such as ledger/digits/alpha_0/FedAvg, as they read runs.

    Args:
        action: run, add, remove, check, extract, page or claims.
        paths: For run: stores whose about.yaml is a study. For add: run folders, or folders above them, or stores. For
            claims: a file of claims. Else: stores, or rows of one.
        *settings: For check: settings of this machine, such as --data.path FILE.
        into: For add and run: the folder of the store; null: ledger/mine, or of a study its own.
        count: For check: number of rows, drawn at random.
        seed: For check: seed of this draw.
        tolerance: For check: on another kind of processor, or with another torch, the final evaluation of a row may be
            so far away.
        methods: For run and page: some of the methods, with commas between; null: all.
        beyond: For check and page: an earlier state of the store; only rows that it lacks are drawn, or their methods
            shown beside the reference, once all follow the store's rules and no other row has changed.
        minutes: For check: a row is trained no longer than this, and as many of its rounds are compared; null: to its
            end.
        out: For page and claims: the file, beside which its figures and its numbers as JSON lie; null: the page is
            printed. For extract and run: the folder; null: in runs.
    """
    added = _beyond(paths, Path(beyond)) if beyond and action in ("check", "page") else None
    chosen = methods.split(",") if methods else None
    if out is not None:
        is_page = action in ("page", "claims") and Path(out).suffix in (".json", ".png")
        require(not is_page, "out", out, "what stands beside the page gets this ending; give another one, such as .md")
        check_folder(Path(out) if action in ("extract", "run") else Path(out).parent)
    if action == "run":
        from fl_lightning.commands.shared import build_trial, check_trial
        from fl_lightning.studies.study import Study

        for place in map(Path, paths):
            folder = Path(out or "runs/studies").resolve() / place.resolve().name
            study = Study.read(place, folder, Path(into or place), build_trial, check_trial)
            for row in study.run(chosen):
                say(f"added: {row}")
    elif action == "add":
        _add(paths, Path(into or "ledger/mine"))
    elif action == "remove":
        for folder, names in _rows(paths).items():
            with Store.edited(folder) as store:
                for name in names:
                    store.remove(name)
            for name in names:
                say(f"removed: {folder / name}")
    elif action == "check":
        rows = [
            (folder, name) for folder, names in _rows(paths).items() for name in names if added is None or name in added
        ]
        _check(random.Random(seed).sample(rows, min(count, len(rows))), settings, tolerance, minutes)
    elif action == "extract":
        for place, names in _rows(paths).items():
            kept, folder = Store(place), Path(out or f"runs/{place.name}")
            for line in kept.lines:
                if line["row"] in names:
                    extract(kept.files(line), folder / line["row"])
                    say(f"extracted: {folder / line['row']}")
    elif action == "page":
        from fl_lightning.studies.page import page

        head, sections, numbers = page(paths, chosen if added is None else [*added.values()])
        paragraphs = [head]
        for name, table, figure in sections:
            several = len(sections) > 1
            paragraphs += [f"## {name.replace('_', ' ')}"] * several + [table]
            if out is not None:
                picture = Path(out).with_suffix(".png")
                picture = picture.with_stem(f"{picture.stem}_{name}") if several else picture
                paragraphs.append(f"![Curves of the runs, or a point for each run]({picture.name})")
                write_atomically(make_folder(picture.parent) / picture.name, render(figure(), png={})[0])
        _show("\n\n".join([*paragraphs, ""]), numbers, out)
    else:
        from fl_lightning.studies import claims

        pages = [claims.page(Path(path)) for path in paths]
        _show("\n".join(text for text, _ in pages), [claim for _, verdicts in pages for claim in verdicts], out)


def _show(page: str, numbers: Sequence[Mapping[str, Any]], out: str | None) -> None:
    """Prints a page, or writes it, and beside it its numbers as JSON, of which each has a line."""
    if out is None:
        print(page, end="")
    else:
        path = make_folder(Path(out).parent) / Path(out).name
        lines = path.with_suffix(".json")
        write_atomically(lines, "[" + ",".join(map(json_text, numbers)) + "]\n")
        write_atomically(path, f"{page}[The numbers of this page as JSON]({lines.name})\n")
        say(f"written: {out}")


def _rows(paths: Sequence[str]) -> Mapping[Path, list[str]]:
    """Returns the names of the rows that paths name, by store.

    Raises:
        UserError: If one names no row.
    """
    rows: dict[Path, list[str]] = {}
    for path in paths:
        folder, name = store_of(path) or (Path(path), "")
        names = [line["row"] for line in Store(folder).matching(name)] if name else []
        ensure(bool(names), f"{path}: no row of a store there; add one by fl-lightning study add")
        rows.setdefault(folder, []).extend(names)
    return rows


def _add(paths: Sequence[str], into: Path) -> None:
    """Adds runs to a store; of several versions of a run each is a row, and has the suite whose study it follows."""
    from fl_lightning.commands.shared import build_trial, check_trial
    from fl_lightning.studies.store import add
    from fl_lightning.studies.study import Study
    from fl_lightning.studies.suite import about_of
    from fl_lightning.trainer import RunFolder

    added = list[str]()
    with Store.edited(into) as store:
        for place in (folder for path in paths for folder in located(path)):
            runs = find_runs([place])
            for run in runs:
                inside = run.relative_to(place).parts
                parts = [part for part in inside if not part.startswith("version_")] or [RunFolder(run).name]
                several = run.name != parts[-1] and sum(other.parent == run.parent for other in runs) > 1
                added.append("/".join([*parts, *[run.name] * several]))
                add(run, store, added[-1])
        if "methods" in about_of(into):
            Study.read(into, into, into, build_trial, check_trial).mark(store, added)
    for name in added:
        say(f"added: {into / name}")


def _beyond(paths: Sequence[str], before: Path) -> dict[str, str]:
    """Returns the methods of the rows that a store has beyond an earlier state of it, by row."""
    from fl_lightning.studies.check import added

    ensure(len(paths) == 1 and (Path(paths[0]) / ROWS).is_file(), f"paths = {', '.join(paths)}: give one store")
    return {line["row"]: line["method"] for line in added(Store(Path(paths[0])), Store(before))}


def _check(rows: Sequence[tuple[Path, str]], settings: Sequence[str], tolerance: float, minutes: int | None) -> None:
    """Trains rows again, and prints how far they are apart."""
    from fl_lightning.commands.shared import build_trial
    from fl_lightning.studies.check import check

    wrong = 0
    for row, again in check(rows, settings, tolerance, build_trial, minutes):
        met = again.met(tolerance)
        wrong += not met
        say(f"{short_path(row)}: {again.text()}{'' if met else ': WRONG'}")
    if wrong:
        raise UserError(f"{wrong} of {len(rows)} rows are not met; see the lines above")
