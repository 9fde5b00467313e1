"""Seconds a round of this package, of a plain loop, and of pfl, Flower and JAX where they are installed, side by side.

``make bench`` runs everything; a part is run again by, for example,

    python -m contest --work W1,W3 --methods FedAvg --turns 3

and takes its place among the rows of docs/benchmarks.csv; the tables of docs/benchmarks.md are those of the file.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import time
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from benchmarks.harness import ROOT, Case, Row, compete, machine, row
from contest.workloads import METHODS, WORKS
from fl_lightning.results.metrics import markdown, write_table

CSV, PAGE = ROOT / "docs/benchmarks.csv", ROOT / "docs/benchmarks.md"
PEERS = {"pfl": "pfl", "Flower": "ray", "JAX": "jax"}
"""The module that a peer needs."""
ENGINES: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, bf16-mixed": {"precision": "bf16-mixed"},
    "sequential": {"engine": "sequential"},
    "batched": {"engine": "batched"},
    "graphed": {"engine": "graphed"},
    "graphed, compiled": {"engine": "graphed", "compile": True},
}
"""Settings of the trainer."""
AGAINST = ("plain loop", *PEERS)
KEY = ("machine", "work", "method", "contestant")
TEXT = (*KEY, "engine")
COLUMNS = (
    *TEXT, "threads", "steps", "round_s", "round_min", "round_max", "cpu_s", "peak_gb",
    *(f"vs_{name.split()[0].lower()}{part}" for name in AGAINST for part in ("", "_low", "_high")),
    "rounds", "turns", "dropped", "foreign",
)  # fmt: skip


def cases(work: str, method: str, common: dict[str, Any]) -> list[Case]:
    """Returns the contestants of a work and a method; peers only where they have it, and are installed."""
    small = work.startswith("W3")
    peers = {
        "pfl": method == "FedAvg" and work != "W2",
        "Flower": method == "FedAvg" and work in ("W1", "W3-MLP"),
        "JAX": method in ("FedAvg", "FedSAM") and small,
    }
    engines = [*ENGINES][:2] + ["batched"] * (work == "W1" and method == "FedAvg")
    if small:
        engines = ["auto", *[*ENGINES][2:]]
    settings = {"work": work, "method": method, "threads": WORKS[work].threads, **common}
    default = {"engine": "auto", "precision": "32-true"}
    return [
        Case("plain loop", "contest.plain.run", settings, 5 if small else 1),
        *(
            Case(name, f"contest.{name.lower()}.run", settings, 5 if small else 1)
            for name, has in peers.items()
            if has and find_spec(PEERS[name])
        ),
        *(
            Case(name, "contest.ours.run", settings | {"trainer": default | ENGINES[name]}, 5 if small else 1)
            for name in engines
        ),
    ]


def stored() -> list[Row]:
    """Returns the rows of the file, with numbers as numbers, without empty cells."""
    with CSV.open(newline="", encoding="utf-8") as file:
        return [
            {key: value if key in TEXT else float(value) for key, value in line.items() if value != ""}
            for line in csv.DictReader(file)
        ]


def store(rows: list[Row]) -> None:
    """Writes these rows to the file, in place of those with the same key, and the tables to the page."""
    kept = {tuple(row[key] for key in KEY): row for row in [*stored(), *rows]}
    order = sorted(kept.values(), key=lambda row: (row["machine"], row["work"], METHODS.index(row["method"])))
    numbers = [[f"{v:.5g}" if isinstance(v := row.get(key, ""), float) else v for key in COLUMNS] for row in order]
    write_table(CSV, COLUMNS, numbers)
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def fill(text: str) -> str:
    """Returns the page with the tables of the file."""
    block = re.compile(r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{tables(stored())}\n{match[2]}", text)


def tables(rows: list[Row]) -> str:
    """Returns medians of a round by machine and work: contestants by method, each with its largest memory."""
    pieces = []
    for name, group in groupby(rows, lambda row: row["machine"]):
        pieces.append(f"**{name}**\n")
        for work, work_rows in groupby(group, lambda row: row["work"]):
            unit, scale = ("ms", 1e3) if work.startswith("W3") else ("s", 1.0)
            contestants: dict[str, dict[str, Row]] = {}
            for line in work_rows:
                who = line["contestant"].replace("auto", f"auto ({line.get('engine')})")
                contestants.setdefault(who, {})[line["method"]] = line
            lines = [[f"{work}: {WORKS[work].ours}, {unit} a round", *METHODS, "GB at the peak"]]
            for who, cells in contestants.items():
                rounds = [f"{cells[method]['round_s'] * scale:.3g}" if method in cells else "" for method in METHODS]
                lines.append([who, *rounds, f"{max(line['peak_gb'] for line in cells.values()):.2f}"])
            pieces.append(markdown(lines))
    return "\n".join(pieces)


def named(cells: Row) -> Row:
    """Returns a row of the harness by the names of the file."""
    names = {"case": "contestant", "seconds": "round_s", "low": "round_min", "high": "round_max", "units": "rounds"}
    ratio = re.compile(r"vs (\w+)[^,]*(?:, (\w+))?")
    cells = {names.get(key, key): value for key, value in cells.items()}
    return {ratio.sub(lambda m: "_".join(filter(None, ("vs", m[1].lower(), m[2]))), k): v for k, v in cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="W1,W2,W3", help="W1, W2, W3, W3-MLP, W3-CNN")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", help="contestants by name, separated by ;")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a turn, at least")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn, at least")
    parser.add_argument("--steps", type=int, default=10, help="local steps of W2; the papers have 50")
    parser.add_argument("--threads", type=int, default=2, help="of W1 and W2; W3 has 1")
    args = parser.parse_args()
    if missing := [name for name, module in PEERS.items() if not find_spec(module)]:
        print(f"{', '.join(missing)} left out: python -m pip install -r contest/requirements.txt")
    print(f"{machine()}; load average {os.getloadavg()[0]:.2f}", flush=True)
    rows: list[Row] = []
    for work in [name for name in WORKS if any(name.startswith(prefix) for prefix in args.work.split(","))]:
        common = {} if work.startswith("W3") else {"threads": args.threads}
        common |= {"steps": args.steps} if work == "W2" else {}
        for method in args.methods.split(","):
            chosen = [
                case for case in cases(work, method, common) if not args.only or case.name in args.only.split(";")
            ]
            started = time.perf_counter()
            players = compete(chosen, args.turns, args.rounds, args.seconds)
            about = {"machine": machine(), "work": work, "method": method, "steps": WORKS[work].steps}
            about |= {"threads": WORKS[work].threads, **common}
            rows += [{**about, **named(row(player, players, AGAINST))} for player in players]
            times = ", ".join(f"{line['contestant']} {line['round_s']:.4g} s" for line in rows[-len(players) :])
            print(f"{work} {method}: {times} [{time.perf_counter() - started:.0f} s]", flush=True)
            store(rows)
    print(tables([line for line in stored() if line["machine"] == machine()]))


if __name__ == "__main__":
    main()
