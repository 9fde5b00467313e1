"""The measurements of a run, from its ``flatness.jsonl``."""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict

from fl_lightning.core import parse_json

FILE = "flatness.jsonl"
"""In the run folder: a line for each measurement."""
PROTOCOL = "loss without weight decay, eval mode, no augmentation, in the precision of the weights"
Number = Real | None
"""NaN and infinity included."""


class Details(TypedDict, total=False):
    """Further numbers of a measurement."""

    eigenvalues: list[float]
    grid: list[float]
    density: list[float]
    clients: dict[str, float]


class Measurement(TypedDict):
    """A measurement of flatness."""

    name: str
    value: Number
    error: Number
    residual: Number
    model: str
    data: str
    samples: int
    settings: dict[str, Any]
    details: Details


class Monitored(Measurement):
    """A line of ``flatness.jsonl``."""

    round: int


def last_measurements(run: Path) -> dict[str, Monitored]:
    """Returns the last measurement of each name; a crash may have cut the very last line short.

    Raises:
        UserError: If the file is damaged.
    """
    path = run / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return {
        found["name"]: found for found in (parse_json(line, path, Monitored) for line in lines if line.endswith(b"\n"))
    }


def protocol(measured: Mapping[str, Any]) -> str:
    """Returns model, data and settings of a measurement in one line."""
    settings = [f"{name} {value}" for name, value in measured["settings"].items()]
    on = f"{measured['data']} ({measured['samples']:,})" if measured["samples"] else measured["data"]
    return ", ".join(part for part in (measured["model"], on, *settings) if part)
