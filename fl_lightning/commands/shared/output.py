"""Tables on the terminal."""

import sys

from rich.console import Console
from rich.table import Table


def show_table(table: Table) -> None:
    """Prints a table as wide as the terminal, or with 160 columns into a file or pipe."""
    Console(width=None if sys.stdout.isatty() else 160).print(table)
