"""The page of rows: a table for each column, where they are from and what checks found, and their figure.

Performance profiles show what reaching the target costs over all columns of a study.
"""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.core import Figure, ensure, grouped
from fl_lightning.results import ABOUT, Group, find_runs, markdown, plot_curves, plot_tradeoff, store_of
from fl_lightning.results.compare import compare
from fl_lightning.results.compare import shown as printed
from fl_lightning.results.summary import Summary
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
    "bootstrap intervals over the seeds. Never reaching a target costs infinitely much; a run that has not measured a "
    "cost has none."
)
TRIED = (
    "Accuracy on held-out data and lambda_max of all settings that were tried: the ones on the front, where no other "
    "setting is better in both. `tuning.csv` of the store has all of them, with every digit."
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
        UserError: If a row is damaged, rows are of two stores, or there is no row of a method.
    """
    of_column = grouped((folder.parents[1], folder) for folder in sorted(find_runs(rows)))
    stores = {
        next((folder for folder in (column, *column.parents) if (folder / ABOUT).is_file()), None)
        for column in of_column
    } - {None}
    store = next(iter(stores), None)
    store_names = ", ".join(sorted(folder.name for folder in stores if folder))
    ensure(len(stores) < 2, f"paths: rows of {store_names}; a page has the rules of one store, give rows of one")
    about = {"title": "Ledger", "text": "", **(about_of(store) if store else {})}
    suite = Suite.of(store) if store else Suite()
    source = f", from {suite.source}" if suite.source else ""
    rules = (
        f"Suite *{suite.name}*: {suite.kind}{source}; {suite.seeds} seeds decide{'' if suite.alone else ', not alone'}."
    )
    sections, compared, numbers, shown = list[Section](), list[list[Group]](), list[dict[str, Any]](), set[str]()
    for column, folders in of_column.items():
        all_groups = compare(folders, target=suite.targets.get(column.name))
        reference = next((group for group in all_groups if group.name == about.get("reference")), all_groups[0])
        groups = [
            group
            for group in all_groups
            if methods is None or group is reference or not _names(group).isdisjoint(methods)
        ]
        survivors = [remaining for group in all_groups if (remaining := suite.survivors(group)[0]).runs]
        names = [group.name for group in groups]
        front = _front(survivors, names)
        text, row_numbers = _section(groups, groups.index(reference), suite, about.get("verified", ()), front)
        numbers += ({"column": column.name, **row} for row in row_numbers)
        sections.append((column.name, text, _figure([group for group in survivors if group.name in names])))
        compared.append(all_groups)
        shown |= {*names}
    known = [group for all_groups in compared for group in all_groups]
    known_names = {name for group in known for name in _names(group)}
    unknown = {*(methods or ())} - known_names
    ensure(
        not unknown,
        f"methods = {', '.join(sorted(unknown))}: no such rows; choose from {', '.join(sorted(known_names))}",
    )
    unsurpassed = (
        tuning.front(location[0], {group.name for group in known}) if rows and (location := store_of(rows[0])) else []
    )
    tried = [line for line in unsurpassed if line["method"] in shown]
    head = [f"# {about['title']}", about["text"], rules if "suite" in about else "", LEGEND]
    head += [_profiles(compared, shown), f"{TRIED}\n\n{_tried(tried)}" if tried else ""]
    return "\n\n".join(filter(None, head)), sections, numbers


def _names(group: Group) -> set[str]:
    """Returns the names of a group: its own, and the method of its rows, which may have several configs."""
    return {group.name, *(row.parent.name for row in group.folders)}


def _tried(front: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of settings on the front of accuracy and flatness."""
    keys = (tuning.METRIC, tuning.FLAT)
    settings = [[argument.split("=", 1) for argument in shlex.split(line["settings"])] for line in front]
    values = printed(value for pairs in settings for _, value in pairs)
    texts = [" ".join(f"{key}={values[value]}" for key, value in pairs) for pairs in settings]
    lines = [
        [line["method"], text or "published", *(f"{float(line[key]):.4g}" for key in keys)]
        for line, text in zip(front, texts, strict=True)
    ]
    return markdown([["method", "settings", "accuracy", "lambda_max"], *lines]).strip()


def _section(
    groups: Sequence[Group], reference: int, suite: Suite, verified: Sequence[str], front: str
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the table of a column, and where its rows are from; and the numbers of each row."""
    survivors = [suite.survivors(group) for group in groups]
    remaining = [group for group, _ in survivors if group.runs]
    measured = [c for c in columns(groups) if c.against is None and c.statistic in (*SHOWN, *suite.measures)]
    shown = [*measured, *differences(measured, survivors[reference][0], groups[reference].name)]
    table = [["method", "seeds", *(column.head for column in shown)]]
    numbers = list[dict[str, Any]]()
    for original, (group, lost) in zip(groups, survivors, strict=True):
        numbers += (
            {
                "method": group.name,
                "seed": seed and seed[0],
                "collapsed": folder not in group.folders,
                "equal": verdict(folder),
                **{column.key: Group.value(run, column.statistic) for column in measured},
            }
            for folder, seed, run in zip(original.folders, original.seeds, original.runs, strict=True)
        )
        label = _label([row["equal"] for row in numbers[-len(original.runs) :]], group.name in verified)
        table.append(
            [
                group.name,
                f"{len(group.runs)}, {label}" + f"; collapsed: {', '.join(lost)}" * bool(lost),
                *(cell(group, column, remaining, Markup(best="**{}**")) for column in shown),
            ]
        )
    starts: list[dict[str, Any]] = [
        start for group in groups for row in group.folders for start in about(row)["starts"]
    ]
    commits, cpus, with_torch = (
        sorted({(start["commit"] or "unknown")[:7] + " with changes" * start["changed"] for start in starts}),
        sorted({start["cpu"] for start in starts}),
        sorted({f"torch {start['torch']}, {start['precision']}" for start in starts}),
    )
    sources = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, {' and '.join(with_torch)}."
    return f"{markdown(table).strip()}\n\n{front}{sources}", numbers


def _front(groups: Sequence[Group], shown: Collection[str]) -> str:
    """Returns those of the shown methods that no other one surpasses in both accuracy and flatness, in their means."""
    statistics = {group.name: [group.values(name) for name in ("mean", "flatness/lambda_max")] for group in groups}
    points = {
        name: (fmean(accuracies), -fmean(sharpest)) for name, (accuracies, sharpest) in statistics.items() if sharpest
    }
    front = [name for k in tuning.unsurpassed([*points.values()]) if (name := [*points][k]) in shown]
    text = "On the front of accuracy and flatness, where no other method is better in both means"
    return f"{text}: {', '.join(front)}.\n\n" * bool(front)


def _figure(groups: Sequence[Group]) -> Callable[[], Figure]:
    runs = {group.name: group.metrics for group in groups}
    return lambda: plot_curves(runs) if len(groups) <= FEW else plot_tradeoff(groups, "lambda_max")


def _label(verdicts: Sequence[bool | None], is_verified: bool) -> str:
    """Returns what a reader may rely on, and how many rows are equal to the bit, or wrong, by their checks."""
    same, wrong = verdicts.count(True), verdicts.count(False)
    if wrong:
        return f"{wrong} wrong"
    return f"{'verified' if is_verified else 'checked'} {same}" if same else "self-reported"


def _profiles(columns: Sequence[Sequence[Group]], shown: Collection[str]) -> str:
    """Returns the table of scores, as Markdown, of shown methods that all columns have; nothing without a target."""
    runs = [{group.name: group.runs for group in groups} for groups in columns]
    if any(run.target is None for by_method in runs for seed_runs in by_method.values() for run in seed_runs):
        return ""
    names = [name for name in runs[0] if all(name in by_method for by_method in runs)]
    tables = dict[str, Mapping[str, tuple[float, float, float]]]()
    for cost, head in COSTS.items():
        costs = {name: [_costs(by_method[name], cost) for by_method in runs] for name in names}
        measured = {name: by_column for name, by_column in costs.items() if all(by_column)}
        if any(math.isfinite(number) for by_column in measured.values() for seeds in by_column for number in seeds):
            tables[head] = scores(measured)
    if not tables:
        return ""
    best = {name: max((table[name][0] for table in tables.values() if name in table), default=0.0) for name in names}
    lines = [
        [name, *("{:.2f} [{:.2f}, {:.2f}]".format(*table[name]) if name in table else "" for table in tables.values())]
        for name in sorted(names, key=lambda name: -best[name])
        if name in shown and best[name]
    ]
    return f"{SCORES}\n\n{markdown([['score', *tables], *lines]).strip()}"


def _costs(runs: Sequence[Summary], cost: str) -> list[float]:
    """Returns a cost of each run; infinite where it never reaches the target, left out where it was not measured."""
    costs = [math.inf if run.target_round is None else getattr(run, cost) for run in runs]
    return [number for number in costs if number is not None]


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
        """Returns that of the seeds first, then those of the resamples."""
        drawn = random.integers(len(seeds), size=(RESAMPLES, len(seeds)))
        return [*map(float, np.median(np.asarray(seeds, float)[np.vstack([np.arange(len(seeds)), drawn])], axis=1))]

    sampled_costs = np.array([[medians(seeds) for seeds in columns] for columns in costs.values()])
    with np.errstate(invalid="ignore"):  # inf / inf: nobody reaches the target there, and nobody scores
        ratios = np.nan_to_num(sampled_costs / sampled_costs.min(axis=0), nan=math.inf)
    sampled_scores = np.clip((TAU - ratios) / (TAU - 1), 0, 1).mean(axis=1)
    lows, highs = np.quantile(sampled_scores, [0.025, 0.975], axis=1)
    return dict(zip(costs, zip(sampled_scores[:, 0].tolist(), lows.tolist(), highs.tolist(), strict=True), strict=True))
