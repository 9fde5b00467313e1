"""The page of rows: a table for each column, where they are from and what checks found, and their figure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_lightning.core import Figure, grouped
from fl_lightning.results import find_runs
from fl_lightning.results.compare import Group, compare
from fl_lightning.results.curves import plot_curves, plot_tradeoff
from fl_lightning.results.metrics import markdown
from fl_lightning.results.rows import ABOUT, store_of
from fl_lightning.results.table import Markup, cell, columns, differences
from fl_lightning.studies import profiles, tuning
from fl_lightning.studies.check import verdict
from fl_lightning.studies.store import about
from fl_lightning.studies.suite import Suite, about_of

FEW = 4
"""Most groups whose curves are drawn; of more, a reader cannot tell one from another."""
SHOWN = ("mean", "target_round")
"""Statistics that the page has beside the suite's measures; `compare` has all."""
NUMBERED = "flatness/critical_sharpness"
"""What the JSON beside the page has in addition."""
LEGEND = (
    "*Seeds* counts those in the means; *collapsed* ones, as the suite says it, are named and enter none. A method is "
    "*self-reported* until another process has trained one of its rows again to the bit (of a long one, its first "
    "rounds), then *checked*, and *verified* if its program also repeats its authors'; the number behind counts such "
    "rows. Differences are over common seeds, with 95 % intervals by Student's t; the best value is bold if that to "
    "the next best leaves out 0, or with one seed. `fl-lightning compare` has further columns."
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

    Args:
        rows: Rows of a store, or the store; its ``about.yaml`` gives title, text, reference and suite.
        methods: Some of the methods, and the reference; None: all.

    Raises:
        UserError: If a row is damaged.
    """
    of_column = grouped((folder.parents[1], folder) for folder in sorted(find_runs(rows)))
    store = next((each for column in of_column for each in (column, *column.parents) if (each / ABOUT).is_file()), None)
    given = {"title": "Ledger", "text": "", **(about_of(store) if store else {})}
    suite = Suite.of(store) if store else Suite()
    source = f", from {suite.source}" if suite.source else ""
    rules = (
        f"Suite *{suite.name}*: {suite.kind}{source}; {suite.seeds} seeds decide{'' if suite.alone else ', not alone'}."
    )
    sections, compared, numbers = list[Section](), list[list[Group]](), list[dict[str, Any]]()
    for column, folders in of_column.items():
        groups = compare(folders, target=suite.targets.get(column.name))
        reference = next((group for group in groups if group.name == given.get("reference")), groups[0])
        groups = [each for each in groups if methods is None or each is reference or each.name in methods]
        alive = [left for each in groups if (left := suite.survivors(each)[0]).runs]
        text, of_rows = _section(groups, groups.index(reference), suite, given.get("verified", ()))
        numbers += ({"column": column.name, **each} for each in of_rows)
        sections.append((column.name, text, _figure(alive)))
        compared.append(groups)
    shown = {group.name for groups in compared for group in groups}
    tried = tuning.front(found[0], shown) if rows and (found := store_of(rows[0])) else []
    head = [f"# {given['title']}", given["text"], rules if "suite" in given else "", LEGEND]
    head += [profiles.table(compared), f"{TRIED}\n\n{_tried(tried)}" if tried else ""]
    return "\n\n".join(filter(None, head)), sections, numbers


def _tried(front: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of settings on the front of accuracy and flatness."""
    keys = (tuning.METRIC, tuning.FLAT)
    lines = [[of["method"], of["settings"] or "published", *(f"{float(of[key]):.4g}" for key in keys)] for of in front]
    return markdown([["method", "settings", "accuracy", "lambda_max"], *lines]).strip()


def _section(
    groups: Sequence[Group], reference: int, suite: Suite, verified: Sequence[str]
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the table of a column, and where its rows are from; and the numbers of each row."""
    found = [suite.survivors(group) for group in groups]
    left = [group for group, _ in found if group.runs]
    measured = [c for c in columns(groups) if c.against is None and c.of in (*SHOWN, *suite.measures, NUMBERED)]
    on_page = [c for c in measured if c.of in (*SHOWN, *suite.measures)]
    shown = [*on_page, *differences(on_page, found[reference][0], groups[reference].name)]
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
        cells = (cell(group, column, left, Markup(best="**{}**")) for column in shown)
        table.append(
            [group.name, f"{len(group.runs)}, {label}" + f"; collapsed: {', '.join(lost)}" * bool(lost), *cells]
        )
    starts: list[dict[str, Any]] = [start for of in groups for row in of.folders for start in about(row)["starts"]]
    commits, cpus = (
        sorted({(start["commit"] or "unknown")[:7] + " with changes" * start["changed"] for start in starts}),
        sorted({start["cpu"] for start in starts}),
    )
    made = f"Commits {', '.join(commits)}; {' and '.join(cpus)}, torch {starts[0]['torch']}, {starts[0]['precision']}."
    return f"{markdown(table).strip()}\n\n{_front(left)}{made}", numbers


def _front(groups: Sequence[Group]) -> str:
    """Returns the methods that no other one surpasses in both accuracy and flatness, in the mean over their runs."""
    of = {group.name: [group.values(name) for name in ("mean", "flatness/lambda_max")] for group in groups}
    points = {name: (fmean(accuracies), -fmean(sharpest)) for name, (accuracies, sharpest) in of.items() if sharpest}
    front = [[*points][k] for k in profiles.front([*points.values()])]
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
    label = "verified" if is_verified else "checked"
    return f"{label} {same}" if same else "self-reported"
