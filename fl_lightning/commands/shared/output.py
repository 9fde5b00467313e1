"""Tables on the terminal."""

import os
import sys

from rich.console import Console
from rich.table import Table

from fl_lightning.results.terminal import TEXT, fitting


def console() -> Console:
    """Returns a console as wide as the terminal, or COLUMNS; without them, in a file or pipe, of 160 columns."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


def show_table(table: Table, keys: int = 1, text: int = TEXT) -> None:
    """Prints a table, divided if it is too wide; see `fitting`."""
    screen = console()
    for part in fitting(table, screen.width, keys, text):
        screen.print(part)
