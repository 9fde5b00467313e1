"""Equal budgets: the settings that each method of a study tries, and which of them it gets."""

import csv
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from fl_lightning.core import ensure, grouped
from fl_lightning.results import average, deviation, headline, read_run, write_table

TUNING = "tuning.csv"
"""In a store: the settings that each method has tried, the best first; the published ones are empty."""
METRIC, SEEDS, FLAT = "server/val/acc", "by seed", "flatness/lambda_max"
"""What settings are judged by, as the median over the seeds of its headline; and what is kept beside it."""
HEAD = ("method", "settings", METRIC, SEEDS, FLAT)
CORRELATED, SCRAMBLES = 0.3, 100
"""Largest rank correlation of two settings over the draws, and how many scrambles are tried."""


def tried(about: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the settings that a method of a study tries, by key: none, which are the published ones, and its draws.

    Args:
        about: What ``about.yaml`` says.
        name: The method.

    Raises:
        UserError: If a range is wrong, or two settings would be correlated over the draws.
    """
    from fl_lightning.sweeps.parameters import Parameter  # needs torch; a page needs none

    entries = [about["ranges"][range_name] for range_name in about["methods"][name][1:]]
    log = {"distribution": "log_uniform_values"}
    options = [{key: value for key, value in entry.items() if key not in ("key", "times")} for entry in entries]
    ranges = [
        Parameter.of(entry["key"], distribution if "values" in distribution else log | distribution)
        for entry, distribution in zip(entries, options, strict=True)
    ]
    settings: list[dict[str, Any]] = [{}]
    for point in points(about["draws"], max(len(names) for _, *names in about["methods"].values())):
        setting: dict[str, Any] = {}
        for entry, parameter, u in zip(entries, ranges, point, strict=False):
            base, value = entry.get("times"), parameter.quantile(u)
            ensure(
                base is None or base in setting,
                f"ranges: {parameter.key} is a multiple of {base}, which {name} must list before",
            )
            setting[parameter.key] = value if base is None else value * setting[base]
        settings.append(setting)
    return settings


def points(count: int, dimensions: int) -> list[list[float]]:
    """Returns points in (0, 1], the least correlated of some scrambled Sobol sequences; the first number is the rate's.

    Raises:
        UserError: If two of their numbers are correlated.
    """
    import torch  # takes seconds; a page needs none
    from torch.quasirandom import SobolEngine

    def correlation(sequence: torch.Tensor) -> float:
        ranks = sequence.argsort(0).argsort(0).double()
        return float(torch.atleast_2d(torch.corrcoef(ranks.T)).triu(1).abs().max())  # type: ignore[no-untyped-call]

    scrambles = [SobolEngine(dimensions, scramble=True, seed=k) for k in range(SCRAMBLES)]  # type: ignore[no-untyped-call]
    best = min((1 - engine.draw(count, dtype=torch.float64) for engine in scrambles), key=correlation)
    ensure(
        correlation(best) <= CORRELATED,
        f"draws = {count}: two settings have a rank correlation above {CORRELATED}; give more draws",
    )
    return cast("list[list[float]]", best.tolist())


def judged(name: str, settings: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[Path | None]]) -> list[list[Any]]:
    """Returns the lines of a method in the table: its settings, the best first.

    Args:
        name: The method.
        settings: The settings.
        runs: The run folders of each of them, one a seed; None: it has diverged, which is worse than any value.
    """
    lines = []
    for setting, folders in zip(settings, runs, strict=True):
        headlines = [headline(folder, METRIC) if folder else None for folder in folders]
        values = [-math.inf if value is None or math.isnan(value) else value for value in headlines]
        measured = [pairs[-1][1] for folder in folders if (pairs := read_run(folder).get(FLAT))]
        flat = [*filter(math.isfinite, measured)]
        text = shlex.join(f"{key}={value}" for key, value in setting.items())
        lines.append([name, text, median(values), " ".join(map(str, values)), median(flat) if flat else ""])
    return sorted(lines, key=lambda line: -line[2])


def write(store: Path, lines: Sequence[Sequence[Any]], methods: Sequence[str]) -> None:
    """Writes the lines of a method to the table of a store; its methods come in an order, and others after them."""
    known = read(store) | grouped((line[0], dict(zip(HEAD, line, strict=True))) for line in lines)
    order = dict.fromkeys([*methods, *known])
    write_table(store / TUNING, HEAD, [row.values() for method in order for row in known.get(method, ())])


def read(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the lines of the table of a store by method."""
    path = store / TUNING
    rows = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] if path.is_file() else []
    return grouped((row["method"], row | {SEEDS: row[SEEDS].removeprefix("'")}) for row in rows)  # see `table_text`


def chosen(lines: Sequence[Mapping[str, Any]], rank: int = 0) -> dict[str, str]:
    """Returns the best settings of a method; the published ones are the best where they tie with these.

    They tie if the mean of their differences over the seeds, which share data and held-out samples, is within its
    standard error.

    Args:
        lines: The lines of the method.
        rank: 1 for the second-best ones.

    Raises:
        UserError: If fewer than two settings have finished.
    """
    ended = [line for line in lines if math.isfinite(float(line[METRIC]))]
    problem = f"{lines[0]['method']}: {len(ended)} settings have {METRIC}, and two are needed"
    ensure(len(ended) > 1, f"{problem}; set data.val_fraction in tuning, or give other ranges")
    ties = [line for line in ended if not line["settings"] and _tie(ended[0], line)]
    ordered = ties + [line for line in ended if line not in ties]
    return dict(argument.split("=", 1) for argument in shlex.split(ordered[rank]["settings"]))


def _tie(best: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    values = [map(float, line[SEEDS].split()) for line in (best, other)]
    differences = [a - b for a, b in zip(*values, strict=True)]
    return average(differences) <= (deviation(differences) or 0.0) / math.sqrt(len(differences))  # NaN is not


def front(store: Path, methods: Collection[str]) -> list[dict[str, Any]]:
    """Returns the settings of some methods, of the table of a store, that no others of them surpass in both measures.

    Settings with which most seeds have diverged are none of them.

    Args:
        store: The store.
        methods: The methods.

    Returns:
        Lines of the table, the most accurate first.
    """
    lines = [
        line
        for method, rows in read(store).items()
        if method in methods
        for line in rows
        if line[FLAT] and math.isfinite(float(line[METRIC]) + float(line[FLAT]))
    ]
    best = unsurpassed([(float(line[METRIC]), -float(line[FLAT])) for line in lines])
    return sorted((lines[k] for k in best), key=lambda line: -float(line[METRIC]))


def unsurpassed(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the places of the points that no other one surpasses in both numbers, of which large ones are good."""
    return [k for k, (x, y) in enumerate(points) if not any(v > x and w > y for v, w in points)]
