"""Verdicts on claims, from rows whose numbers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import ttest_rel

from fl_lightning import UserError
from fl_lightning.results.rows import Store, extract
from fl_lightning.studies.claims import holm, overall, page
from fl_lightning.studies.suite import Suite

BASE = [0.70, 0.72, 0.71, 0.73, 0.70]
BETTER = [0.80, 0.83, 0.80, 0.84, 0.81]
SAME = [0.71, 0.71, 0.71, 0.73, 0.70]
START = {"commit": "c0ffee0", "changed": False, "cpu": "A processor", "torch": "2", "precision": "32-true"}
CLAIM = {"claim": "A is better than B", "paper": "Table 1", "methods": ["A", "B"], "measure": "mean", "larger": True}


def made(folder: Path, rows: Mapping[str, Sequence[float]], claim: Mapping[str, Any] = CLAIM, **suite: Any) -> Path:
    """Writes a file of one claim, and its store, with the accuracies of each method's seeds in a column."""
    with Store.edited(folder / "rows") as store:
        for name, accuracies in rows.items():
            for seed, acc in enumerate(accuracies):
                config = {
                    "model": {"class_path": name.rpartition("/")[2]},
                    "data": {"init_args": {"seed": seed}},
                    "trainer": {"seed": seed, "max_rounds": 1},
                }
                files = {
                    "config.yaml": yaml.safe_dump(config, sort_keys=False),
                    "metrics.csv": f"round,server/test/acc,flatness/lambda_max\r\n1,{acc},{acc}\r\n",
                    "row.json": json.dumps({"seed": seed, "checks": [], "starts": [START]}),
                }
                store.put(f"{name}/seed_{seed}", files)
    text = {"title": "Claims", "before": "", "after": "", "stores": {"rows": "small"}, "claims": [claim]}
    extract({"claims.yaml": yaml.safe_dump(text), "rows/about.yaml": yaml.safe_dump({"suite": suite})}, folder)
    return folder / "claims.yaml"


def cells(file: Path) -> list[str]:
    """Returns the cells of the claim: verdict, claim, paper, difference, the columns, and what it rests on."""
    (row,) = (line for line in page(file)[0].splitlines() if "| A is better than B |" in line)
    return [cell.strip() for cell in row.strip("|").split("|")]


def apart(a: Sequence[float], n: int = 5) -> str:
    """Returns the difference of the first seeds to the base, by SciPy."""
    test = ttest_rel(a[:n], BASE[:n])
    low, high = test.confidence_interval()
    mean = sum(x - y for x, y in zip(a[:n], BASE[:n], strict=True)) / n
    return f"{100 * mean:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] pp".replace("-", "−")


WORSE = [2 * base - better for better, base in zip(BETTER, BASE, strict=True)]


@pytest.mark.parametrize(
    ("a", "verdict", "cell"),
    [
        (BETTER, "**seen**", f"seen: {apart(BETTER)}"),
        (BETTER[:4], "**open**, as claimed", f"open, as claimed: {apart(BETTER, 4)}, 4 seeds"),
        (SAME, "**not seen**", f"not seen: {apart(SAME)}"),
        (WORSE, "**against**", f"against: {apart(WORSE)}"),
        ([*BETTER[:4], 0.1], "**open**, as claimed", f": {apart(BETTER, 4)}, 4 seeds (A collapsed with seed 4)"),
        ([*BETTER[:4], math.nan], "**open**, as claimed", f": {apart(BETTER, 4)}, 4 seeds (A collapsed with seed 4)"),
        ([], "**open**", "not run"),
    ],
)
def test_a_verdict_is_first_and_collapsed_seeds_enter_no_mean(
    a: list[float], verdict: str, cell: str, tmp_path: Path
) -> None:
    row = cells(made(tmp_path, {"c/A": a, "c/B": BASE}, collapsed=0.2))
    assert row[0] == verdict and row[4].endswith(cell)
    assert row[-1] == ("published settings" if a else "")


def test_a_suite_that_does_not_decide_alone_leaves_a_claim_open(tmp_path: Path) -> None:
    row = cells(made(tmp_path, {"c/A": BETTER, "c/B": BASE}, alone=False))
    assert row[0] == "**open**, as claimed" and row[4].startswith("seen: ")


def test_one_seed_says_nothing(tmp_path: Path) -> None:
    row = cells(made(tmp_path, {"c/A": BETTER[:1], "c/B": BASE}))
    assert row[0] == "**open**" and row[4] == "open: +10.00 pp, 1 seed"


def test_numbers_of_a_claim_are_those_of_its_cells_in_full(tmp_path: Path) -> None:
    (claim,) = page(made(tmp_path, {"A": BETTER, "B": BASE, "C": BASE}))[1]
    test = ttest_rel(BETTER, BASE)
    assert (
        {key: claim[key] for key in CLAIM} == CLAIM and claim["verdict"] == "seen" and [*claim["columns"]] == ["small"]
    )
    numbers = claim["columns"]["small"]
    assert (numbers["verdict"], numbers["leaning"], numbers["seeds"]) == ("seen", "seen", 5)
    assert numbers["interval"] == pytest.approx([*test.confidence_interval()])
    assert numbers["difference"] == pytest.approx(math.fsum(BETTER) / 5 - math.fsum(BASE) / 5)
    (claim,) = page(made(tmp_path, {"A": BETTER}, {**CLAIM, "methods": ["A", "D"]}))[1]
    assert (claim["verdict"], claim["columns"]) == ("open", {})  # a method that no store has


def test_a_claim_is_seen_only_where_the_runner_up_agrees(tmp_path: Path) -> None:
    rows = {"c/A": BETTER, "c/B": BASE, "c/A (runner-up)": BETTER, "c/B (runner-up)": BASE}
    row = cells(made(tmp_path / "both", rows, kind="equal budget"))
    assert (row[0], row[-1]) == ("**seen**", "two settings each")
    row = cells(made(tmp_path / "one", {**rows, "c/A (runner-up)": SAME}, kind="equal budget"))
    assert row[0] == "**open**" and row[4] == f"open, as claimed, not with the runner-up: {apart(BETTER)}"
    row = cells(made(tmp_path / "none", {"c/A": BETTER, "c/B": BASE}, kind="equal budget"))
    assert (row[0], row[-1]) == ("**seen**", "one setting each")


@pytest.mark.slow
def test_the_columns_of_a_claim_are_tested_together(tmp_path: Path) -> None:
    """A difference with p = 0.046 is seen alone, and not as the smallest of five."""
    weak = [b + gain for b, gain in zip(BASE, (0.02, 0.01, 0.003, 0.012, 0.002), strict=True)]
    assert 0.04 < ttest_rel(weak, BASE).pvalue < 0.05
    assert cells(made(tmp_path / "one", {"c/A": weak, "c/B": BASE}))[0] == "**seen**"
    many = {f"c{k}/{name}": values for k in range(5) for name, values in (("A", weak if k == 0 else SAME), ("B", BASE))}
    assert cells(made(tmp_path / "five", many))[0] == "**not seen**"
    made(tmp_path / "one", many, alone=False)  # nor do columns that decide nothing cost those that do
    (tmp_path / "one" / "rows").rename(tmp_path / "one" / "others")
    file = made(tmp_path / "one", {"c/A": weak, "c/B": BASE})
    text = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**text, "stores": {"rows": "small", "others": "others"}}))
    assert cells(file)[0] == "**seen**"


def test_a_claim_on_the_difference_of_two_columns(tmp_path: Path) -> None:
    rows = {"alpha_0/A": BETTER, "alpha_0/B": BASE, "alpha_100/A": SAME, "alpha_100/B": BASE}
    row = cells(made(tmp_path, rows, {**CLAIM, "beyond": "alpha 100"}))
    assert row[4].startswith("seen: +10.40") and row[5] == ""  # the second column is the base
    assert row[3] == "mean: A − B, more than at alpha 100"


def test_a_column_in_which_two_methods_are_equal_is_a_test_like_others(tmp_path: Path) -> None:
    """All of its differences are 0: it does not see the claim, and counts among the tests."""
    weak = [b + gain for b, gain in zip(BASE, (0.02, 0.01, 0.003, 0.012, 0.002), strict=True)]  # p = 0.046
    row = cells(made(tmp_path, {"c/A": weak, "c/B": BASE, "d/A": BASE, "d/B": BASE}))
    assert row[0] == "**not seen**" and row[4].startswith("not seen: +0.94")
    assert row[5] == "not seen: +0.00 [+0.00, +0.00] pp"


def test_p_values_account_for_their_number_as_holm_says() -> None:
    assert holm([0.01, 0.04, math.nan, 0.03]) == pytest.approx([0.03, 0.06, 1, 0.06])  # Holm, 1979
    assert holm([0.02]) == [0.02]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        *[
            ("seen,open", "seen"),
            ("seen,against", "seen and against"),
            ("not seen,open", "open"),
            ("not seen,not seen", "not seen"),
        ],
        *[("seen,not seen", "seen in part"), ("open,not seen,against", "against in part")],
    ],
)
def test_a_claims_verdict_is_what_its_deciding_columns_share(verdicts: str, expected: str) -> None:
    assert overall(verdicts.split(",")) == expected


@pytest.mark.parametrize(
    ("suite", "line"),
    [
        ("{seed: 5}", r"suite\.seed = 5: give name, kind"),
        ("{seeds: five}", r"suite\.seeds = 'five': give a whole number"),
        ("5", r"suite = 5; give its rules by name, as in ledger/digits"),
    ],
)
def test_another_key_or_form_of_a_suite_is_a_line(suite: str, line: str, tmp_path: Path) -> None:
    extract({"about.yaml": f"suite: {suite}"}, tmp_path)
    with pytest.raises(UserError, match=rf"about\.yaml: {line}"):
        Suite.of(tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"claims": 3}, r"claims = 3; give a list, each with claim, paper, two methods"),
        ({"claims": [{**CLAIM, "methods": ["A"]}]}, r"claims = .*; give a list, each with"),
        ({"before": None}, r"before = None; give text, as in ledger/claims\.yaml"),
        ({"stores": {"none": "small"}}, r"stores = .*none: no store there"),
    ],
)
def test_a_file_of_claims_of_another_form_is_a_line(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    file = made(tmp_path, {"c/A": BETTER, "c/B": BASE})
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **change}))
    with pytest.raises(UserError, match=line):
        page(file)
    with pytest.raises(UserError, match=r"none\.yaml: not readable .*; give a YAML file, as in ledger/claims\.yaml"):
        page(tmp_path / "none.yaml")
