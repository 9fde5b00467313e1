"""What the papers claim, beside the rows of ledgers: ``python benchmarks/claims.py``.

``benchmarks/claims.yaml`` holds the claims and names the ledgers; each claim compares two methods over the same seeds.
It is seen if the 95 % interval of the paired differences lies on its side of 0.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.results.compare import Difference, Group, compare, difference
from fl_lightning.results.metrics import markdown

ROOT = Path(__file__).resolve().parents[1]


def verdict(found: Difference, larger: bool) -> str:
    """A difference with its interval, and whether it is as claimed: bold if it is, struck through if it is reversed."""
    text = found.text("+.4g")
    if math.isnan(found.half) or not found.clear:
        return text
    return f"**{text}**" if (found.mean > 0) == larger else f"~~{text}~~"


def line(claim: dict[str, Any], columns: dict[str, dict[str, Group]]) -> list[str]:
    ours, theirs = claim["methods"]
    cells = []
    for groups in columns.values():
        one, other = groups.get(ours), groups.get(theirs)
        found = None if one is None or other is None else difference(one, other, claim["measure"])
        cells.append("not run" if found is None else verdict(found, claim["larger"]))
    measure = claim["measure"].removeprefix("flatness/")
    return [claim["claim"], claim["paper"], f"{measure}: {ours} − {theirs}", *cells]


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
