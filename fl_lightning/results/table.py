"""The table of compared runs: its columns and cells, as text, CSV and LaTeX."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from textwrap import wrap

from fl_lightning.results.compare import Difference, Group, difference, rounded
from fl_lightning.results.metrics import (
    METRICS,
    Mode,
    deviation,
    is_of_clients,
    known,
    mode_of,
    read_directions,
    table_text,
)
from fl_lightning.results.summary import window
from fl_lightning.results.terminal import divided

TABLES = {
    "results": "results",
    "differences": "differences over common seeds, with 95 % intervals",
    "clients": "per-client performance",
    "costs": "cost",
}
"""Titles of the tables."""
PAIRED = ("mean", "lambda_max", "merged_lambda_max")
"""Columns of which differences are taken."""
ARROWS: dict[Mode, str] = {"max": "↑", "min": "↓"}


@dataclass(frozen=True)
class Column:
    """A column of the table: mean and sample standard deviation over the runs of a group.

    Attributes:
        key: Its name in the CSV file.
        title: Its head.
        statistic: The statistic, see `Group.values`.
        mode: Whether its largest or smallest value is the best; None: neither.
        form: Format of its values; of those with a standard deviation, "g" gives both as many decimals as it says.
        scale: Factor of the printed value.
        fraction: Whether papers print it in per cent.
        spread: Whether the standard deviation is printed.
        against: The group from which differences over common seeds are taken; None: it holds the values themselves.
    """

    key: str
    title: str
    statistic: str
    mode: Mode | None = "min"
    form: str = ",.4f"
    scale: float = 1.0
    fraction: bool = False
    spread: bool = False
    against: Group | None = None

    @property
    def head(self) -> str:
        """Title and direction."""
        return f"{self.title} {ARROWS[self.mode]}" if self.mode else self.title

    @property
    def table(self) -> str:
        """The table that it stands in, one of `TABLES`: all columns together are too wide."""
        if self.against is not None:
            return "differences"
        if is_of_clients(self.statistic):
            return "clients"
        return (
            "costs"
            if self.to_target or self.statistic in ("minutes", "bits", "device_s", "slow_uploads")
            else "results"
        )

    @property
    def in_paper(self) -> "Column":
        """The column as papers print it: accuracy and mIoU in per cent."""
        return replace(self, scale=100.0, form=",.2f") if self.fraction else self

    def number(self, value: float) -> str:
        """Returns a value as printed; one of a run that diverged in few digits."""
        return format(value := value * self.scale, self.form if abs(value) < 1e9 else ".4g")

    def numbers(self, values: Sequence[float]) -> list[str]:
        """Returns the mean of values, and their standard deviation if it is printed, as text."""
        numbers = [fmean(values), *([deviation(values) or 0.0] if self.spread and len(values) > 1 else [])]
        if numbers[1:] and self.form.endswith("g"):
            return rounded([number * self.scale for number in numbers], numbers[1] * self.scale)
        return [*map(self.number, numbers)]

    @property
    def to_target(self) -> bool:
        """Whether it is missing in a run that did not reach the target."""
        return self.statistic.startswith("target")


@dataclass(frozen=True)
class Markup:
    """How cells are written.

    Attributes:
        pair: Mean and standard deviation.
        never: A target that was never reached.
        best: The value of a column that is clearly the best; see `is_best`.
    """

    pair: str = "{} ± {}"
    never: str = "×"
    best: str = "{}"


LATEX = Markup(r"{} $\pm$ {}", r"$\times$", r"\textbf{{{}}}")
ACROSS, BETWEEN = 45.5, 2.4
"""Letters across a column of LaTeX's article (229.5 pt at 10 pt), and between two columns of a table (12 pt)."""
SIGN = re.compile(r"(?<!\w)[-+](?=\d)")
"""The sign of a number; that of an exponent is none."""
TEX = str.maketrans(
    {c: f"\\{c}" for c in "_%#&${}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "−": "$-$"}
)


def tex(text: str) -> str:
    """Returns a text with what LaTeX reads otherwise escaped; a leading minus becomes that of mathematics.

    A leading bracket or star would belong to the end of the line before.
    """
    text = re.sub(r"^(?=[\[*])", "{}", re.sub("^-", "$-$", text.translate(TEX)))
    return text.replace(r"lambda\_max", r"$\lambda_{\max}$")


def columns(groups: Sequence[Group], reference: Group | None = None) -> list[Column]:
    """Returns the columns of the table; no two have the same head."""
    runs = [run for group in groups for run in group.runs]
    first = runs[0]
    mode, fraction = first.mode, known(first.metric).unit == "fraction"
    directions = read_directions(groups[0].folders[0])
    leaf = next((name.rpartition("/")[2] for run in runs for name in run.clients), "acc")  # the data's metric
    shown = [
        Column("mean", window(run.last for run in runs), "mean", mode, spread=True),
        Column("std_rounds", "sd over rounds", "std", None),
        Column("best", "best", "best", mode),
        Column("final", "final", "final", mode),
    ]
    shown = [replace(column, fraction=fraction) for column in shown]
    over = f", {window([last])}" if (last := groups[0].last) else ""
    registered = [entry.name.format(leaf) for entry in METRICS if entry.key]
    for entry in (known(name + end) for name in registered for end in ("", "_all")):  # lambda_max_all: of all clients
        if is_of_clients(entry.name):
            best = None if entry.name.endswith("_gap") else mode_of(entry.name, None, directions)  # no sign is better
            shown.append(Column(entry.key, entry.title, entry.name, best, ",.4f", 1.0, entry.unit == "fraction", True))
        else:
            shown.append(Column(entry.key, entry.title + over, entry.name, form=",.4g", spread=True))
    base = reference or groups[0]
    shown += [
        c
        for c in differences(shown, base, base.title)
        if any((difference := paired(group, c)) and difference.seeds > 1 for group in groups)
    ]
    shown += [
        Column("minutes", "minutes", "minutes", form=",.2f"),
        Column("gigabytes", "GB", "bits", form=",.3f", scale=1 / 8e9),
        Column("device_hours", "device hours", "device_s", form=",.3g", scale=1 / 3600),
        Column("slow_uploads", "uploads of slowest 10 %", "slow_uploads", form=",.3f"),
    ]
    if first.target is not None:
        to = f"to {first.target:.4g}"
        shown += [
            Column("target_rounds", f"rounds {to}", "target_round", form=",.0f"),
            Column("target_minutes", f"minutes {to}", "target_minutes", form=",.2f"),
            Column("target_gigabytes", f"GB {to}", "target_bits", form=",.3f", scale=1 / 8e9),
            Column("target_transmissions", f"models {to}", "target_transmissions", form=",.0f"),
        ]
        optional = [
            Column("target_passes", f"passes {to}", "target_passes", form=",.0f"),
            Column("target_device_hours", f"device hours {to}", "target_device_s", form=",.3g", scale=1 / 3600),
        ]
        measured = ("target_passes", "device_s")
        shown += [
            c for c, name in zip(optional, measured, strict=True) if any(group.measured(name) for group in groups)
        ]
        if reference is not None and (bits := reference.values("bits")):
            shown.append(Column("target_cost", "cost in B", "target_bits", form=",.2f", scale=1 / fmean(bits)))
    return [c for c in shown if c.to_target or any(group.measured(c.statistic) for group in groups)]


def differences(shown: Sequence[Column], reference: Group, name: str) -> list[Column]:
    """Returns columns of the differences to a group, of the columns in `PAIRED`.

    Args:
        shown: The columns.
        reference: The group.
        name: Its name in their heads.
    """
    return [
        replace(c, key=f"{c.key}_difference", title=f"{c.title} − {name}", mode=None, against=reference)
        for c in shown
        if c.key in PAIRED
    ]


def paired(group: Group, column: Column) -> Difference | None:
    """Returns the difference of a group in a column of differences; None of the reference, and without common seeds."""
    against = column.against
    return None if against is None or group is against else difference(group, against, column.statistic)


def names(groups: Sequence[Group]) -> list[str]:
    """Returns the heads of the columns that tell the groups apart: settings, or the run where none does."""
    return [*groups[0].settings] or ["run"]


def label(group: Group) -> list[str]:
    """Returns the cells of a group below `names`."""
    return [*group.settings.values()] or [group.name]


def is_best(group: Group, column: Column, groups: Sequence[Group]) -> bool:
    """Returns whether a group has the best mean of all, and is clearly better than the next best, also as printed.

    A third group, however noisy, does not count. Clearly: the 95 % interval of the paired differences over common seeds
    leaves out 0; of groups without two common seeds, the means are apart by more than the standard deviations over
    seeds. Groups with a run without a finite value do not qualify, nor does one that alone was measured.

    Args:
        group: The row.
        column: The column.
        groups: All rows.
    """
    complete = [candidate for candidate in groups if len(candidate.values(column.statistic)) == len(candidate.runs)]
    rivals = [
        rival for rival in groups if rival is not group and (column.to_target or rival.measured(column.statistic))
    ]
    if column.mode is None or not rivals or group not in complete:
        return False
    ours, sign = group.values(column.statistic), 1 if column.mode == "max" else -1

    def mean(candidate: Group) -> float:
        return sign * fmean(candidate.values(column.statistic))

    others = [rival for rival in complete if rival is not group]
    if not others:
        return True
    second = max(others, key=mean)
    theirs = second.values(column.statistic)
    lead, printed = mean(group) - mean(second), {column.numbers(values)[0] for values in (ours, theirs)}
    if lead <= 0 or len(printed) == 1:
        return False
    gap = difference(group, second, column.statistic)
    if gap is not None and gap.seeds > 1:
        return sign * gap.mean > gap.half
    return lead > max(deviation(ours) or 0.0, deviation(theirs) or 0.0)


def cell(group: Group, column: Column, groups: Sequence[Group] = (), markup: Markup | None = None) -> str:
    """Returns a cell as text.

    Args:
        group: The row.
        column: The column.
        groups: All rows, to mark the best.
        markup: How it is written; None: as plain text.
    """
    markup = markup or Markup()
    if column.against is not None:
        return _difference(group, column)
    values = group.values(column.statistic)
    expected = len(group.runs) if column.to_target or group.measured(column.statistic) else 0
    if not values and column.to_target:  # one that was reached has no cost where nothing has measured it
        return "" if group.values("target_round") else markup.never
    if not values:
        return "nan" if expected else ""
    mean, *spread = column.numbers(values)
    text = markup.best.format(mean) if is_best(group, column, groups) else mean
    text = markup.pair.format(text, *spread) if spread else text
    return text if len(values) == expected else f"{text} ({len(values)} of {expected})"  # the others never did


def _difference(group: Group, column: Column) -> str:
    difference = paired(group, column)
    if difference is None:
        return ""
    text = difference.text("" if column.form.endswith("g") else f"+{column.form}", column.scale)
    return text if difference.seeds == len(group.runs) else f"{text} ({difference.seeds} of {len(group.runs)})"


def table_files(groups: Sequence[Group], shown: Sequence[Column]) -> dict[str, str]:
    """Returns ``compare.csv`` (full precision) and ``compare.tex`` (needs booktabs), by name."""
    rows = [row(group, shown) for group in groups]
    return {"compare.csv": table_text(rows[0], [r.values() for r in rows]), "compare.tex": latex(groups, shown)}


def row(group: Group, shown: Sequence[Column]) -> Mapping[str, str | float | None]:
    """Returns a group's row of the CSV file by column, with all digits; empty where there is no value.

    A setting with the name of another column, such as ``data.mean``, stands below ``setting mean``.
    """
    first = group.runs[0]
    cells: dict[str, str | float | None] = {
        "seeds": len(group.runs),
        "metric": first.metric,
        "evaluations": first.evaluations,
        "finite": len(group.values("mean")),
        "reached": len(group.values("target_round")),
    }
    for column in shown:
        if column.against is None:
            values = [value * column.scale for value in group.values(column.statistic)]
            cells[column.key] = fmean(values) if values else ""
            cells[f"{column.key}_sd"] = deviation(values) if len(values) > 1 else ""
        else:
            difference = paired(group, column)
            numbers = (difference.mean, *difference.ends, difference.seeds) if difference else [""] * 4
            cells |= zip((column.key + end for end in ("", "_low", "_high", "_seeds")), numbers, strict=True)
    settings = {f"setting {key}" if key in cells else key: value for key, value in group.settings.items()}
    return {"run": group.name, **settings, **cells}


def latex(groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """Returns tables for a paper, by booktabs, as wide as a column; accuracy and mIoU in per cent, the best in bold."""
    printed = [column.in_paper for column in shown]
    keys, heads = len(names(groups)), [*names(groups), *(column.head for column in shown)]
    plain, rows = (
        [[*label(group), *(cell(group, column, groups, markup) for column in printed)] for group in groups]
        for markup in (Markup(), LATEX)
    )
    rows = [[*map(tex, row[:keys]), *(SIGN.sub(r"$\g<0>$", text) for text in row[keys:])] for row in rows]
    return tabulars([head.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓") for head in heads], plain, rows, keys)


def tabulars(
    heads: Sequence[str], plain: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], keys: int, left: int = 0
) -> str:
    """Returns a table as tabulars of LaTeX, each as wide as a column of a paper.

    Several keys that take more than half of it are shown once: the rows then have numbers, which each tabular repeats.

    Args:
        heads: The heads as plain text; no-break spaces keep words in one line.
        plain: The cells as plain text, for their widths.
        rows: The cells for LaTeX.
        keys: Columns at the left that each tabular repeats.
        left: Number of columns, from the first one on, that are flush left; at least the keys.
    """
    widths = [max(map(len, [*head.split(" "), *cells])) for head, *cells in zip(heads, *plain, strict=True)]
    if keys > 1 and sum(widths[:keys]) + BETWEEN * keys > ACROSS / 2:
        plain, rows = ([[str(i), *row] for i, row in enumerate(cells, 1)] for cells in (plain, rows))
        return tabulars(["#", *heads], plain, rows, 1, keys + 1)
    stacks = [
        [tex(line.replace("\u00a0", " ")) for line in wrap(head, width)]
        for head, width in zip(heads, widths, strict=True)
    ]
    tables = []
    for part in divided([width + BETWEEN for width in widths], ACROSS, keys):
        top = [_stacked(stacks[i]) for i in part]
        lines = [" & ".join(line) + r" \\" for line in (top, *([row[i] for i in part] for row in rows))]
        form = "".join("l" if i < max(keys, left) else "r" for i in part)
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        tables.append("\n".join([rf"\begin{{tabular}}{{{form}}}", *body, r"\end{tabular}", ""]))
    return "\n".join(tables)


def _stacked(lines: Sequence[str]) -> str:
    return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r" \\ ".join(lines) + "}"
