"""The table of a reproduction: our numbers beside the paper's, as text, CSV, LaTeX and Markdown."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fl_lightning.results import filled, last_measurements, markdown, protocol, tex, window_of, write_table
from fl_lightning.results.papers import COLUMNS, EVALUATED, MEASURED, Line
from fl_lightning.sweeps.reproduction import column

HEADS = ("", "ours", "paper", "difference", "seeds")


def title(lines: Sequence[Line]) -> str:
    """Returns the table's title: fraction of the rounds, those of the means, and settings that are not the paper's."""
    first = lines[0]
    rounds = "all rounds" if first.fraction == 1 else f"{100 * first.fraction:.4g} % of the rounds"
    counted = window_of(run for line in lines if line.cell.metric in EVALUATED for run in line.folders)
    what = f"{first.cell.paper}, Table {first.cell.table}: {rounds}" + (f", means of the {counted}" if counted else "")
    return ", with ".join(filter(None, (what, first.settings)))


def protocols(lines: Sequence[Line]) -> list[str]:
    """Returns how each of our numbers on flatness was measured, in one line."""
    names = [(line.cell.metric.partition("@")[0], line.folders) for line in lines]
    runs = [(name, last_measurements(run)) for name, folders in names if name in MEASURED for run in folders]
    found = [(name, measured.get(MEASURED[name][0])) for name, measured in runs]
    return list(dict.fromkeys(f"{name}: {protocol(measured)}" for name, measured in found if measured))


def texts(line: Line) -> list[str]:
    """Returns the cells of a line as text, with as many digits as the paper prints."""
    cell = line.cell
    printed = cell.printed.partition(" ± ")[0]
    digits = max(1, len(printed.partition(".")[2])) if printed else 2
    spread = "" if line.std is None else f" ± {line.std:.{digits}f}"
    ours = "" if line.mean is None else f"{line.mean:.{digits}f}{spread}"
    name = cell.algorithm if cell.metric == "acc" else f"{cell.algorithm}, {cell.metric}"
    difference = "" if line.difference is None else f"{line.difference:+.{digits}f}"
    whole = str(len(line.values)) if line.folders or not line.values else "declared"
    seeds = f"{len(line.values)} of {len(line.values) + len(line.errors)}" if line.errors else whole
    missing = "not reached" if any(error.endswith("not reached") for error in line.errors) else "broke off"
    return [name, ours or missing, cell.printed or cell.note.partition(";")[0], difference, seeds]


def table(lines: Sequence[Line]) -> Table:
    """Returns the table for the terminal, a section for each column of the paper's."""
    found = filled(HEADS, (), title=escape(title(lines)))
    for name, group in _sections(lines):
        found.add_section()
        found.add_row(f"[bold]{escape(name)}[/]")
        for line in group:
            found.add_row(*map(escape, texts(line)))
    return found


def write(lines: Sequence[Line], out: Path) -> None:
    """Writes ``table.csv`` (all digits), ``table.tex`` (needs booktabs) and ``table.md``."""
    heads = (
        *COLUMNS,
        "fraction",
        "settings",
        "seeds",
        "ours",
        "ours_std",
        "value",
        "std",
        "difference",
        "folders",
        "errors",
    )
    rows = [
        [
            *(getattr(line.cell, name) for name in COLUMNS), line.fraction, line.settings, len(line.values), line.mean,
            line.std, line.cell.value, line.cell.std, line.difference, " ".join(map(str, line.folders)),
            "; ".join(line.errors),
        ]
        for line in lines
    ]  # fmt: skip
    write_table(out / "table.csv", heads, rows)
    (out / "table.tex").write_text(latex(lines), encoding="utf-8")
    said = "".join(f"\n- {text}" for text in protocols(lines))
    body = [[name, *texts(line)] for name, group in _sections(lines) for line in group]
    text = markdown([["column", "row", *HEADS[1:]], *body])
    (out / "table.md").write_text(f"**{title(lines)}**\n\n{text}{said}\n", encoding="utf-8")


def latex(lines: Sequence[Line]) -> str:
    """Returns the table for a paper, by booktabs."""

    def across(text: str) -> str:
        return rf"\multicolumn{{{len(HEADS)}}}{{l}}{{{tex(text)}}} \\"

    form = rf"\begin{{tabular}}{{l{'r' * (len(HEADS) - 1)}}}"
    body = [form, r"\toprule", across(title(lines)), r"\midrule", " & ".join(HEADS) + r" \\"]
    for name, group in _sections(lines):
        body += [r"\midrule", across(name), *(" & ".join(map(tex, texts(line))) + r" \\" for line in group)]
    said = [r"\midrule", *map(across, found)] if (found := protocols(lines)) else []
    return "\n".join([*body, *said, r"\bottomrule", r"\end{tabular}", ""])


def _sections(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Returns the lines of each column, in the order of the paper."""

    def place(line: Line) -> str:
        return ", with ".join(filter(None, (column(line.cell), line.settings)))

    names = list(dict.fromkeys(map(place, lines)))
    return [(name, list(group)) for name, group in groupby(sorted(lines, key=lambda x: names.index(place(x))), place)]
