"""The table of compared runs: its columns and cells, as text, CSV and LaTeX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from fl_lightning.results.compare import Group
from fl_lightning.results.metrics import Mode, is_of_clients, mode_of, read_directions, write_table

FLATNESS = ("lambda_max", "discrepancy", "sharpness_global", "sharpness_local")
"""Measures of flatness that have a column, if they were logged; those of all clients (``..._all``) likewise."""
CLIENTS = {
    "clients": ("mean of clients", "server/clients/{}"),
    "clients_weighted": ("weighted", "server/clients/{}_weighted"),
    "clients_std": ("sd over clients", "server/clients/{}_std"),
    "worst_decile": ("worst 10 %", "server/clients/{}_worst_decile"),
    "worst_client": ("worst client", "server/clients/{}_worst"),
    "local": ("local models", "client/test/{}"),
    "local_worst_decile": ("worst 10 %, local", "client/test/{}_worst_decile"),
    "local_gap": ("local minus global", "client/test/{}_gap"),
}
"""Columns of statistics over clients, if they were logged: by key the title, and the metric's name."""
TABLES = {"results": "results", "clients": "who is served", "costs": "cost"}
"""Titles of the tables."""
ARROWS: dict[Mode, str] = {"max": "↑", "min": "↓"}


@dataclass(frozen=True)
class Column:
    """A column of the table: mean and sample standard deviation over the runs of a group.

    Attributes:
        key: Its name in the CSV file.
        title: Its head.
        of: The statistic, see `Group.values`.
        mode: Whether its largest or smallest value is the best; None: neither.
        form: Format of its values.
        scale: Factor of the printed value.
        fraction: Whether papers print it in per cent.
        spread: Format of the standard deviation; None: it is not printed.
    """

    key: str
    title: str
    of: str
    mode: Mode | None = "min"
    form: str = ",.4f"
    scale: float = 1.0
    fraction: bool = False
    spread: str | None = None

    @property
    def head(self) -> str:
        """Title and direction."""
        return f"{self.title} {ARROWS[self.mode]}" if self.mode else self.title

    @property
    def table(self) -> str:
        """The table that it stands in, one of `TABLES`: all columns together are too wide."""
        if is_of_clients(self.of):
            return "clients"
        return "costs" if self.to_target or self.of in ("minutes", "bits") else "results"

    @property
    def to_target(self) -> bool:
        """Whether it is missing in a run that did not reach the target."""
        return self.of.startswith("target")


@dataclass(frozen=True)
class Markup:
    """How cells are written.

    Attributes:
        pair: Mean and standard deviation.
        never: A target that was never reached.
        best: The best value of a column.
    """

    pair: str = "{} ± {}"
    never: str = "×"
    best: str = "{}"


LATEX = Markup(r"{} $\pm$ {}", r"$\times$", r"\textbf{{{}}}")
TEX = str.maketrans(
    {c: f"\\{c}" for c in "_%#&${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$"}
)


def columns(groups: Sequence[Group], reference: Group | None = None) -> list[Column]:
    """Returns the columns of the table; no two have the same head."""
    runs = [run for group in groups for run in group.runs]
    first, last = runs[0], max(run.last for run in runs)
    mode, fraction = first.mode, first.metric.endswith(("acc", "miou"))
    measured = {name for run in runs for name in run.flatness}
    directions = read_directions(groups[0].folders[0])
    leaf = next((name.rpartition("/")[2] for run in runs for name in run.clients), "acc")  # the data's metric
    shown = [
        Column("mean", f"last {last}", "mean", mode, spread=",.4f", fraction=fraction),
        Column("std_rounds", "sd over rounds", "std", None, fraction=fraction),
        Column("best", "best", "best", mode, fraction=fraction),
        Column("final", "final", "final", mode, fraction=fraction),
        *(
            Column(name, name.replace("_", " "), f"flatness/{name}", mode_of(f"flatness/{name}"), ",.4g", spread=".2g")
            for start in FLATNESS
            for name in (start, f"{start}_all")
            if name in measured
        ),
        *(
            Column(key, title, of, _direction(of, directions), spread=",.4f", fraction=leaf in ("acc", "miou"))
            for key, title, of in ((key, title, of.format(leaf)) for key, (title, of) in CLIENTS.items())
        ),
        Column("minutes", "minutes", "minutes", form=",.2f"),
        Column("gigabytes", "GB", "bits", form=",.3f", scale=1 / 8e9),
    ]
    if first.target is not None:
        to = f"to {first.target:.4g}"
        shown += [
            Column("target_rounds", f"rounds {to}", "target_round", form=",.0f"),
            Column("target_minutes", f"minutes {to}", "target_minutes", form=",.2f"),
            Column("target_gigabytes", f"GB {to}", "target_bits", form=",.3f", scale=1 / 8e9),
            Column("target_transmissions", f"models {to}", "target_transmissions", form=",.0f"),
        ]
        if reference is not None and (bits := reference.values("bits")):
            shown.append(Column("target_cost", "cost in B", "target_bits", form=",.2f", scale=1 / mean(bits)))
    return [c for c in shown if c.to_target or any(group.values(c.of) for group in groups)]


def _direction(of_clients: str, directions: Mapping[str, Mode]) -> Mode | None:
    """Of a difference between local and global models neither sign is the better one."""
    return None if of_clients.endswith("_gap") else mode_of(of_clients, None, directions)


def is_best(group: Group, column: Column, groups: Sequence[Group]) -> bool:
    """Whether no other group has a better mean; one of which not all runs reach the target is not the best."""
    rivals = {g.name: mean(g.values(column.of)) for g in groups if len(g.values(column.of)) == len(g.runs)}
    if column.mode is None or len(groups) < 2 or group.name not in rivals:
        return False
    return rivals[group.name] == (max if column.mode == "max" else min)(rivals.values())


def cell(group: Group, column: Column, groups: Sequence[Group] = (), markup: Markup | None = None) -> str:
    """Returns a cell as text.

    Args:
        group: The row.
        column: The column.
        groups: All rows, to mark the best.
        markup: How it is written; None: as plain text.
    """
    markup = markup or Markup()
    values = [value * column.scale for value in group.values(column.of)]
    if not values:
        return markup.never if column.to_target else ""
    text = format(mean(values), column.form)
    if is_best(group, column, groups):
        text = markup.best.format(text)
    if column.spread and len(values) > 1:
        text = markup.pair.format(text, format(stdev(values), column.spread))
    if column.to_target and len(values) < len(group.runs):
        text += f" ({len(values)} of {len(group.runs)})"  # the others never did
    return text


def write(groups: Sequence[Group], shown: Sequence[Column], out: Path) -> None:
    """Writes ``compare.csv`` (full precision) and ``compare.tex`` (needs booktabs)."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [row(group, shown) for group in groups]
    write_table(out / "compare.csv", rows[0], [r.values() for r in rows])
    (out / "compare.tex").write_text(latex(groups, shown), encoding="utf-8")


def row(group: Group, shown: Sequence[Column]) -> Mapping[str, str | float]:
    """Returns a group's row of the CSV file by column, with all digits; empty where there is no value."""
    first = group.runs[0]
    found: dict[str, str | float] = {
        "run": group.name,
        "seeds": len(group.runs),
        "metric": first.metric,
        "evaluations": first.evaluations,
        "reached": len(group.values("target_round")),
    }
    for column in shown:
        values = [value * column.scale for value in group.values(column.of)]
        found[column.key] = mean(values) if values else ""
        found[f"{column.key}_sd"] = stdev(values) if len(values) > 1 else ""
    return found


def latex(groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """Returns the table for a paper, by booktabs; accuracy and mIoU in per cent, the best values in bold."""
    printed = [replace(c, scale=100.0, form=",.2f", spread=c.spread and ",.2f") if c.fraction else c for c in shown]
    lines = [
        ["run", *(column.head.translate(TEX) for column in shown)],
        *([g.name.translate(TEX), *(cell(g, column, groups, LATEX) for column in printed)] for g in groups),
    ]
    rows = [" & ".join(line) + r" \\" for line in lines]
    body = [r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * len(shown)}}}", *body, r"\end{tabular}", ""])
