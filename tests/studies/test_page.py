"""The page of rows, from rows whose numbers are known."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from fl_lightning import UserError
from fl_lightning.results.rows import Store
from fl_lightning.studies import tuning
from fl_lightning.studies.page import page, scores
from tests.studies.test_claims import BASE, BETTER, START, made
from tests.studies.test_store import DOCS


def table(text: str) -> dict[str, list[str]]:
    """Returns the rows of a table by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells for cells in lines}


def test_collapsed_seeds_are_named_and_enter_no_mean(tmp_path: Path) -> None:
    """Nor does a method stop the page whose seeds have all collapsed."""
    rows = {"c/A": [*BETTER[:4], 0.1], "c/B": BASE, "c/C": [0.1, 0.1]}
    made(tmp_path, rows, name="small 1", collapsed=0.2, targets={"c": 0.82})
    head, ((name, text, draw),), numbers = page([tmp_path / "rows"])
    assert "Suite *small 1*: as published; 5 seeds decide." in head and name == "c"
    cells = table(text)
    assert cells["A"][1] == "4, self-reported; collapsed: 4" and cells["C"][1] == "0, self-reported; collapsed: 0, 1"
    at = {title: cells["method"].index(title) for title in cells["method"]}
    assert (
        cells["A"][at["last 1 ↑"]].startswith(f"**{sum(BETTER[:4]) / 4:.4f}** ±") and cells["C"][at["last 1 ↑"]] == ""
    )
    assert cells["A"][at["rounds to 0.82 ↓"]] == "1 (2 of 4)"  # the others never reached it
    assert "c0ffee0; A processor, torch 2, 32-true" in text
    draw()
    accuracies = [(name, k, acc) for name, values in rows.items() for k, acc in enumerate(values)]
    assert [(f"{row['column']}/{row['method']}", row["seed"], row["mean"]) for row in numbers] == accuracies
    assert [row["collapsed"] for row in numbers] == [acc <= 0.2 for _, _, acc in accuracies]
    assert {row["equal"] for row in numbers} == {None} and numbers[3]["target_rounds"] == 1
    assert numbers[0]["target_rounds"] is None  # 0.80


def test_methods_are_compared_within_a_column_only(tmp_path: Path) -> None:
    """Accuracy and lambda_max are equal in these rows: the more accurate, the sharper."""
    made(tmp_path, {"one/A": BETTER, "one/B": BASE, "two/A": BASE, "two/C": BASE})
    sections = page([tmp_path / "rows"])[1]
    assert [(name, [*table(text)][2:]) for name, text, _ in sections] == [("one", ["A", "B"]), ("two", ["A", "C"])]
    assert all("On the front of accuracy and flatness" in text for _, text, _ in sections)
    assert [[*table(text)][2:] for _, text, _ in page([tmp_path / "rows"], ["B"])[1]] == [["A", "B"], ["A"]]


def test_a_page_has_the_rules_of_one_store(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made(tmp_path / name, {"c/A": BETTER})
        (tmp_path / name / "rows").rename(tmp_path / name / name)
    with pytest.raises(UserError, match=r"^paths: rows of a, b; a page has the rules of one store"):
        page([tmp_path / "a" / "a", tmp_path / "b" / "b"])


def test_rows_of_two_configs_of_a_method_keep_its_name_and_every_torch_is_told(tmp_path: Path) -> None:
    made(tmp_path, {"c/A": BETTER, "c/B": BASE})
    with Store.edited(tmp_path / "rows") as store:
        (line,) = store.matching("c/A/seed_3")
        files = store.files(line)
        about = {**json.loads(files["row.json"]), "starts": [{**START, "torch": "1"}]}
        config = files["config.yaml"].replace("max_rounds: 1", "max_rounds: 2")
        store.put(line["row"], {**files, "config.yaml": config, "row.json": json.dumps(about)})
    ((_, text, _),) = page([tmp_path / "rows"])[1]
    assert [*table(text)][2:] == ["A/seed_0", "A/seed_3", "B"]
    assert page([tmp_path / "rows"], ["A"])[1][0][1].count("| A/seed_") == 2
    with pytest.raises(UserError, match="methods = a: no such rows; choose from A, A/seed_0, A/seed_3, B"):
        page([tmp_path / "rows"], ["A", "a"])
    assert "; A processor, torch 1, 32-true and torch 2, 32-true." in text


def test_scores_are_the_mean_of_performance_profiles() -> None:
    """Costs are 10, 20 and never in one column, 30, 15 and 60 in the next; in the third nobody reaches the target."""
    never = [math.inf] * 3
    costs: dict[str, list[list[float]]] = {
        "A": [[10] * 3, [30] * 3, never],
        "B": [[20] * 3, [15] * 3, never],
        "C": [never, [60] * 3, never],
    }
    actual = scores(costs)
    profile = {
        name: [statistics.fmean([pair[0] / 10 <= tau, pair[1] / 15 <= tau, 0]) for tau in np.arange(1.0005, 4, 0.001)]
        for name, pair in {"A": (10, 30), "B": (20, 15), "C": (math.inf, 60)}.items()
    }
    for name, values in profile.items():
        assert actual[name][0] == pytest.approx(statistics.fmean(values), abs=1e-3)
        assert actual[name] == (actual[name][0],) * 3  # all seeds are equal


def test_intervals_of_scores_are_those_of_the_seeds() -> None:
    """The median of two seeds in three is one of both costs or their mean, and only B varies."""
    costs = {"A": [[10] * 9], "B": [[10, 10, 10, 10, 40, 40, 40, 40, 40]]}
    score, low, high = scores(costs)["B"]
    assert (score, low, high) == (0, 0, 1) and scores(costs)["A"] == (1, 1, 1)


def test_the_page_has_scores_and_the_front_of_what_was_tried(tmp_path: Path) -> None:
    made(tmp_path, {"c/A": BETTER, "c/B": BASE, "c/C": BASE}, name="small 1", targets={"c": 0.5})
    tried = [
        ("A", "x=0.8858179248332968", 0.9, 5.0),
        ("A", "", 0.8, 6.0),
        ("B", "", 0.7, 1.0),
        ("B", "y=2", 0.6, ""),
        ("C", "", 0.75, 0.5),
        ("C", "z=3", -math.inf, 0.1),  # what is left of a setting that diverges is on no front, however flat
        ("C", "z=4", 0.5, math.nan),
    ]
    tuning.write(tmp_path / "rows", [[*row[:3], "", row[3]] for row in tried], ["A", "B", "C"])
    costs, front = page([tmp_path / "rows"])[0].split("were tried")
    assert table(costs)["A"] == ["A", "1.00 [1.00, 1.00]"]  # no passes were logged
    assert [*table(front).values()][2:] == [["A", "x=0.8858", "0.9", "5"], ["C", "published", "0.75", "0.5"]]
    front = page([tmp_path / "rows"], ["B"])[0].split("were tried")[1]  # C surpasses B, whether it is shown or not
    assert [*table(front).values()][2:] == [["A", "x=0.8858", "0.9", "5"]]


def test_a_page_of_some_methods_says_of_them_what_the_whole_page_says(tmp_path: Path) -> None:
    """C, which is not shown, is more accurate than B, and flatter."""
    made(tmp_path, {"c/A": BETTER, "c/B": BASE, "c/C": [acc + 0.01 for acc in BASE]})
    with Store.edited(tmp_path / "rows") as store:
        for line in store.matching("c/C"):
            files = store.files(line)
            store.put(line["row"], {**files, "metrics.csv": f"{files['metrics.csv'].rpartition(',')[0]},0.1\r\n"})
    ((_, full, _),) = page([tmp_path / "rows"])[1]
    ((_, selected, _),) = page([tmp_path / "rows"], ["B"])[1]
    assert "better in both means: A, C." in full and "better in both means: A." in selected


def test_a_run_that_has_not_measured_a_cost_does_not_count_as_one_that_never_reaches_the_target(tmp_path: Path) -> None:
    """Both reach it in the first round; A has not measured its passes with one seed of two, B with neither."""
    made(tmp_path, {"c/A": BETTER[:2], "c/B": BETTER[:2], "c/C": BETTER[:2]}, name="small 1", targets={"c": 0.5})
    with Store.edited(tmp_path / "rows") as store:
        for name, passes in (("A/seed_1", 10), ("C/seed_0", 20), ("C/seed_1", 20)):
            (line,) = store.matching(f"c/{name}")
            files = store.files(line)
            head, row, _ = files["metrics.csv"].split("\r\n")
            metrics = f"{head},client/passes\r\n{row},{passes}\r\n"
            store.put(line["row"], {**files, "metrics.csv": metrics})
    costs = table(page([tmp_path / "rows"])[0])
    assert costs["score"] == ["score", "by rounds", "by passes"]
    assert costs["A"][1:] == ["1.00 [1.00, 1.00]"] * 2 and costs["B"][1:] == ["1.00 [1.00, 1.00]", ""]
    assert costs["C"][2] == "0.67 [0.67, 0.67]"  # twice the smallest cost


def test_a_target_that_nobody_reaches_has_no_scores(tmp_path: Path) -> None:
    made(tmp_path, {"c/A": BETTER, "c/B": BASE}, name="small 1", targets={"c": 0.99})
    assert "score" not in page([tmp_path / "rows"])[0]


def test_critical_sharpness_orders_methods_much_as_lambda_max_does() -> None:
    """The rank correlations in docs/flatness.md are those of the digits' page."""
    means: dict[str, dict[str, list[list[float]]]] = {}
    for row in json.loads((DOCS / "ledger/digits.json").read_text()):
        if row["collapsed"]:  # enters no mean of the page
            continue
        pair = [row["lambda_max"], row["critical_sharpness"]]
        means.setdefault(row["column"], {}).setdefault(row["method"], []).append(pair)
    correlations = {
        name: spearmanr([np.mean(pairs, axis=0) for pairs in methods.values()]).statistic
        for name, methods in means.items()
    }
    rounded = {name: round(value, 2) for name, value in correlations.items()}
    text = " ".join((DOCS / "flatness.md").read_text().split())
    values = [rounded[name] for name in ("alpha_0", "alpha_0.05", "alpha_100")]
    assert "correlation is {}, {} and {} at alpha 0, 0.05 and 100.".format(*values) in text
    assert f"means of {len(means['alpha_0.05'])} methods" in text
