"""What papers claim, beside the rows of studies.

A file of claims names stores, relative to itself; each claim compares two methods of one column over the same seeds,
one with ``beyond`` their difference in a column with that in another one of the same store.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.core import ensure, fits
from fl_lightning.results import ROWS, Store, markdown
from fl_lightning.results.compare import Difference, Group, apart, compare, interval
from fl_lightning.studies.suite import RUNNER_UP, Suite, written

VERDICTS = ("seen", "seen in part", "not seen", "seen and against", "against in part", "against", "open")
LEANS = {"seen": ", as claimed", "against": ", reversed"}
"""Where the interval of an open claim lies."""
FORMS: Mapping[str, tuple[Any, str]] = {
    "stores": (dict[str, str], "the folder of each store and its name"),
    "title": (str, "text"),
    "before": (str, "text"),
    "after": (str, "text"),
    "claims": (
        [
            {
                "claim": str,
                "paper": str,
                "methods": lambda v: fits(v, list[str]) and len(v) == 2,
                "measure": str,
                "larger": bool,
                "beyond?": str,
            }
        ],
        "a list, each with claim, paper, two methods, measure and larger",
    ),
}
"""The forms of the keys of a file of claims, and what to give."""
LEVEL = 0.05
"""Of the tests of one claim together, by Holm's procedure."""
LEFT_OUT = (
    "the choice of settings, since they are over seeds with the settings fixed. Verdicts account for the columns of a "
    "claim (Holm, 5 % together), and not for the number of claims: of"
)


class Column(NamedTuple):
    """A column of a store, and what its suite says.

    Attributes:
        title: Its name on the page.
        suite: The rules of its store.
        groups: Its rows by method, without the runs that have collapsed.
        lost: The seeds of these, by method.
        seeds: Most seeds of a method.
    """

    title: str
    suite: Suite
    groups: Mapping[str, Group]
    lost: Mapping[str, Sequence[str]]
    seeds: int


class Finding(NamedTuple):
    """A claim in a column.

    Attributes:
        verdict: ``seen``, ``not seen``, ``against``, ``open``, or nothing where the methods have not both been run.
        leaning: What it would be with seeds enough; ``open`` of a single one.
        text: The cell.
        difference: The difference.
    """

    verdict: str
    leaning: str
    text: str
    difference: Difference | None = None


def page(file: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the page of a file of claims, as Markdown, and each claim with its verdict and numbers.

    Raises:
        UserError: If the file or a row is damaged.
    """
    text = written(file, FORMS, "ledger/claims.yaml")
    columns = [column for store, name in text["stores"].items() for column in _columns(file.parent / store, name)]
    lines, claims, verdicts, leanings = [], [], Counter[str](), Counter[str]()
    for claim in text["claims"]:
        findings = judged(claim, columns)
        tested = [(column, finding) for column, finding in zip(columns, findings, strict=True) if finding.verdict]
        verdict = overall(finding.verdict for column, finding in tested if column.suite.alone)
        leaning = overall(finding.leaning for _, finding in tested)
        verdicts[verdict] += 1
        leanings[leaning] += 1
        than = f", more than at {claim['beyond']}" if "beyond" in claim else ""
        difference = f"{claim['measure'].removeprefix('flatness/')}: {' − '.join(claim['methods'])}{than}"
        tuned = [column for column, _ in tested if column.suite.kind == "equal budget"]
        twice = all(method + RUNNER_UP in column.groups for method in claim["methods"] for column in tuned)
        basis = ["two settings each" if twice else "one setting each"] * bool(tuned)
        basis += ["published settings"] * (len(tuned) < len(tested))
        cell = f"**{verdict}**{LEANS.get(leaning, '') if verdict == 'open' else ''}"
        numbers = {
            column.title: {
                "verdict": finding.verdict,
                "leaning": finding.leaning,
                "difference": finding.difference.mean,
                "interval": finding.difference.ends,
                "seeds": finding.difference.seeds,
            }
            for column, finding in tested
            if finding.difference
        }
        claims.append({**claim, "verdict": verdict, "columns": numbers})
        lines.append(
            [
                cell,
                claim["claim"],
                claim["paper"],
                difference,
                *(finding.text for finding in findings),
                "; ".join(basis),
            ]
        )
    of_columns = [
        f"{c.title} ({c.seeds} of {c.suite.seeds} seeds{'' if c.suite.alone else ', not alone'})" for c in columns
    ]
    heads = ["verdict", "claim", "paper", "difference", *of_columns, "rests on"]
    summary = _summary(verdicts, leanings, columns)
    sections = [f"# {text['title']}", summary, text["before"], markdown([heads, *lines]), text["after"], ""]
    return "\n\n".join(sections), claims


def overall(verdicts: Iterable[str]) -> str:
    """Returns the verdict of a claim from those of columns: in part, if some of these are *not seen*."""
    distinct = {*verdicts}
    sides = " and ".join(side for side in ("seen", "against") if side in distinct)
    if sides:
        return sides + " in part" * ("not seen" in distinct and " and " not in sides)
    return "not seen" if distinct == {"not seen"} else "open"


def judged(claim: Mapping[str, Any], columns: Sequence[Column]) -> list[Finding]:
    """Returns what columns say of a claim: with each method's best draw, and where they have it, its runner-up."""
    first, *others = [
        _tested(claim, [m + end for m, end in zip(claim["methods"], ends, strict=True)], columns)
        for ends in product(("", RUNNER_UP), repeat=2)
    ]
    merged = []
    for k, (column, finding) in enumerate(zip(columns, first, strict=True)):
        if finding.verdict:
            agree = all(way[k].leaning in ("", finding.leaning) for way in others)
            verdict, leaning = (finding.verdict, finding.leaning) if agree else ("open", "open")
            suffix = LEANS.get(finding.leaning, "") * (verdict == "open") + ", not with the runner-up" * (not agree)
            lost = "; ".join(
                f"{m} collapsed with seed {', '.join(s)}" for m in claim["methods"] if (s := column.lost.get(m))
            )
            finding = Finding(
                verdict, leaning, f"{verdict}{suffix}: {finding.text}" + f" ({lost})" * bool(lost), finding.difference
            )
        merged.append(finding)
    return merged


def _tested(claim: Mapping[str, Any], methods: Sequence[str], columns: Sequence[Column]) -> list[Finding]:
    """Returns what two rows of methods say in each column, with Holm's procedure over those that decide.

    For a column that decides nothing, the procedure is over all columns.
    """
    from scipy.stats import ttest_1samp  # takes a second to import

    by_title = {column.title: column for column in columns}
    values = [[*_apart(claim, methods, column, by_title).values()] for column in columns]
    raw = [
        nan if len(differences) < 2 else float(ttest_1samp(differences, 0).pvalue) if any(differences) else 1.0
        for differences in values
    ]
    deciding = holm([p if column.suite.alone else nan for column, p in zip(columns, raw, strict=True)])
    findings = []
    for column, differences, *p_values in zip(columns, values, holm(raw), deciding, strict=True):
        if not differences:
            reason = "not measured" if all(method in column.groups for method in methods) else "not run"
            findings.append(
                Finding("", "", reason if _base(claim, column) in {None, *by_title} - {column.title} else "")
            )
            continue
        difference, p = interval(differences), p_values[column.suite.alone]
        side = "seen" if (difference.mean > 0) == claim["larger"] else "against"
        leaning = "open" if difference.seeds < 2 else "not seen" if p >= LEVEL else side
        text = difference.text("+.2f", 100.0) + " pp" if claim["measure"] in ("mean", "std") else difference.text()
        seeds = f", {difference.seeds} seed{'s' * (difference.seeds > 1)}" * (difference.seeds < column.seeds)
        findings.append(
            Finding(
                "open" if difference.seeds < column.suite.seeds else leaning,
                leaning,
                text.replace("-", "−") + seeds,
                difference,
            )
        )
    return findings


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p values that account for their number, by Holm's step-down procedure; 1 for NaN, which is no test."""
    tests = sorted(p for p in p_values if not isnan(p))
    steps = [min(1.0, (len(tests) - k) * p) for k, p in enumerate(tests)]
    return [max((step for step, q in zip(steps, tests, strict=True) if q <= p), default=1.0) for p in p_values]


def _apart(
    claim: Mapping[str, Any], methods: Sequence[str], column: Column, columns: Mapping[str, Column]
) -> Mapping[object, float]:
    """Returns the differences of two methods by seed; none if one of them is not there."""
    base = _base(claim, column)
    if base == column.title or not all(method in column.groups for method in methods):
        return {}
    ours, theirs = (column.groups[method] for method in methods)
    differences = apart(ours, theirs, claim["measure"])
    if base is None:
        return differences
    baseline = _apart({**claim, "beyond": None}, methods, columns[base], columns) if base in columns else {}
    return {seed: differences[seed] - baseline[seed] for seed in differences if seed in baseline}


def _base(claim: Mapping[str, Any], column: Column) -> str | None:
    """Returns the title of the column that a claim compares with: the same setting at another alpha."""
    return f"{re.sub(r' alpha [0-9.]+$', '', column.title)} {claim['beyond']}" if claim.get("beyond") else None


def _columns(store: Path, name: str) -> Iterator[Column]:
    ensure((store / ROWS).is_file(), f"stores = {store}: no store there; give one, as in ledger/claims.yaml")
    suite = Suite.of(store)
    for column in sorted({line["column"] for line in Store(store).lines}):
        groups = compare([store / column])
        survivors = {group.name: suite.survivors(group) for group in groups}
        yield Column(
            ", ".join(filter(None, [name, column.replace("_", " ")])),
            suite,
            {method: kept for method, (kept, _) in survivors.items()},
            {method: lost for method, (_, lost) in survivors.items()},
            max(len(group.runs) for group in groups),
        )


def _summary(verdicts: Counter[str], leanings: Counter[str], columns: Sequence[Column]) -> str:
    """Returns what the page says in five lines."""
    total = verdicts.total()
    too_few = [f"{c.title}: {c.seeds} of {c.suite.seeds}" for c in columns if c.seeds < c.suite.seeds]
    lost = [f"{m} with seed {', '.join(s)} ({c.title})" for c in columns for m, s in c.lost.items() if s]
    counted = ["; ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) for counts in (verdicts, leanings)]
    return "\n".join([
        f"- **Verdicts on {total} claims**: {counted[0]}.",
        f"- **Too few seeds for a verdict**: {'; '.join(too_few) or 'nowhere'}.",
        f"- **What these seeds would say, were they enough**: {counted[1]}.",
        f"- **Collapsed, counted apart and in no mean**: {'; '.join(lost) or 'none'}.",
        f"- **What the intervals leave out**: {LEFT_OUT} {total}, some {total * LEVEL:.2g} come by chance.",
    ])  # fmt: skip
