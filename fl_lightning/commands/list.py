"""``fl-lightning list``."""

import sys

from rich.console import Console
from rich.table import Table

from fl_lightning.algorithms.catalogue import HEADS, WIRE, entries

SUMMARY = "Show the algorithms: paper, state, wire cost, passes."


def run() -> None:
    """Prints the algorithms as a table."""
    table = Table(*HEADS, box=None)
    for entry in entries():
        table.add_row(entry.name, *entry.cells)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"{WIRE} `ascent`, `server_update` and `averaging` combine with all that have none of their own.")
