"""The results of bench_engine.py: docs/benchmarks.csv, and the tables of docs/benchmarks.md."""

from __future__ import annotations

import csv
import math
import os
import platform
import re
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from contest.workloads import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"
CSV, PAGE = DOCS / "benchmarks.csv", DOCS / "benchmarks.md"
AGAINST = {"plain": "plain loop", "pfl": "pfl", "flower": "Flower", "jax": "JAX"}
KEY = ("machine", "work", "method", "contestant")
TEXT = (*KEY, "engine")
COLUMNS = (
    *KEY, "engine", "threads", "steps", "round_s", "round_min", "round_max", "loop_s", "cpu_s", "orchestration_s",
    "peak_gb", "flops", "floor_s", "of_floor",
    *(f"vs_{name}{part}" for name in AGAINST for part in ("", "_low", "_high")),
    "rounds", "turns", "dropped", "foreign", "gflops",
)  # fmt: skip
LOAD = 0.06
"""Largest share of all cores that other programs may use during a turn."""
CEILING = "ceiling"
FP32, BF16, COMPILED = "auto", "auto, bf16-mixed", "graphed, compiled"
Row = dict[str, Any]


def machine() -> str:
    """The processor, its cores, how it computes in bfloat16, and torch."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"model name\s*: (.*)", info)
    flags = set(match[1].split()) if (match := re.search(r"flags\s*: (.*)", info)) else set()
    bf16 = ["AMX-bf16"] * ("amx_bf16" in flags) + ["AVX512-bf16"] * ("avx512_bf16" in flags)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {' and '.join(bf16) or 'no bf16 units'}, torch {version('torch')}"


def read() -> list[Row]:
    """The rows of the file, with numbers as numbers, without empty cells."""
    if not CSV.exists():
        return []
    with CSV.open(newline="") as file:
        return [
            {key: value if key in TEXT else float(value) for key, value in row.items() if value != ""}
            for row in csv.DictReader(file)
        ]


def write(rows: list[Row]) -> None:
    """Writes these rows to the file, in place of those with the same key, and updates the page."""
    kept = {tuple(row[key] for key in KEY): row for row in [*read(), *rows]}
    methods = (CEILING, *METHODS)
    order = sorted(kept.values(), key=lambda row: (row["machine"], row["work"], methods.index(row["method"])))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in order)
    text = re.sub(
        r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)",
        lambda match: match[1] + "\n" + "\n".join(tables(read())) + "\n" + match[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(text)


def tables(rows: list[Row]) -> list[str]:
    """Medians of a round by machine and work: contestants by method, with the largest memory of a contestant."""
    pieces = []
    for name, group in groupby(rows, lambda row: row["machine"]):
        pieces.append(f"**{name}**\n")
        measured = [row for row in group if row["method"] != CEILING]
        for work in dict.fromkeys(row["work"] for row in measured):
            unit, scale = ("ms", 1e3) if work.startswith("W3") else ("s", 1.0)
            found: dict[str, dict[str, Row]] = {}
            for row in (row for row in measured if row["work"] == work):
                found.setdefault(_name(row), {})[row["method"]] = row
            lines = [[f"{work}, {unit} a round", *METHODS, "GB at the peak"]]
            for who, of in found.items():
                rounds = [f"{of[method]['round_s'] * scale:.3g}" if method in of else "" for method in METHODS]
                lines.append([who, *rounds, f"{max(row['peak_gb'] for row in of.values()):.2f}"])
            head, *body = [f"| {' | '.join(line)} |\n" for line in lines]
            pieces.append("".join([head, f"|---|{'--:|' * (len(METHODS) + 1)}\n", *body]))
    return pieces


def _name(row: Row) -> str:
    """The contestant; of "auto", also what it has chosen."""
    return row["contestant"].replace("auto", f"auto ({row['engine']})") if "engine" in row else row["contestant"]


def known(**values: float) -> Row:
    """Those that are numbers."""
    return {key: value for key, value in values.items() if not math.isnan(value)}
