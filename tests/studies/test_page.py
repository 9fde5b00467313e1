"""The page of rows, from rows whose numbers are known."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.studies.page import page
from tests.studies.test_claims import BASE, BETTER, made


def table(text: str) -> dict[str, list[str]]:
    """The cells of a table by their first."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells for cells in lines}


def test_collapsed_seeds_are_named_and_enter_no_mean(tmp_path: Path) -> None:
    """Nor does a method stop the page whose seeds have all collapsed."""
    rows = {"c/A": [*BETTER[:4], 0.1], "c/B": BASE, "c/C": [0.1, 0.1]}
    made(tmp_path, rows, name="small 1", collapsed=0.2, targets={"c": 0.82})
    head, ((name, text, draw),) = page([tmp_path / "rows"])
    assert "Suite *small 1*: as published; 5 seeds decide." in head and name == "c"
    found = table(text)
    assert found["A"][1:4] == ["4", "seed 4", "self-reported"] and found["C"][1:4] == [
        "0",
        "seed 0, 1",
        "self-reported",
    ]
    at = {title: found["method"].index(title) for title in found["method"]}
    assert (
        found["A"][at["last 1 ↑"]].startswith(f"**{sum(BETTER[:4]) / 4:.4f}** ±") and found["C"][at["last 1 ↑"]] == ""
    )
    assert found["A"][at["rounds to 0.82 ↓"]] == "1 (2 of 4)"  # the others never reached it
    assert "c0ffee0; A processor, torch 2, 32-true" in text
    draw()


def test_methods_are_compared_within_a_column_only(tmp_path: Path) -> None:
    """Accuracy and lambda_max are equal in these rows: the more accurate, the sharper."""
    made(tmp_path, {"one/A": BETTER, "one/B": BASE, "two/A": BASE, "two/C": BASE})
    sections = page([tmp_path / "rows"])[1]
    assert [(name, [*table(text)][2:]) for name, text, _ in sections] == [("one", ["A", "B"]), ("two", ["A", "C"])]
    assert all("On the front of accuracy and flatness" in text for _, text, _ in sections)
    assert [[*table(text)][2:] for _, text, _ in page([tmp_path / "rows"], ["B"])[1]] == [["A", "B"], ["A"]]
