"""Tunes every method of a study alike, trains its rows, and adds them to the ledger; started again, it goes on.

``python benchmarks/study.py digits --out runs/studies`` reads benchmarks/studies/digits.yaml and fills ledger/digits.
Each method draws its settings at random, as often as the others, and is judged on held-out training data. A row is one
run of its own; draws may be trained as one program. What the ledger has is not trained again: rows, and the draws of a
method if one of them is the best.
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.commands.main import main as fl_lightning
from fl_lightning.results.metrics import write_table
from fl_lightning.results.summary import headline

ROOT = Path(__file__).resolve().parents[1]
Study = dict[str, Any]


def words(*texts: str) -> list[str]:
    return [word for text in texts for word in shlex.split(text)]


def known_best(study: Study, name: str, ledger: Path) -> dict[str, str] | None:
    """The best draw of a method in ``tuning.csv``, if all are there, and no other one is as accurate."""
    rows = [row for row in read_tuning(ledger).get(name, []) if len(row) == 4]
    accuracies = sorted((float(acc) for _, state, acc, _ in rows if state == "finished"), reverse=True)
    if len(rows) < study["draws"] or len(accuracies) < 2 or accuracies[0] == accuracies[1]:
        return None
    best = next(text for _, state, acc, text in rows if state == "finished" and float(acc) == accuracies[0])
    return dict(setting.split("=", 1) for setting in best.split())  # type: ignore[misc]


def tune(study: Study, name: str, folder: Path) -> dict[str, str]:
    """The best draw of a method, as settings; all draws lie in the folder."""
    args, *ranges = study["methods"][name]
    parameters = {}
    for each in ranges:
        given = {key: value for key, value in study["ranges"][each].items() if key != "key"}
        log = {} if "values" in given else {"distribution": "log_uniform_values"}
        parameters[study["ranges"][each]["key"]] = {**log, **given}
    text = {
        "program": "fl-lightning",
        "method": "random",
        "run_cap": study["draws"],
        "metric": {"name": "server/val/acc", "goal": "maximize"},
        "parameters": parameters,
        "command": ["fl-lightning", "fit", *words(study["fit"], args, study["tuning"]), "${args}"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    with suppress(SystemExit):  # it ends so if a draw diverges, which is a result, too
        fl_lightning(["sweep", str(file), "--out", str(folder)])
    with (folder / name / "sweep.csv").open(newline="") as table:
        draws = list(csv.DictReader(table))
    tried = [draw for draw in draws if draw["state"] == "finished"]
    best = max(tried, key=lambda draw: (float(draw["server/val/acc"]), -loss(draw)))  # equal accuracies are common
    return {key: best[key] for key in parameters}


def loss(draw: dict[str, str]) -> float:
    """The held-out loss of a draw."""
    return headline(Path(draw["folder"]), "server/val/loss") or math.inf


def missing(study: Study, name: str, ledger: Path) -> dict[str, tuple[str, int]]:
    """The rows of a method that the ledger lacks: settings of the column, and seed."""
    rows = {
        f"{column.replace(' ', '_')}/{name}/seed_{seed}": (more, seed)
        for column, more in study["columns"].items()
        for seed in study["seeds"]
    }
    return {run: of for run, of in rows.items() if not (ledger / run / "row.json").is_file()}


def train(study: Study, name: str, best: dict[str, str], folder: Path, ledger: Path) -> None:
    """The rows of a method that the ledger lacks: each column and seed, without held-out data."""
    args = words(study["fit"], study["methods"][name][0], study["rows"])
    settings = [f"--{key}={value}" for key, value in best.items()]
    for run, (more, seed) in missing(study, name, ledger).items():
        if not list((folder / run).glob("version_*/summary.json")):
            place = [f"--trainer.default_root_dir={folder}", f"--trainer.name={run}"]
            seeds = [f"--trainer.seed={seed}", f"--data.seed={seed}"]
            fl_lightning(["fit", *args, *settings, *words(more), *seeds, *place, "--ckpt_path=auto"])


def read_tuning(ledger: Path) -> dict[str, list[list[str]]]:
    """The lines of ``tuning.csv`` by method."""
    known: dict[str, list[list[str]]] = {}
    if (ledger / "tuning.csv").is_file():
        with (ledger / "tuning.csv").open(newline="") as table:
            for row in list(csv.reader(table))[1:]:
                known.setdefault(row[0], []).append(row)
    return known


def tuning(study: Study, folder: Path, ledger: Path) -> None:
    """All draws so far, as ``tuning.csv``; methods without a sweep in this folder keep the draws that the file has."""
    known = read_tuning(ledger)
    for name in study["methods"]:
        path = folder / name / "sweep.csv"
        if path.is_file():
            known[name] = []
            with path.open(newline="") as table:
                for draw in csv.DictReader(table):
                    own = [f"{key}={value}" for key, value in draw.items() if key.startswith("model.")]
                    known[name].append([name, draw["state"], draw["server/val/acc"], " ".join(own)])
    rows = [row for name in study["methods"] for row in known.get(name, [])]
    write_table(ledger / "tuning.csv", ["method", "state", "server/val/acc", "settings"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "studies", help="folder of the runs")
    parser.add_argument("--ledger", type=Path, default=ROOT / "ledger", help="folder of the ledgers")
    parser.add_argument("--methods", help="some of the methods, with commas between")
    given = parser.parse_args()
    study = yaml.safe_load((ROOT / "benchmarks" / "studies" / f"{given.study}.yaml").read_text())
    out, ledger = given.out.resolve() / given.study, given.ledger.resolve() / given.study
    ledger.mkdir(parents=True, exist_ok=True)
    about = {key: study[key] for key in ("title", "text", "reference")}
    (ledger / "about.yaml").write_text(yaml.safe_dump(about, sort_keys=False, width=1000))
    for name in given.methods.split(",") if given.methods else study["methods"]:
        if not missing(study, name, ledger):
            continue
        best = known_best(study, name, ledger) or tune(study, name, out / "tuning")
        tuning(study, out / "tuning", ledger)
        train(study, name, best, out / "rows", ledger)
        if list((out / "rows").glob("**/summary.json")):
            fl_lightning(["ledger", "add", str(out / "rows"), "--into", str(ledger)])


if __name__ == "__main__":
    main()
