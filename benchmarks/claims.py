"""What the papers claim, beside the rows of ledgers: ``python benchmarks/claims.py``.

``benchmarks/claims.yaml`` holds the claims and names the ledgers; each claim compares two methods over the same seeds,
one with ``beyond`` their difference in a column with that in another one. It is seen if the 95 % interval of the paired
differences lies on its side of 0.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.results.compare import Difference, Group, compare, interval
from fl_lightning.results.metrics import markdown

ROOT = Path(__file__).resolve().parents[1]


def verdict(found: Difference, larger: bool) -> str:
    """A difference with its interval, and whether it is as claimed: bold if it is, struck through if it is reversed."""
    text = found.text("+.4g")
    if math.isnan(found.half) or not found.clear:
        return text
    return f"**{text}**" if (found.mean > 0) == larger else f"~~{text}~~"


def apart(claim: dict[str, Any], groups: dict[str, Group]) -> dict[object, float]:
    """The finite differences of a claim's two methods by seed; none if one of them is not there."""
    found = [
        {seed: Group.value(run, claim["measure"]) for seed, run in zip(group.seeds, group.runs, strict=True)}
        for group in map(groups.get, claim["methods"])
        if group is not None
    ]
    if len(found) < 2:
        return {}
    both = {seed: (one, other) for seed, one in found[0].items() if (other := found[1].get(seed)) is not None}
    return {seed: one - other for seed, (one, other) in both.items() if one is not None and math.isfinite(one - other)}


def line(claim: dict[str, Any], columns: dict[str, dict[str, Group]]) -> list[str]:
    ours, theirs = claim["methods"]
    beyond, cells = claim.get("beyond"), []
    for name, groups in columns.items():
        found = apart(claim, groups)
        if beyond is not None:
            base = apart(claim, columns[f"{name.partition(', ')[0]}, {beyond}"])
            found = {seed: found[seed] - base[seed] for seed in found if seed in base}
        missing = "not measured" if ours in groups and theirs in groups else "not run"
        text = verdict(interval([*found.values()]), claim["larger"]) if found else missing
        cells.append("" if name.endswith(f", {beyond}") else text)
    measure = claim["measure"].removeprefix("flatness/")
    than = "" if beyond is None else f", more than at {beyond}"
    return [claim["claim"], claim["paper"], f"{measure}: {ours} − {theirs}{than}", *cells]


def page() -> str:
    text = yaml.safe_load((ROOT / "benchmarks" / "claims.yaml").read_text())
    columns = {
        f"{name}, {path.name.replace('_', ' ')}": {group.name: group for group in compare([path])}
        for study, name in text["ledgers"].items()
        for path in sorted((ROOT / "ledger" / study).iterdir())
        if path.is_dir()
    }
    table = markdown([["claim", "paper", "difference", *columns], *(line(claim, columns) for claim in text["claims"])])
    return "\n\n".join([f"# {text['title']}", text["before"], table, text["after"], ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ledger" / "claims.md")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page())


if __name__ == "__main__":
    main()
