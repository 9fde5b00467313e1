"""The runs of examples/theory.py end where its theorems say, and docs/theory.md shows what they give."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pages import stored

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "theory.py"))


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 6))
def test_runs_end_where_the_theorem_says(number: int, tmp_path: Path) -> None:
    """They do to rounding; fitted rates to a thousandth; what leaves out a term falls as this term does."""
    rows = EXAMPLE["THEOREMS"][number - 1](tmp_path)
    assert {row.theorem for row in rows} == {number} and len([*tmp_path.glob("*.png")]) == 1
    first, second = [row.error for row in rows if "first order" in row.quantity], [row.error for row in rows]
    for row in rows:
        if number < 5 and "first order" not in row.quantity:
            assert row.error < (1e-3 if "rate" in row.quantity else 1e-6), row
    for errors, order in ((first, 2), (second if number == 5 else [], 4)):
        assert all(0.8 * order < a / b < 1.25 * order for a, b in pairwise(errors)), errors
    entries = [row for row in stored(ROOT / "docs/theory/theory.csv") if row["theorem"] == str(number)]
    for row, entry in zip(rows, entries, strict=True):
        assert row.quantity == entry["quantity"]
        assert [row.predicted, row.seen] == pytest.approx([float(entry["predicted"]), float(entry["seen"])], rel=1e-4)
