"""The results of bench_engine.py: docs/benchmarks.csv, the tables of docs/benchmarks.md, and a figure."""

from __future__ import annotations

import csv
import math
import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from contest.workloads import METHODS, WORKS

DOCS = Path(__file__).resolve().parents[2] / "docs"
CSV, PAGE, FIGURE = DOCS / "benchmarks.csv", DOCS / "benchmarks.md", DOCS / "benchmarks"
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


@dataclass(frozen=True)
class Claim:
    """So many times as fast, at least."""

    work: str
    method: str
    ours: str
    against: str
    required: float
    aim: float


CLAIMS = (
    Claim("W1", "FedAvg", FP32, "pfl", 1.4, 1.7),
    Claim("W1", "FedAvg", BF16, "pfl", 2.8, 3.5),
    Claim("W1", "FedSAM", FP32, "plain", 1.5, 1.7),
    Claim("W1", "FedSAM", BF16, "plain", 3.0, 3.7),
    Claim("W2", "FedSMOO", FP32, "plain", 1.45, 1.7),
    Claim("W2", "FedSMOO", BF16, "plain", 2.4, 3.5),
    Claim("W2", "FedGMT", FP32, "plain", 1.45, 1.7),
    Claim("W2", "FedGMT", BF16, "plain", 2.4, 3.5),
    Claim("W3-MLP", "FedAvg", FP32, "pfl", 2.0, 3.0),
    Claim("W3-CNN", "FedAvg", FP32, "pfl", 2.0, 2.5),
    Claim("W3-MLP", "FedAvg", COMPILED, "pfl", 5.0, 9.0),
    Claim("W3-CNN", "FedAvg", COMPILED, "pfl", 4.0, 6.0),
)


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
    """Writes these rows to the file, in place of those with the same key, and updates page and figure."""
    kept = {tuple(row[key] for key in KEY): row for row in [*read(), *rows]}
    methods = (CEILING, *METHODS)
    order = sorted(kept.values(), key=lambda row: (row["machine"], row["work"], methods.index(row["method"])))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in order)
    parts = [f"## {name}\n\n{tables(list(group))}" for name, group in groupby(read(), lambda row: row["machine"])]
    text = re.sub(
        r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)",
        lambda match: match[1] + "\n" + "\n".join(parts) + "\n" + match[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(text)
    draw([row for row in read() if row["machine"] == machine()])


def tables(rows: list[Row]) -> str:
    """All measurements of one machine, as Markdown."""
    pieces = [_required(rows)]
    for work, group in groupby(rows, lambda row: row["work"]):
        measured = list(group)
        pieces += [f"### {work}\n", _rounds([r for r in measured if r["method"] != CEILING])]
        if ceilings := [r for r in measured if r["method"] == CEILING]:
            pieces.append(_ceilings(ceilings))
    return "\n".join(pieces)


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _required(rows: list[Row]) -> str:
    found = {(r["work"], r["method"], r["contestant"]): r for r in rows}
    body = []
    for claim in CLAIMS:
        row = found.get((claim.work, claim.method, claim.ours), {})
        if (ratio := row.get(f"vs_{claim.against}")) is None:
            continue
        body.append([
            claim.work, claim.method, _name(row), AGAINST[claim.against], _ratio(row, claim.against),
            f"{claim.required:g}", f"{claim.aim:g}", _verdict(row, ratio >= claim.required),
        ])  # fmt: skip
    for work in ("W1", "W3-MLP", "W3-CNN"):
        row = found.get((work, "FedAvg", FP32), {})
        if (seconds := row.get("orchestration_s")) is None:
            continue
        value, limit = (seconds / row["round_s"] * 100, 3) if work == "W1" else (seconds * 1e3, 1)
        unit = "% of the round" if work == "W1" else "ms"
        body.append([
            work, "FedAvg", _name(row), "orchestration", f"{value:.2g} {unit}", f"under {limit}", "",
            _verdict(row, value < limit),
        ])  # fmt: skip
    return _table(["work", "method", "ours", "against", "times as fast", "required", "aim", "reached"], body)


def _name(row: Row) -> str:
    """The contestant; of "auto", also what it has chosen."""
    return row["contestant"].replace("auto", f"auto ({row['engine']})") if "engine" in row else row["contestant"]


def _verdict(row: Row, reached: bool) -> str:
    reasons = [
        *(["no AMX-bf16"] if row["contestant"] == BF16 and "AMX" not in row["machine"] else []),
        *(["under foreign load"] if row["foreign"] > LOAD else []),
    ]
    return ", ".join(["yes" if reached else "no", *reasons])


def _ratio(row: Row, against: str) -> str:
    name = f"vs_{against}"
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})" if name in row else ""


def _rounds(rows: list[Row]) -> str:
    names = [name for name in AGAINST if any(f"vs_{name}" in row for row in rows)]
    body = []
    for row in rows:
        unit, scale = ("ms", 1e3) if row["work"].startswith("W3") else ("s", 1.0)
        low, median, high = (f"{row[key] * scale:.3g}" for key in ("round_min", "round_s", "round_max"))
        body.append([
            row["method"], _name(row), f"{median} {unit} ({low} to {high})", _steps(row),
            f"{row['cpu_s'] * scale:.3g} {unit}", *(_ratio(row, name) for name in names), f"{row['peak_gb']:.2f}",
            f"{row['of_floor']:.0%}" if "of_floor" in row else "",
            f"{row['rounds']:.0f} in {row['turns']:.0f}", f"{row['dropped']:.0f}", f"{row['foreign']:.1%}",
        ])  # fmt: skip
    head = ["method", "who", "a round", "steps/s", "CPU time", *(f"{AGAINST[n]} / it" for n in names), "peak GB"]
    return _table([*head, "of the floor", "rounds in turns", "turns dropped", "foreign load"], body)


def _steps(row: Row) -> str:
    """Local steps a second, of all clients."""
    rate = WORKS[row["work"]].cohort * row["steps"] / row["round_s"]
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _ceilings(rows: list[Row]) -> str:
    return _table(["kernel", "GFLOP/s"], [[row["contestant"], f"{row['gflops']:.0f}"] for row in rows])


def draw(rows: list[Row]) -> None:
    """The required ratios as bars, with required and target values as marks; legible without colour."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = {(r["work"], r["method"], r["contestant"]): r for r in rows}
    bars = [
        (claim, row)
        for claim in CLAIMS
        if f"vs_{claim.against}" in (row := found.get((claim.work, claim.method, claim.ours), {}))
    ]
    if not bars:
        return
    figure = Figure(figsize=(8, 0.6 + 0.38 * len(bars)), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="times as fast (medians; lines: range of the turns)")
    faces = {FP32: ("0.85", ""), BF16: ("0.55", ""), COMPILED: ("white", "///")}
    for at, (claim, row) in enumerate(bars):
        name = f"vs_{claim.against}"
        face, hatch = faces[claim.ours]
        axes.barh(at, row[name], 0.6, color=face, edgecolor="0.2", linewidth=0.8, hatch=hatch)
        axes.plot([row[f"{name}_low"], row[f"{name}_high"]], [at, at], color="0.2", linewidth=1)
        axes.plot([claim.required] * 2, [at - 0.42, at + 0.42], color="black", linewidth=2.5, solid_capstyle="butt")
        axes.plot([claim.aim] * 2, [at - 0.42, at + 0.42], ":", color="black", linewidth=1.6)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.annotate(
            f"{row[name]:.2f}", (0, at), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=box
        )
    axes.set_yticks(
        range(len(bars)), [f"{c.work} {c.method}, {c.ours} / {AGAINST[c.against]}" for c, _ in bars], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    handles = [
        Line2D([], [], color="black", linewidth=2.5, label="required"),
        Line2D([], [], color="black", linestyle=":", linewidth=1.6, label="aim"),
    ]
    axes.legend(handles=handles, loc="best", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    with mpl.rc_context({"svg.hashsalt": "benchmarks"}):
        figure.savefig(FIGURE.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(FIGURE.with_suffix(".png"), metadata={"Software": None})


def known(**values: float) -> Row:
    """Those that are numbers."""
    return {key: value for key, value in values.items() if not math.isnan(value)}
