"""A table of the algorithms.

``python -m fl_lightning.algorithms.catalogue`` prints it as Markdown; with the name of a page (fedavg.md), the rows of
that page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fl_lightning import algorithms
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import ClientContext, State

WIRE = "Each name on the wire is one model (d numbers) per participating client and phase, unless it says otherwise."


@dataclass(frozen=True)
class Entry:
    """One algorithm with its default parts; a name without a remark is a vector of d numbers.

    Attributes:
        name: Class name.
        page: Its page in docs/algorithms, named after its module.
        paper: Where it comes from.
        client: State that a client keeps, by name.
        server: State that the server keeps in addition to the model.
        down: Names sent to a client.
        up: Names uploaded.
        phases: How often a round's cohort receives and uploads.
        passes: Forward and backward passes of a local step.
        weighting: Weights of the clients' models in their mean.
    """

    name: str
    page: str
    paper: str
    client: tuple[str, ...]
    server: tuple[str, ...]
    down: tuple[str, ...]
    up: tuple[str, ...]
    phases: int
    passes: tuple[int, int]
    weighting: str

    @classmethod
    def of(cls, algorithm: type[LocalObjective]) -> Entry:
        """Describes a class by an instance with default arguments, whose client takes no step."""
        it = algorithm(net=nn.Linear(1, 1))
        w = it.flat.vector(it.net)
        ctx = ClientContext(t=0, rounds=1, m=1, flat=it.flat, lr=1.0, K=1, k_lr=1.0)
        server = State({"w": w, **State.initial(it.server_inits(), w, w)})
        sent = it.broadcast(server, ctx).only(it.wire[0])
        client = State.initial({**it.client_inits(), **it.scratch_state}, w, sent.w)
        upload, client = it.finish_local(*it.begin_local(client, sent, ctx), sent, ctx)
        return cls(
            name=algorithm.__name__,
            page=algorithm.__module__.rpartition(".")[2] + ".md",
            paper=it.paper,
            client=sizes(client, it.client_inits(), it.flat.d),
            server=sizes(server, it.server_inits(), it.flat.d),
            down=sizes(sent, it.wire[0], it.flat.d),
            up=sizes(upload, it.wire[1], it.flat.d),
            phases=it.phases,
            passes=it.passes,
            weighting=it.weighting,
        )

    def cells(self) -> list[str]:
        """Returns the cells of the table after the name."""
        lists = [", ".join(names) or "-" for names in (self.client, self.server, self.down, self.up)]
        return [self.paper, *lists, str(self.phases), "/".join(map(str, self.passes)), self.weighting]


HEADS = (
    "algorithm", "paper", "client keeps", "server keeps", "down", "up", "phases", "forward/backward a step",
    "mean of models",
)  # fmt: skip


def sizes(values: Mapping[str, Tensor], names: Iterable[str], d: int) -> tuple[str, ...]:
    """Returns names, with a remark where a value does not have d numbers."""
    remarks = {d: "", 1: " (scalar)"}
    return tuple(name + remarks.get(n := values[name].numel(), f" ({n} numbers)") for name in names)


def entries() -> list[Entry]:
    """Returns all algorithms of the package, by name."""
    return [Entry.of(getattr(algorithms, name)) for name in sorted(algorithms.__all__, key=str.lower)]


def markdown(page: str = "index.md") -> str:
    """Returns the table in a page of docs/algorithms: all algorithms, or those of the page's module."""
    rows = [e for e in entries() if page in ("index.md", e.page)]
    lines = [HEADS, ["---"] * len(HEADS), *([f"[`{e.name}`]({e.page})", *e.cells()] for e in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show() -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADS, box=None)
    for e in entries():
        table.add_row(e.name, *e.cells())
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    console.print(f"{WIRE} `ascent`, `server_update` and `averaging` combine with all that have none of their own.")


if __name__ == "__main__":
    print(markdown(*sys.argv[1:2]), end="")
