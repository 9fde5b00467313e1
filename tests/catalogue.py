"""The table of the algorithms, as docs/algorithms/index.md and the index of the command line have it."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from fl_lightning import algorithms
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import State
from fl_lightning.engine.contract import contract_of

WIRE = "Each name on the wire is one model (d numbers) per participating client and phase, unless it says otherwise."
PAGES = {
    "AFedPD": "afedpd", "AFedPDSAM": "afedpd", "FedAdamW": "fedadamw", "FedLESAM": "fedlesam", "FedLESAMD": "fedlesam",
    "FedLESAMS": "fedlesam", "FedNSAM": "fednsam", "STildeAM": "stildeam",
}  # fmt: skip
"""Pages of algorithms that stand in the module of another page."""
HEADS = (
    "algorithm", "paper", "client keeps", "server keeps", "down", "up", "phases", "forward/backward a step",
    "mean of models",
)  # fmt: skip


class Entry(NamedTuple):
    """One algorithm with its default parts.

    Attributes:
        name: Class name.
        page: Its page in docs/algorithms, named after its module, or by `PAGES`.
        cells: Its cells of the table after the name, in the order of `HEADS`.
        models: Numbers of vectors of the size of a model that a client receives and uploads in a phase.
        scalars: How many single numbers it receives and uploads.
        passes: Numbers of forward and backward passes of a local step.
    """

    name: str
    page: str
    cells: list[str]
    models: tuple[int, int]
    scalars: int
    passes: tuple[int, int]

    @classmethod
    def of(cls, algorithm: type[LocalObjective]) -> "Entry":
        """Describes a class by an instance with default arguments, by a dry step."""
        model = algorithm(net=nn.Linear(2, 3))
        contract = contract_of(model)[0]
        travels = [name for name in model.wire[1] if name not in model.recalled]
        w = model.flat.vector(model.net)
        kept = (
            (contract.client, model.client_inits()),
            (State.initial(model.server_inits(), w, w), model.server_inits()),
        )
        groups = *kept, (contract.sent, model.wire[0]), (contract.upload, travels)
        matrices = sum(n for n, shape in zip(model.flat.numels, model.flat.shapes, strict=True) if len(shape) > 1)
        remarks = {model.flat.d: "", matrices: " (of the matrices)", 1: " (scalar)"}
        lists = [sizes(values, names, remarks) for values, names in groups]
        cells = [model.paper, *lists, str(model.phases), "/".join(map(str, contract.passes)), model.weighting]
        model_sizes = model.flat.d, matrices
        down, up = ([values[name].numel() for name in names] for values, names in groups[2:])
        models = sum(n in model_sizes for n in down), sum(n in model_sizes for n in up)
        name, module = algorithm.__name__, algorithm.__module__.rpartition(".")[2]
        return cls(name, PAGES.get(name, module) + ".md", cells, models, (down + up).count(1), contract.passes)


def sizes(values: Mapping[str, Tensor], names: Iterable[str], remarks: Mapping[int, str]) -> str:
    """Returns a list of names, each with the remark for its number of values; without one, with that number."""
    return ", ".join(name + remarks.get(n := values[name].numel(), f" ({n} numbers)") for name in names) or "-"


@cache
def entries() -> tuple[Entry, ...]:
    """Returns all algorithms of the package, by name."""
    return tuple(Entry.of(getattr(algorithms, name)) for name in sorted(algorithms.__all__, key=str.lower))


def markdown() -> str:
    """Returns the table in docs/algorithms/index.md: what most readers choose by."""
    shown = [HEADS.index(head) for head in ("algorithm", "paper", "client keeps", "down", "up", HEADS[-2])]
    rows = [HEADS, *([f"[`{entry.name}`]({entry.page})", *entry.cells] for entry in entries())]
    head, *body = [f"| {' | '.join(row[i] for i in shown)} |\n" for row in rows]
    return "".join([head, f"|{'---|' * len(shown)}\n", *body])
