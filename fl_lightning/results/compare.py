"""A table of several finished runs: as CSV, LaTeX and a figure of their curves."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import yaml

from fl_lightning.core import UserError, ensure
from fl_lightning.results.configs import EXECUTION
from fl_lightning.results.metrics import write_table
from fl_lightning.results.summary import LAST, Summary, summarise


@dataclass(frozen=True)
class Group:
    """Runs of one config with different seeds.

    Attributes:
        name: Their name in the table.
        folders: Their run folders.
        seeds: Their seeds, (trainer.seed, data.seed); None of a run without ``config.yaml``.
        runs: Their statistics.
    """

    name: str
    folders: list[Path]
    seeds: list[tuple[int, int] | None]
    runs: list[Summary]

    def values(self, name: str) -> list[float]:
        """Returns a statistic of each run that has it, see `Summary`."""
        return [value for run in self.runs if (value := getattr(run, name)) is not None]


@dataclass(frozen=True)
class Column:
    """A column of the table: mean and sample standard deviation over the runs of a group.

    Attributes:
        key: Its name in the CSV file.
        title: Its head.
        of: The statistic, see `Summary`.
        scale: Factor of the printed value.
        digits: Printed decimals.
        fraction: Whether papers print it in per cent.
    """

    key: str
    title: str
    of: str
    scale: float = 1.0
    digits: int = 4
    fraction: bool = False

    @property
    def to_target(self) -> bool:
        """Whether it is missing in a run that did not reach the target."""
        return self.of.startswith("target")


def compare(
    runs: Sequence[str | Path],
    target: float | None = None,
    last: int = LAST,
    metric: str | None = None,
    reference: str | Path | None = None,
) -> list[Group]:
    """Computes statistics of runs; runs of one config with different seeds are a group.

    Args:
        runs: Run folders.
        target: Value of the metric that runs are to reach, such as an accuracy of 0.8.
        last: Rounds at the end whose evaluations are averaged.
        metric: Name of the metric, larger is better; None: that of the data on the test set.
        reference: One of the runs; without ``target``, the mean of its group's last rounds is the target.

    Raises:
        UserError: If a folder holds no run or several hold the same, or they evaluate different metrics.
    """
    members: dict[str, list[tuple[tuple[int, int] | None, Path]]] = {}
    for run in runs:
        folder, found = Path(run).resolve(), summarise(run, last, metric=metric)
        metric = metric or found.metric  # the same of all
        key, seed = _identity(folder)
        for other_seed, other in members.setdefault(key, []):
            ensure(
                seed != other_seed,
                f"runs = {run}: the same config and seed as {other}; leave one of them out",
            )
        members[key].append((seed, folder))
    names = _names([group[0][1] for group in members.values()])
    groups = []
    for name, group in zip(names, members.values(), strict=True):
        seeds, folders = map(list, zip(*group, strict=True))
        groups.append(Group(name, folders, seeds, [summarise(folder, last, target, metric) for folder in folders]))
    if reference is not None and target is None:
        return compare(runs, mean(of_run(groups, reference).values("mean")), last, metric)
    return groups


def of_run(groups: Iterable[Group], run: str | Path) -> Group:
    """Returns the group of a run.

    Raises:
        UserError: If the run is in none.
    """
    for group in groups:
        if Path(run).resolve() in group.folders:
            return group
    raise UserError(f"reference = {run}: none of the runs; add it to them")


def columns(groups: Sequence[Group], reference: Group | None = None) -> list[Column]:
    """Returns the columns of the table."""
    fraction, last = groups[0].runs[0].metric.endswith(("acc", "miou")), max(r.last for g in groups for r in g.runs)
    shown = [
        Column("mean", f"last {last}", "mean", fraction=fraction),
        Column("std_rounds", "sd over rounds", "std", fraction=fraction),
        Column("best", "best", "best", fraction=fraction),
        Column("final", "final", "final", fraction=fraction),
        Column("minutes", "minutes", "minutes", digits=2),
        Column("gigabytes", "GB", "bits", 1 / 8e9, digits=3),
    ]
    target = groups[0].runs[0].target
    if target is not None:
        shown += [
            Column("target_rounds", f"rounds to {target:.4g}", "target_round", digits=0),
            Column("target_minutes", "minutes", "target_minutes", digits=2),
            Column("target_gigabytes", "GB", "target_bits", 1 / 8e9, digits=3),
            Column("target_transmissions", "models", "target_transmissions", digits=0),
        ]
        if reference is not None and (bits := reference.values("bits")):
            shown.append(Column("target_cost", "cost in B", "target_bits", 1 / mean(bits), 2))
    return [c for c in shown if c.to_target or any(group.values(c.of) for group in groups)]


def cell(group: Group, column: Column, pair: str, never: str) -> str:
    """Returns a cell as text.

    Args:
        group: The row.
        column: The column.
        pair: Format of mean and standard deviation.
        never: The text if the target was never reached.
    """
    values = [value * column.scale for value in group.values(column.of)]
    if not values:
        return never if column.to_target else ""
    text = f"{mean(values):,.{column.digits}f}"
    if column.key == "mean" and len(values) > 1:
        text = pair.format(text, f"{stdev(values):.{column.digits}f}")
    if column.to_target and len(values) < len(group.runs):
        text += f" ({len(values)} of {len(group.runs)})"  # the others never did
    return text


def write(groups: Sequence[Group], shown: Sequence[Column], out: Path) -> None:
    """Writes ``compare.csv`` (full precision), ``compare.tex`` (needs booktabs) and the curves of all runs."""
    from fl_lightning.core.figures import save_figure
    from fl_lightning.results.curves import plot_curves

    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for group in groups:
        first, numbers = group.runs[0], [[value * c.scale for value in group.values(c.of)] for c in shown]
        spreads = [f(v) if len(v) > n else "" for v in numbers for n, f in enumerate((mean, stdev))]
        reached = len(group.values("target_round"))
        rows.append([group.name, len(group.runs), first.metric, first.evaluations, reached, *spreads])
    heads = [name for column in shown for name in (column.key, f"{column.key}_sd")]
    write_table(out / "compare.csv", ["run", "seeds", "metric", "evaluations", "reached", *heads], rows)
    (out / "compare.tex").write_text(latex(groups, shown))
    curves = {}
    for group in groups:
        for folder, seed in zip(group.folders, group.seeds, strict=True):
            label = group.name if len(group.runs) == 1 or seed is None else f"{group.name}, seed {seed[0]}"
            curves[label if label not in curves else f"{label}, {folder.name}"] = folder / "metrics.csv"
    save_figure(plot_curves(curves), out / "curves")


def latex(groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """Returns the table for a paper, by booktabs; accuracy and mIoU in per cent."""
    printed = [replace(column, scale=100.0, digits=2) if column.fraction else column for column in shown]
    lines = [["run", *(column.title for column in shown)]]
    for group in groups:
        name = re.sub(r"([_%#&$])", r"\\\1", group.name)
        lines.append([name, *(cell(group, column, r"${} \pm {}$", r"$\times$") for column in printed)])
    rows = [" & ".join(line) + r" \\" for line in lines]
    body = [r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * len(shown)}}}", *body, r"\end{tabular}", ""])


def _identity(folder: Path) -> tuple[str, tuple[int, int] | None]:
    """Returns a run's config without its seeds, as text, and the seeds; without a config, its path and None."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        trainer, data = config["trainer"], config["data"]["init_args"]
        seeds = trainer["seed"], data.pop("seed")
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return str(folder), None
    config["trainer"] = {key: value for key, value in trainer.items() if key not in (*EXECUTION, "seed")}
    return json.dumps(config, sort_keys=True, default=str), seeds


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns a short name for each group: the end of the path of its first run, long enough to be unique."""
    whole = [folder.as_posix() for folder in folders]
    short = [re.sub(r"([/_]?seed_-?\d+)?(/version_\d+)?$", "", path) for path in whole]  # as `fit --seeds` names them
    paths = [a if short.count(a) == 1 else b for a, b in zip(short, whole, strict=True)]
    names = []
    for path in paths:
        parts = path.split("/")
        ends = ["/".join(parts[-n:]) for n in range(2 if parts[-1].startswith("version_") else 1, len(parts))]
        names.append(next((e for e in ends if sum(f"/{p}".endswith(f"/{e}") for p in paths) == 1), path))
    return names
