"""The papers' tables in docs/experiments.md: ``python -m tests.paper_tables fedsam 2`` prints one as Markdown."""

import sys

from fl_lightning.results.papers import find


def markdown(paper: str, table: str) -> str:
    """Returns a table of a paper: algorithms by data, the numbers of several participations in one cell.

    Raises:
        UserError: If there is no such table.
    """
    cells = find(paper=paper, table=table)

    def values(column: str) -> list[str]:
        return list(dict.fromkeys(getattr(cell, column) for cell in cells))

    data = [c for c in ("dataset", "model", "heterogeneity", "metric") if len(values(c)) > 1]
    epochs = len({(c.dataset, c.epochs) for c in cells if c.epochs}) > len({c.dataset for c in cells if c.epochs})
    shown: dict[str, dict[str, dict[str, str]]] = {}  # by row, column and participation
    cohorts: dict[str, dict[str, None]] = {}  # of each column
    for cell in cells:
        row = f"{cell.algorithm}, E = {cell.epochs}" if epochs else cell.algorithm
        column = ", ".join(filter(None, (getattr(cell, name) for name in data)))
        reason = cell.note.partition(";")[0]
        text = reason if cell.value is None else cell.printed + ("?" if reason == "uncertain" else "")
        shown.setdefault(row, {}).setdefault(column, {})[cell.participation] = text
        cohorts.setdefault(column, {})[cell.participation] = None
    heads = values("participation")
    lines = [[", ".join(heads) if len(heads) > 1 else "", *cohorts], ["---"] * (len(cohorts) + 1)]
    for row, of in shown.items():
        lines.append([row, *(" / ".join(of[c].get(p, "-") for p in cohorts[c]) if c in of else "" for c in cohorts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(*sys.argv[1:3]), end="")
