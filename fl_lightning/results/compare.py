"""Comparison of runs: they are found below folders, and those of one config with different seeds are a group."""

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

from fl_lightning.core import UserError, checked, ensure, folded
from fl_lightning.results.configs import config_of, run_key, settings_of, telling
from fl_lightning.results.metrics import FILE, NUMBER, Mode, average, deviation, read_run, rounds_done
from fl_lightning.results.rows import REPEATED, ROW, ROWS, located
from fl_lightning.results.summary import SUMMARY, Summary, summarise
from fl_lightning.results.terminal import say

OWN_CLASS = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*\.[A-Z]\w*")
"""The dotted path of a class."""
MISSING = "–"
"""A setting that a config does not have."""
Seeds = tuple[int, ...] | None
"""The seeds of a run, (trainer.seed, data.seed); None for a run without ``config.yaml``."""


@dataclass(frozen=True)
class Group:
    """Runs of one config with different seeds.

    Attributes:
        name: Their name in the table.
        folders: Their run folders.
        seeds: Their seeds.
        runs: Their statistics.
        left_out: Folders of other runs with the same config and a seed of these.
        settings: The settings that tell it from the other groups, by a short name; see `telling`.
        named: Whether a reader has named it.
        last: Rounds at the end over which measures of flatness are averaged; None: the last measurement counts.
    """

    name: str
    folders: list[Path]
    seeds: list[Seeds]
    runs: list[Summary]
    left_out: list[Path] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    named: bool = False
    last: int | None = None

    @property
    def title(self) -> str:
        """The settings that tell it from the others in a line, as in ``FedSAM, rho 0.1``; its name where none does."""
        parts = [(key, value) for key, value in self.settings.items() if value != MISSING and not self.named]
        return ", ".join(f"{key} {value}" if NUMBER.fullmatch(value) else value for key, value in parts) or self.name

    @property
    def metrics(self) -> list[Path]:
        """``metrics.csv`` of each run."""
        return [folder / FILE for folder in self.folders]

    def values(self, name: str) -> list[float]:
        """Returns a statistic of each run in which it is finite.

        Args:
            name: Its name in `Summary`, or that of a measure of flatness or a statistic over clients.
        """
        return [value for value in self._found(name) if math.isfinite(value)]

    def measured(self, name: str) -> int:
        """Returns the number of runs that have a statistic, finite or not."""
        return len(self._found(name))

    @staticmethod
    def value(run: Summary, name: str) -> float | None:
        """Returns a statistic of a run by its name as in `values`; None if the run has not measured it."""
        if name.startswith("flatness/"):
            return run.flatness.get(name.removeprefix("flatness/"))
        return run.clients.get(name, getattr(run, name, None))

    def _found(self, name: str) -> list[float]:
        return [value for run in self.runs if (value := self.value(run, name)) is not None]


@checked
def compare(
    runs: str | Path | Sequence[str | Path],
    target: float | None = None,
    last: int | None = None,
    metric: str | None = None,
    reference: str | Path | None = None,
    mode: Mode | None = None,
    names: Sequence[str] | None = None,
) -> list[Group]:
    """Computes statistics of runs; runs of one config with different seeds are a group.

    Of several runs below a folder with the same config and seed, one that has ended counts, and of these the last by
    name, such as the highest version.

    Args:
        runs: Run folders, stores of a study, rows of one, or folders above them; or one.
        target: Value of the metric that runs are to reach, such as an accuracy of 0.8.
        last: Rounds at the end whose evaluations and measurements are averaged; None: those of the headline.
        metric: Name of the metric; None: that of the data on the test set.
        reference: One of the runs; without ``target``, the mean of its group's last rounds is the target.
        mode: Whether large (max) or small (min) values of the metric are good; None: as its name says.
        names: Names of the groups in their order, as a paper has them; None: those of their folders.

    Raises:
        UserError: If a folder holds no run, two of the given folders are the same run, metrics differ, no run of the
            reference has a finite value, or there is another number of groups than of names.
    """
    runs = [runs] if isinstance(runs, str | Path) else runs
    ensure(bool(runs), "runs = []: give the folders of runs, or a folder above them")
    listed = {folder for run in runs for folder in located(run)}
    members: dict[str, dict[Seeds, Path]] = {}
    left_out: dict[str, list[Path]] = {}
    folders = find_runs(runs)
    metric = metric or summarise(folders[0], last, mode=mode).metric  # the same of all
    unmeasured = [folder for folder in folders if folder not in listed and metric not in _head(folder)]
    for folder in folders:
        if folder in unmeasured and len(unmeasured) < len(folders):
            say(f"left out: {folder}: its {FILE} has no {metric}", file=sys.stderr)
            continue
        key, seed = _identity(folder)
        group = members.setdefault(key, {})
        if twin := group.get(seed):
            ensure(
                not {folder, twin} <= listed,
                f"runs = {folder}: the same config and seed as {twin}; leave one of them out",
            )
            kept = max(folder, twin, key=lambda run: (run in listed, _ended(run)))  # of equals the later one
            left_out.setdefault(key, []).append(twin if kept is folder else folder)
            if kept is twin:
                continue
            del group[seed]  # the later one comes last
        group[seed] = folder
    ends = _names([next(iter(group.values())) for group in members.values()])
    configs = [settings_of(next(iter(group.values()))) for group in members.values()]
    keys = telling(configs) if all(configs) else {}
    texts = {setting: shown(config.get(setting) for config in configs) for setting in keys.values()}
    groups = [
        Group(
            name=name,
            folders=[*group.values()],
            seeds=[*group],
            runs=[summarise(folder, last, target, metric, mode) for folder in group.values()],
            left_out=left_out.get(key, []),
            settings={end: texts[setting][config.get(setting)] for end, setting in keys.items()},
            last=last,
        )
        for name, config, (key, group) in zip(ends, configs, members.items(), strict=True)
    ]
    if names is not None:
        groups = _renamed(groups, names)
    if reference is not None and target is None:
        reached = of_run(groups, reference).values("mean")
        ensure(bool(reached), f"reference = {reference}: its {metric} is not finite; give a target")
        groups = [
            replace(group, runs=[summarise(folder, last, fmean(reached), metric, mode) for folder in group.folders])
            for group in groups
        ]
    for folder, summary in ((folder, run) for row in groups for folder, run in zip(row.folders, row.runs, strict=True)):
        if not _ended(folder):
            done = f"{summary.rounds} of {settings_of(folder)['trainer.max_rounds']} rounds"
            say(f"not ended: {folder} has {done}, and counts all the same", file=sys.stderr)
    return groups


def _renamed(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Returns groups as a reader names them; of their settings the numbers stay, in one column."""
    titles = folded("; ".join(group.title for group in groups), 300)
    good = len({*names} - {""}) == len(names) == len(groups)
    ensure(good, f"names = {','.join(names)}: give {len(groups)} different names, for these rows in order: {titles}")
    tuned = [
        ", ".join(f"{key} {value}" for key, value in group.settings.items() if NUMBER.fullmatch(value))
        for group in groups
    ]
    return [
        replace(group, name=name, named=True, settings={"method": name} | ({"settings": set_to} if any(tuned) else {}))
        for group, name, set_to in zip(groups, names, tuned, strict=True)
    ]


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """Returns the run folders among and below the given ones, each once.

    A run is a folder with a ``metrics.csv`` of at least one round; nothing is searched below it. A ``metrics.csv``
    without a column of rounds, which is another program's, is named on stderr. Rows of stores are unpacked.

    Args:
        folders: Run folders, stores of a study, rows of one, or folders above them.

    Returns:
        Absolute paths; those below one folder in the order of their names, numbers by value.

    Raises:
        UserError: If a folder does not exist, or holds no run.
    """
    runs: dict[Path, None] = {}
    for folder in folders:
        paths = located(folder)
        exist = all(path.is_dir() for path in paths)
        ensure(exist, f"runs = {folder}: no such folder; give the folders of runs, or a folder above them")
        runs_below = sorted((run for path in paths for run in _below(path)), key=_by_number)
        ensure(bool(runs_below), f"runs = {folder}: no run there, that is no {FILE} with a round; give another folder")
        runs |= dict.fromkeys(runs_below)
    return list(runs)


def of_run(groups: Iterable[Group], run: str | Path) -> Group:
    """Returns the group of a run, or of the runs below a folder, or of a name: its own, or that of its settings.

    Raises:
        UserError: If there is none, or more than one.
    """
    paths, groups = {*located(run)}, list(groups)
    matches = [group for group in groups if any(paths & {folder, *folder.parents} for folder in group.folders)]
    matches = matches or [group for group in groups if str(run) in (group.name, group.title, *group.settings.values())]
    if len(matches) == 1:
        return matches[0]
    names = folded("; ".join(group.title for group in matches or groups), 300)
    problem = (
        f"of {len(matches)} configs; give one of them" if matches else "none of the runs; add it to them, or name one"
    )
    raise UserError(f"reference = {run}: {problem}: {names}")


def _identity(folder: Path) -> tuple[str, Seeds]:
    """Returns a run's config without its seeds, as text, and the seeds; without a config, its path and None."""
    if not (config := config_of(folder)):
        return str(folder), None
    try:
        settings = config["data"].get("init_args", {})  # a class of one's own may have none
        seeds = config["trainer"]["seed"], settings.get("seed", 0)
        hash(seeds)
        return run_key(folder), seeds
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder / 'config.yaml'}: not a run's config ({reason:.120}); restore the file, or leave its run out"
        ) from None


def shown(texts: Iterable[str | None]) -> dict[str | None, str]:
    """Returns values of a setting as tables show them: classes without their modules, numbers with four digits.

    Where these are equal of different values, as many digits and modules are shown as tell them apart.

    Args:
        texts: The values as `flatten` returns them; None where a config has no such setting.
    """
    values = {text: float(text) if text and NUMBER.fullmatch(text) else text for text in texts}
    by_value = {value: text for text, value in reversed(values.items())}
    for digits in (*range(4, 17), 0):
        printed = {value: _plain(text, digits) for value, text in by_value.items()}
        if len({*printed.values()}) == len(printed):
            break
    return {text: printed[value] for text, value in values.items()}


def _plain(text: str | None, digits: int) -> str:
    """Returns a value as `shown`, with a number of digits; 0: as it is."""
    if text is None:
        return MISSING
    if text == "None":
        return "null"  # as a config has it
    if digits and OWN_CLASS.fullmatch(text):
        return text.rpartition(".")[2]
    fraction = NUMBER.fullmatch(text) and not text.lstrip("-").isdecimal()
    return f"{float(text):.{digits}g}" if digits and fraction else text


def _ended(folder: Path) -> bool:
    """Returns whether a run has ended, as it says itself, or by its rounds."""
    planned = settings_of(folder).get("trainer.max_rounds", "0")
    done = (folder / SUMMARY).is_file() or (folder / ROW).is_file() or not planned.isdecimal()
    return done or rounds_done(read_run(folder)) >= int(planned)


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns a short name for each group: the end of the path of its first run, long enough to be unique."""
    full = [folder.as_posix() for folder in folders]
    short = [re.sub(r"([/_]?seed_-?\d+)?(/version_\d+)?$", "", path) for path in full]  # as `fit --seeds` names them
    paths = [a if short.count(a) == 1 else b for a, b in zip(short, full, strict=True)]
    names = []
    for path in paths:
        parts = path.split("/")
        ends = ["/".join(parts[-n:]) for n in range(2 if REPEATED.search(f"/{parts[-1]}") else 1, len(parts))]
        names.append(next((e for e in ends if sum(f"/{p}".endswith(f"/{e}") for p in paths) == 1), path))
    return names


def _below(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        if ROWS in files:
            names.clear()
            yield from (run for unpacked in located(folder) for run in _below(unpacked))
        elif FILE in files:
            names.clear()
            path, head = Path(folder), _head(Path(folder))
            if path == root or "round" in head:  # what is named is refused if it is no run's
                yield from [path] if head else []
            elif head:
                say(f"left out: {path}: its {FILE} has no column named round", file=sys.stderr)


def _head(folder: Path) -> list[str]:
    """Returns the columns of a ``metrics.csv`` with a whole row; none of a shorter file."""
    with (folder / FILE).open(encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip() for line in islice(file, 2) if line.endswith("\n")]
    return lines[0].split(",") if len(lines) == 2 else []


def _by_number(folder: Path) -> list[float | str]:
    return [float(part) if part[:1].isdecimal() else part for part in re.split(r"(\d+(?:\.\d+)?)", str(folder))]


@dataclass(frozen=True)
class Difference:
    """A statistic of one group minus that of another, over their common seeds.

    Attributes:
        mean: Mean of the differences.
        half: Half the width of the 95 % interval of the mean, by Student's t; NaN of a single seed.
        seeds: Number of common seeds in which both are finite.
    """

    mean: float
    half: float
    seeds: int

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return self.mean - self.half, self.mean + self.half

    def text(self, form: str = "", scale: float = 1.0) -> str:
        """Returns the difference with its interval, if it has one.

        Args:
            form: Format of its numbers; nothing: see `rounded`.
            scale: A factor of them.
        """
        numbers = [scale * value for value in (self.mean, *self.ends)]
        mean, *ends = [format(value, form) for value in numbers] if form else rounded(numbers, scale * self.half, "+")
        return mean if math.isnan(self.half) else f"{mean} [{', '.join(ends)}]"


def rounded(values: Sequence[float], error: float, sign: str = "") -> list[str]:
    """Returns numbers with the decimals that two digits of their error have.

    They have four digits if the error says less or nothing, or if one of them has more than six before the point.

    Args:
        values: The numbers.
        error: Their standard deviation, or half the width of an interval.
        sign: "+" for a sign before positive ones.
    """
    largest = max(map(abs, values))
    if 0 < error < 1e6 and 0 < largest < 1e6:
        decimals, most = (digits - math.floor(math.log10(x)) for digits, x in ((1, error), (3, largest)))
        if decimals <= most:
            return [f"{value:{sign},.{max(decimals, 0)}f}" for value in values]
    return [f"{value:{sign},.4g}" for value in values]


@checked
def difference(group: Group, reference: Group, name: str) -> Difference | None:
    """Returns the paired difference of a statistic; None without a common seed.

    Args:
        group: Runs of one config.
        reference: Runs of another config.
        name: The statistic, as in `Group.values`.
    """
    differences = apart(group, reference, name)
    return interval([*differences.values()]) if differences else None


def apart(group: Group, reference: Group, name: str) -> dict[object, float]:
    """Returns a statistic of each run minus that of the reference's run with its seed, where both are finite."""
    ours, theirs = _by_seed(group, name), _by_seed(reference, name)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def interval(differences: Sequence[float]) -> Difference:
    """Returns the mean of differences, at least one, with its 95 % interval."""
    from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import

    n = len(differences)
    half = math.nan if n < 2 else float(stdtrit(n - 1, 0.975)) * (deviation(differences) or 0.0) / math.sqrt(n)
    return Difference(average(differences), half, n)


def _by_seed(group: Group, name: str) -> Mapping[object, float]:
    pairs = ((seed, group.value(run, name)) for seed, run in zip(group.seeds, group.runs, strict=True))
    return {seed: value for seed, value in pairs if value is not None and math.isfinite(value)}
