"""The algorithms of the package as a table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_lightning import algorithms
from fl_lightning.objective import LocalObjective


@dataclass(frozen=True)
class Entry:
    """One algorithm with its default parts.

    Attributes:
        name: Class name.
        paper: Where it comes from.
        client: State that a client keeps, by name.
        server: State that the server keeps beside the model.
        down: Names sent to a client.
        up: Names uploaded.
        passes: Forward and backward passes of a local step.
    """

    name: str
    paper: str
    client: tuple[str, ...]
    server: tuple[str, ...]
    down: tuple[str, ...]
    up: tuple[str, ...]
    passes: tuple[int, int]

    @classmethod
    def of(cls, algorithm: type[LocalObjective]) -> Entry:
        """Describe a class by an instance with its defaults."""
        it = algorithm(net=nn.Linear(1, 1))
        return cls(
            algorithm.__name__, it.paper, tuple(it.client_rules()), tuple(it.server_rules()), it.down, it.up, it.passes
        )


def entries() -> list[Entry]:
    """All algorithms of the package, by name."""
    return [Entry.of(getattr(algorithms, name)) for name in sorted(algorithms.__all__, key=str.lower)]


def show() -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "algorithm", "paper", "client keeps", "server keeps", "down", "up", "forward/backward a step", box=None
    )
    for e in entries():
        cells = (", ".join(names) or "-" for names in (e.client, e.server, e.down, e.up))
        table.add_row(e.name, e.paper, *cells, "/".join(map(str, e.passes)))
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    console.print(
        "Wire: each name is one model (d floats) per participating client and round. "
        "`ascent`, `server_update` and `averaging` combine with all of them."
    )
