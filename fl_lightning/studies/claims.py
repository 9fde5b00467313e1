"""What papers claim, beside the rows of studies.

A file of claims names stores, relative to itself; each claim compares two methods over the same seeds, one with
``beyond`` their difference in a column with that in another one. It is seen if the 95 % interval of the paired
differences lies on its side of 0.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.results import markdown, read_config
from fl_lightning.results.compare import Difference, Group, apart, compare, interval
from fl_lightning.results.rows import Store


def page(file: Path) -> str:
    """Returns the page of a file of claims, as Markdown.

    Raises:
        UserError: If the file or a row is damaged.
    """
    text = read_config(file)
    columns = {
        f"{name}, {column.replace('_', ' ')}": {group.name: group for group in compare([file.parent / store / column])}
        for store, name in text["stores"].items()
        for column in sorted({line["column"] for line in Store(file.parent / store).lines})
    }
    table = markdown([["claim", "paper", "difference", *columns], *(_line(claim, columns) for claim in text["claims"])])
    return "\n\n".join([f"# {text['title']}", text["before"], table, text["after"], ""])


def _line(claim: Mapping[str, Any], columns: Mapping[str, Mapping[str, Group]]) -> list[str]:
    ours, theirs = claim["methods"]
    beyond, cells = claim.get("beyond"), []
    for name, groups in columns.items():
        found = _apart(claim, groups)
        if beyond is not None:
            base = _apart(claim, columns[f"{name.partition(', ')[0]}, {beyond}"])
            found = {seed: found[seed] - base[seed] for seed in found if seed in base}
        missing = "not measured" if ours in groups and theirs in groups else "not run"
        text = _verdict(interval([*found.values()]), claim["larger"]) if found else missing
        cells.append("" if name.endswith(f", {beyond}") else text)
    measure = claim["measure"].removeprefix("flatness/")
    than = "" if beyond is None else f", more than at {beyond}"
    return [claim["claim"], claim["paper"], f"{measure}: {ours} − {theirs}{than}", *cells]


def _apart(claim: Mapping[str, Any], groups: Mapping[str, Group]) -> dict[object, float]:
    """Returns the differences of a claim's two methods by seed; none if one of them is not there."""
    found = [groups[name] for name in claim["methods"] if name in groups]
    return apart(found[0], found[1], claim["measure"]) if len(found) == 2 else {}


def _verdict(found: Difference, larger: bool) -> str:
    """Returns a difference with its interval: bold if it is as claimed, struck through if it is reversed."""
    text = found.text("+.4g")
    if math.isnan(found.half) or not found.clear:
        return text
    return f"**{text}**" if (found.mean > 0) == larger else f"~~{text}~~"
