"""The page of rows: a table for each column, where they are from and what checks found, and their figure.

Performance profiles show what reaching the target costs over all columns of a study.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.core import Figure, ensure, grouped
from fl_lightning.results import ABOUT, Group, find_runs, markdown, plot_curves, plot_tradeoff, store_of
from fl_lightning.results.compare import compare
from fl_lightning.results.table import Markup, cell, columns, differences
from fl_lightning.studies import tuning
from fl_lightning.studies.check import verdict
from fl_lightning.studies.store import about
from fl_lightning.studies.suite import Suite, about_of

FEW = 4
"""Most groups whose curves are drawn; of more, a reader cannot tell one from another."""
SHOWN = ("mean", "target_round", "flatness/critical_sharpness")
"""Statistics that the page has beside the suite's measures; `compare` has all."""
LEGEND = (
    "*Seeds* counts those in the means; *collapsed* ones, as the suite says it, are named and enter none. A method is "
    "*self-reported* until another process has trained one of its rows again to the bit (of a long one, its first "
    "rounds), then *checked*, and *verified* if its program also repeats its authors'; the number behind counts such "
    "rows. Differences are over common seeds, with 95 % intervals by Student's t; the best value is bold if that to "
    "the next best leaves out 0, or with one seed. `fl-lightning compare` has further columns."
)
TAU, RESAMPLES = 4.0, 1000
"""Up to how many times the smallest cost a method scores, and how often the seeds are drawn again."""
COSTS = {"target_round": "by rounds", "target_passes": "by passes", "target_bits": "by bits"}
"""What is compared, in `Summary`."""
SCORES = (
    "What reaching the targets costs: the score is the mean of a method's performance profile from 1 to 4 times the "
    "smallest cost, over the columns (1: the cheapest everywhere; 0, left out: nowhere within 4 times), with 95 % "
    "bootstrap intervals over the seeds. Never reaching a target costs infinitely much."
)
TRIED = (
    "Accuracy on held-out data and lambda_max of all settings that were tried: the ones on the front, where no other "
    "setting is better in both."
)
Section = tuple[str, str, Callable[[], Figure]]
"""A column on the page: its name, its text, and what draws its figure."""


def page(
    rows: Sequence[str | Path], methods: Sequence[str] | None = None
) -> tuple[str, list[Section], list[dict[str, Any]]]:
    """Returns the head of a page of rows, as Markdown, a section for each of their columns, and each row's numbers.

    Methods are compared within a column only. A figure has curves, or accuracy against lambda_max of many methods.
    Fronts and scores are those of all methods, of which a page of some methods shows theirs.

    Args:
        rows: Rows of a store, or the store; its ``about.yaml`` gives title, text, reference and suite.
        methods: Some of the methods, and the reference; None: all.

    Raises:
        UserError: If a row is damaged, or there is no row of a method.
    """
    of_column = grouped((folder.parents[1], folder) for folder in sorted(find_runs(rows)))
    store = next((each for column in of_column for each in (column, *column.parents) if (each / ABOUT).is_file()), None)
    given = {"title": "Ledger", "text": "", **(about_of(store) if store else {})}
    suite = Suite.of(store) if store else Suite()
    source = f", from {suite.source}" if suite.source else ""
    rules = (
        f"Suite *{suite.name}*: {suite.kind}{source}; {suite.seeds} seeds decide{'' if suite.alone else ', not alone'}."
    )
    sections, compared, numbers, shown = list[Section](), list[list[Group]](), list[dict[str, Any]](), set[str]()
    for column, folders in of_column.items():
        every = compare(folders, target=suite.targets.get(column.name))
        reference = next((group for group in every if group.name == given.get("reference")), every[0])
        groups = [
            each for each in every if methods is None or each is reference or not _names(each).isdisjoint(methods)
        ]
        alive = [left for each in every if (left := suite.survivors(each)[0]).runs]
        names = [group.name for group in groups]
        front = _front(alive, names)
        text, of_rows = _section(groups, groups.index(reference), suite, given.get("verified", ()), front)
        numbers += ({"column": column.name, **each} for each in of_rows)
        sections.append((column.name, text, _figure([each for each in alive if each.name in names])))
        compared.append(every)
        shown |= {*names}
    known = [group for every in compared for group in every]
    named = {name for group in known for name in _names(group)}
    unknown = {*(methods or ())} - named
    ensure(not unknown, f"methods = {', '.join(sorted(unknown))}: no such rows; choose from {', '.join(sorted(named))}")
    unsurpassed = (
        tuning.front(found[0], {group.name for group in known}) if rows and (found := store_of(rows[0])) else []
    )
    tried = [line for line in unsurpassed if line["method"] in shown]
    head = [f"# {given['title']}", given["text"], rules if "suite" in given else "", LEGEND]
    head += [_profiles(compared, shown), f"{TRIED}\n\n{_tried(tried)}" if tried else ""]
    return "\n\n".join(filter(None, head)), sections, numbers


def _names(group: Group) -> set[str]:
    """Returns the names of a group: its own, and the method of its rows, which may have several configs."""
    return {group.name, *(row.parent.name for row in group.folders)}


def _tried(front: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of settings on the front of accuracy and flatness."""
    keys = (tuning.METRIC, tuning.FLAT)
    lines = [[of["method"], of["settings"] or "published", *(f"{float(of[key]):.4g}" for key in keys)] for of in front]
    return markdown([["method", "settings", "accuracy", "lambda_max"], *lines]).strip()


def _section(
    groups: Sequence[Group], reference: int, suite: Suite, verified: Sequence[str], front: str
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the table of a column, and where its rows are from; and the numbers of each row."""
    found = [suite.survivors(group) for group in groups]
    left = [group for group, _ in found if group.runs]
    measured = [c for c in columns(groups) if c.against is None and c.of in (*SHOWN, *suite.measures)]
    shown = [*measured, *differences(measured, found[reference][0], groups[reference].name)]
    table = [["method", "seeds", *(column.head for column in shown)]]
    numbers = list[dict[str, Any]]()
    for whole, (group, lost) in zip(groups, found, strict=True):
        numbers += (
            {
                "method": group.name,
                "seed": seed and seed[0],
                "collapsed": folder not in group.folders,
                "equal": verdict(folder),
                **{column.key: Group.value(run, column.of) for column in measured},
            }
            for folder, seed, run in zip(whole.folders, whole.seeds, whole.runs, strict=True)
        )
        label = _label([each["equal"] for each in numbers[-len(whole.runs) :]], group.name in verified)
        table.append(
            [
                group.name,
                f"{len(group.runs)}, {label}" + f"; collapsed: {', '.join(lost)}" * bool(lost),
                *(cell(group, column, left, Markup(best="**{}**")) for column in shown),
            ]
        )
    starts: list[dict[str, Any]] = [start for of in groups for row in of.folders for start in about(row)["starts"]]
    commits, cpus, with_torch = (
        sorted({(start["commit"] or "unknown")[:7] + " with changes" * start["changed"] for start in starts}),
        sorted({start["cpu"] for start in starts}),
        sorted({f"torch {start['torch']}, {start['precision']}" for start in starts}),
    )
    made = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, {' and '.join(with_torch)}."
    return f"{markdown(table).strip()}\n\n{front}{made}", numbers


def _front(groups: Sequence[Group], shown: Collection[str]) -> str:
    """Returns those of the shown methods that no other one surpasses in both accuracy and flatness, in their means."""
    of = {group.name: [group.values(name) for name in ("mean", "flatness/lambda_max")] for group in groups}
    points = {name: (fmean(accuracies), -fmean(sharpest)) for name, (accuracies, sharpest) in of.items() if sharpest}
    front = [name for k in tuning.unsurpassed([*points.values()]) if (name := [*points][k]) in shown]
    told = "On the front of accuracy and flatness, where no other method is better in both means"
    return f"{told}: {', '.join(front)}.\n\n" * bool(front)


def _figure(groups: Sequence[Group]) -> Callable[[], Figure]:
    runs = {group.name: group.metrics for group in groups}
    return lambda: plot_curves(runs) if len(groups) <= FEW else plot_tradeoff(groups, "lambda_max")


def _label(found: Sequence[bool | None], is_verified: bool) -> str:
    """Returns what a reader may rely on, and how many rows are equal to the bit, or wrong, by their checks."""
    same, wrong = found.count(True), found.count(False)
    if wrong:
        return f"{wrong} wrong"
    return f"{'verified' if is_verified else 'checked'} {same}" if same else "self-reported"


def _profiles(columns: Sequence[Sequence[Group]], shown: Collection[str]) -> str:
    """Returns the table of scores, as Markdown, of shown methods that all columns have; nothing without a target."""
    runs = [{group.name: group.runs for group in groups} for groups in columns]
    if any(run.target is None for of in runs for each in of.values() for run in each):
        return ""
    names = [name for name in runs[0] if all(name in of for of in runs)]
    costs = {
        head: {
            name: [[math.inf if (n := getattr(run, cost)) is None else n for run in of[name]] for of in runs]
            for name in names
        }
        for cost, head in COSTS.items()
    }
    found = {
        head: scores(needed)
        for head, needed in costs.items()
        if any(math.isfinite(each) for of in needed.values() for seeds in of for each in seeds)
    }
    if not found:
        return ""
    names.sort(key=lambda name: -max(of[name][0] for of in found.values()))
    scored = [name for name in names if name in shown and any(of[name][0] for of in found.values())]
    lines = [[name, *("{:.2f} [{:.2f}, {:.2f}]".format(*of[name]) for of in found.values())] for name in scored]
    return f"{SCORES}\n\n{markdown([['score', *found], *lines]).strip()}"


def scores(costs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, tuple[float, float, float]]:
    """Returns the score of each method, and its bootstrap interval.

    The cost of a method in a column is the median over its seeds. Its performance profile is the share of the columns
    in which that is at most tau times the smallest one of all methods (Dolan and Moré, 2002); the score is its mean
    from tau 1 to `TAU`.

    Args:
        costs: Of each method in each column, the cost with each seed; infinite, if it never reaches the target.
    """
    random = np.random.default_rng(0)

    def medians(seeds: Sequence[float]) -> list[float]:
        """That of the seeds first, then those of the resamples."""
        drawn = random.integers(len(seeds), size=(RESAMPLES, len(seeds)))
        return [*map(float, np.median(np.asarray(seeds, float)[np.vstack([np.arange(len(seeds)), drawn])], axis=1))]

    found = np.array([[medians(seeds) for seeds in columns] for columns in costs.values()])
    with np.errstate(invalid="ignore"):  # inf / inf: nobody reaches the target there, and nobody scores
        ratios = np.nan_to_num(found / found.min(axis=0), nan=math.inf)
    each = np.clip((TAU - ratios) / (TAU - 1), 0, 1).mean(axis=1)
    lows, highs = np.quantile(each, [0.025, 0.975], axis=1)
    return dict(zip(costs, zip(each[:, 0].tolist(), lows.tolist(), highs.tolist(), strict=True), strict=True))
