"""``fl-lightning list``."""

from fl_lightning.commands.shared.index import index
from fl_lightning.results.terminal import console, filled, show_table

SUMMARY = "Show the algorithms: paper, state, wire cost, passes."
METHOD, STATE = (0, 1, 6, 7, 8), (0, 2, 3, 4, 5)
"""Columns of the two tables: together they are too wide."""


def run() -> None:
    """Prints the algorithms as a table."""
    found = index()["algorithms"]
    for columns in METHOD, STATE:
        heads, *rows = [[row[i] for i in columns] for row in (found["heads"], *found["rows"])]
        show_table(filled(heads, rows, len(heads), box=None), text=14 if columns is STATE else 24)
        print()
    note = f"{found['note']} `ascent`, `server_update` and `averaging` combine with all that have none of their own."
    console().print(note, markup=False, highlight=False)
