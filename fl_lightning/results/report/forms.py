"""The forms of the JSON files in a run folder, as far as the page shows them."""

from typing import Annotated, TypedDict

from fl_lightning.core import Interval, NonNegative
from fl_lightning.results.measurements import Measurement


class Code(TypedDict):
    """Code of the working folder or the package."""

    commit: str
    changes: str | None
    unknown_files: list[str]


class Machine(TypedDict):
    """The machine of a start."""

    system: str
    cpu: str
    cores: int | None
    threads: int
    device: str
    processes: int


class Start(TypedDict):
    """A start of a run."""

    date: str
    round: int
    command: str
    versions: dict[str, str]
    machine: Machine
    engine: str | None
    precision: str
    code: dict[str, Code | None]


class Provenance(TypedDict):
    """``provenance.json``."""

    starts: list[Start]
    changes: dict[str, str]


class _Partition(TypedDict):
    clients: int
    classes: Annotated[int, Interval("[1, 1e5]")]
    counts: list[dict[str, Annotated[int, Interval("[0, 1e15]")]]]


class Partition(_Partition, total=False):
    """``partition.json``."""

    unit: str
    names: list[str]


class Measured(TypedDict):
    """A file of the command ``flatness``."""

    round: int
    measurements: list[Measurement]


class _Reproduced(TypedDict):
    paper: str


class Reproduced(_Reproduced, total=False):
    """A paper's cell that a run reproduces."""

    table: str
    dataset: str
    model: str
    heterogeneity: str
    participation: str
    epochs: str
    algorithm: str
    metric: str
    fraction: NonNegative
    settings: str
