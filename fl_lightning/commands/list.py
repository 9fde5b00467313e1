"""``fl-lightning list``."""

from rich.table import Table

from fl_lightning.algorithms.catalogue import HEADS, WIRE, entries
from fl_lightning.commands.shared.output import show_table

SUMMARY = "Show the algorithms: paper, state, wire cost, passes."


def run() -> None:
    """Prints the algorithms as a table."""
    table = Table(*HEADS, box=None)
    for entry in entries():
        table.add_row(entry.name, *entry.cells)
    show_table(table)
    print(f"{WIRE} `ascent`, `server_update` and `averaging` combine with all that have none of their own.")
