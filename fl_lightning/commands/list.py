"""``fl-lightning list``."""

from rich.table import Table

from fl_lightning.commands.shared.index import index
from fl_lightning.commands.shared.output import show_table

SUMMARY = "Show the algorithms: paper, state, wire cost, passes."


def run() -> None:
    """Prints the algorithms as a table."""
    found = index()["algorithms"]
    table = Table(*found["heads"], box=None)
    for row in found["rows"]:
        table.add_row(*row)
    show_table(table)
    print(f"{found['note']} `ascent`, `server_update` and `averaging` combine with all that have none of their own.")
